"""Logs as fairseq-generate writes them, and as they look after something went wrong."""

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.generate_log import lines_of, read_generate_log

HEADER = (
    "2024-05-01 10:00:00 | INFO | fairseq.tasks.translation | [en] dictionary: 480 types\n"
    "2024-05-01 10:00:00 | INFO | fairseq.tasks.translation | [fr] dictionary: 512 types\n"
)
END = "Generate test with beam=5: BLEU4 = 0.00, 1.0/0.0/0.0/0.0 (BP=1.000, ratio=1.000, syslen=4, reflen=4)\n"


def sentence(i, target="la cible", hypotheses=("le but",), decoded=None):
    """The lines of one sentence; `decoded` is the D line where it differs from H."""
    lines = f"S-{i}\tthe target\nT-{i}\t{target}\n"
    for rank, hypothesis in enumerate(hypotheses):
        score = -0.5 - rank
        lines += f"H-{i}\t{score}\t{hypothesis}\nD-{i}\t{score}\t{decoded or hypothesis}\nP-{i}\t-0.1 -0.2\n"
    return lines


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "generate-test.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


SORTED = HEADER + sentence(2, "deux") + sentence(10, "dix") + sentence(0, "zéro") + END
STAMPED = "2020-01-01 00:00:00 | INFO | fairseq_cli.generate | " + END
OLD = "S-0\ta\nT-0\tb\nH-0\t-1.0\tc d\nP-0\t-1.0\n"


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            SORTED,
            {
                "ids": [0, 2, 10],
                "targets": ["zéro", "deux", "dix"],
                "target_lang": "fr",
                "complete": True,
            },
        ),
        (
            sentence(0, hypotheses=("best", "worse", "worst")) + END,
            {"hypotheses": ["best"], "decoded": ["best"]},
        ),
        (
            sentence(0, "a\u2028b\u0085c\u00a0d", ("",)) + END,
            {"targets": ["a\u2028b\u0085c\u00a0d"]},
        ),
        (sentence(0, hypotheses=("",)) + END, {"hypotheses": [""]}),
        (
            sentence(0, hypotheses=("b@@ ut",), decoded="but") + END,
            {"hypotheses": ["b@@ ut"], "decoded": ["but"]},
        ),
        (
            OLD + STAMPED,
            {"hypotheses": ["c d"], "decoded": ["c d"], "complete": True},
        ),  # without D lines
    ],
)
def test_what_a_log_says(write, content, expected):
    log = read_generate_log(write(content))
    assert {name: getattr(log, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("data", "lines"), [(b"a\rb\n\n", ["a\rb", ""]), (b"a\r\nb", ["a\r", "b"]), (b"\n", [""])]
)
def test_a_carriage_return_ends_no_line_and_an_empty_line_counts(data, lines):
    assert lines_of(data, "text") == lines


def test_log_without_end_needs_permission(write):
    path = write(sentence(0) + sentence(1) + "S-2\tthe tar")
    with pytest.raises(UserError, match=r"closing line.*--allow-partial"):
        read_generate_log(path)
    log = read_generate_log(path, allow_partial=True)
    assert (log.ids, log.complete) == ([0, 1], False)


@pytest.mark.parametrize(
    "content, message",
    [
        (sentence(0) + sentence(0) + END, "line 6: S-0 occurs for the second time"),
        (
            sentence(0).encode() + b"T-1\tcaf\xe9\n" + END.encode(),
            "line 6: byte 0xe9 is not UTF-8",
        ),
        (sentence(0) + "S-1\ta\nT-1\tb\n" + END, "not both, for sentence 1"),
        ("", "no translation"),
        (HEADER + END, "no translation"),
        ("S-0\ta\nH-0\t-1.0\tb\n", "no reference"),
        (b"PK\x03\x04\xff\xfe", "line 1: byte 0xff"),
    ],
)
def test_bad_logs_are_refused_by_name(write, content, message):
    path = write(content)
    with pytest.raises(UserError, match=message) as raised:
        read_generate_log(path)
    assert str(path) in str(raised.value)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="Cannot read"):
        read_generate_log(tmp_path / "none.txt")
