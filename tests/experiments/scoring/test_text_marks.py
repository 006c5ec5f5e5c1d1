"""What the lines of a text show, at the limits between two answers."""

import pytest

from moa_fairseq.experiments.scoring.text_marks import (
    lacks_spaces,
    score_warnings,
    subword_kind,
)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([], "none"),
        (["", " "], "none"),
        (["\u2581a b", "c"], "none"),
        (["\u2581a b", "", "\u2581c", "d"], "sentencepiece"),
        (["a@@ b", "c"], "subword_nmt"),
        (["a @@ b"], "none"),
    ],
)
def test_most_lines_with_words_begin_with_a_piece_of_sentencepiece(lines, kind):
    assert subword_kind(lines) == kind


@pytest.mark.parametrize(
    ("words", "lines", "lacks"), [(1, 1, True), (2, 1, False), (0, 0, False)]
)
def test_two_words_in_a_line_are_separated_by_spaces(words, lines, lacks):
    assert lacks_spaces(None, words, lines) == lacks


@pytest.mark.parametrize(
    ("line", "chains"),
    [("a, b", ["tokens"]), ("a , b", ["text"]), ("a, b , c", []), ("", [])],
)
def test_a_chain_is_doubted_if_more_marks_stand_in_the_other_form(line, chains):
    forms = {"tokens": ("tokenised already", ""), "text": ("untokenised", ""), "any": ("", "")}
    warnings = score_warnings(forms, {"hypotheses": [line], "references": [line]})
    assert [warning.partition(":")[0] for warning in warnings] == chains
