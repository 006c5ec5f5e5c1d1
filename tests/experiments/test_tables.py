"""Tables: widths, wrapping, and the same as Markdown."""

import io

import pytest

from moa_fairseq.cli import main
from moa_fairseq.experiments.tables import Column, Table, Terminal, page

TABLE = Table(
    [
        Column("name", "Name", once=True),
        Column("share", "share", ".1%"),
        Column("count", "how-many tokens", ","),
        Column("never", "never"),
        Column("what", "What"),
    ],
    [
        {
            "name": "a_name",
            "share": 0.125,
            "count": 12345,
            "what": "`code` and more words than fit",
        },
        {"name": "a_name", "count": 7, "what": "-"},
    ],
)


@pytest.mark.parametrize("width", [30, 40, 60, 100])
def test_cells_are_wrapped_until_they_fit(width):
    lines = TABLE.text(width).splitlines()
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    for whole in ("12.5%", "12,345", "a_name", "code"):
        assert words.count(whole) == 1
    assert "never" not in words and len({line.find("-") for line in lines[-1:]}) == 1


def test_numbers_stand_on_the_right():
    first, second = TABLE.text(100).splitlines()[2:]
    assert first.index("12,345") + len("12,345") == second.index(" 7") + 2


def test_markdown_is_as_written():
    assert TABLE.markdown().splitlines() == [
        "| Name | share | how-many tokens | What |",
        "| --- | --: | --: | --- |",
        "| a_name | 12.5% | 12,345 | `code` and more words than fit |",
        "| a_name |  | 7 | - |",
    ]


FOREIGN = "a|b\\|c\x1b]0;title\x07\x9b2J\nd"


def test_foreign_text_stays_in_its_cell():
    table = Table([Column("name", "a|b")], [{"name": FOREIGN}])
    head, _, line = table.markdown().splitlines()
    assert head == "| a\\|b |"
    assert line == "| a\\|b\\|c\\x1b]0;title\\x07\\x9b2J d |"
    assert not {"\x1b", "\x07", "\x9b"} & {*table.text(100)}


def test_a_terminal_is_shown_no_control_character_but_colours():
    stream = io.StringIO()
    print("\r\x1b[K\033[38;5;9mred\033[0m", FOREIGN, file=Terminal(stream))
    assert (
        stream.getvalue()
        == "\r\x1b[K\033[38;5;9mred\033[0m a|b\\|c\\x1b]0;title\\x07\\x9b2J\nd\n"
    )


def test_an_error_about_a_foreign_name_moves_no_cursor(capsys):
    assert main(["score", "no\x1b[2J\x9bfile"]) == 2
    assert "no\\x1b[2J\\x9bfile" in capsys.readouterr().err


def test_a_page_is_text_for_people_or_markdown():
    blocks = [
        "### Head",
        "Some **bold** words",
        "",
        "- one of `several`\n- two",
        TABLE,
        Table([], []),
    ]
    assert page(blocks, markdown=True).startswith(
        "### Head\n\nSome **bold** words\n\n- one of `several`\n- two"
    )
    text = page(blocks, width=12).splitlines()
    assert text[:9] == [
        "Head",
        "====",
        "",
        "Some bold",
        "words",
        "",
        "- one of",
        "  several",
        "- two",
    ]


def test_what_stands_in_the_line_above_is_left_out_where_the_column_says_so():
    rows = [{"name": name, "same": "same"} for name in ("a", "a", "a", "b", "a")]
    table = Table([Column("name", "Name", once=True), Column("same", "Same")], rows)
    lines = table.text(40).splitlines()[2:]
    assert [line.split() for line in lines] == [
        ["a", "same"],
        ["same"],
        ["same"],
        ["b", "same"],
        ["a", "same"],
    ]
    assert table.markdown().count("| a |") == 4
