"""Properties of a text that its lines show: subwords, tokenisation, and whether spaces separate words."""

import re
from collections.abc import Mapping, Sequence

from moa_fairseq.text.languages import language_of, writes_no_spaces

TOKENISED = "tokenised already"
RUNNING = "untokenised"
_SUBWORD = re.compile(r"\S@@(?: |$)")
_PIECE = "\u2581"
# Punctuation attached to a word (running text), and alone (tokenised text). A comma inside a number and the
# full stop of an abbreviation do not count
_ATTACHED = re.compile(r"\w[,!?](?!\S)|\w\.$")
_ALONE = re.compile(r"(?<!\S)[,!?](?!\S)|(?<!\S)\.$")


def lacks_spaces(lang: str | None, words: int, lines: int) -> bool:
    """Whether a text has no spaces between words, so that n-grams of words mean nothing.

    Args:
        lang: the language of the text, which decides if it is known. Without one, or for a name of three
            letters, which may mean anything ("tgt"), fewer than two words per line mean no spaces.
        words: the number of words separated by spaces.
        lines: the number of lines that are not empty.
    """
    if lang and (writes_no_spaces(lang) or len(language_of(lang)) == 2):
        return writes_no_spaces(lang)
    return words < 2 * lines


def subword_kind(lines: Sequence[str]) -> str:
    """The kind of subwords in `lines`: "subword_nmt", "sentencepiece" or "none"."""
    if any(map(_SUBWORD.search, lines)):
        return "subword_nmt"
    # SentencePiece begins every line with ▁; a single ▁ elsewhere is a character of the text
    marks = [line.lstrip().startswith(_PIECE) for line in lines if line.strip()]
    if sum(marks) > len(marks) / 2:
        return "sentencepiece"
    return "none"


def score_warnings(
    chains: Mapping[str, Sequence[str]], sides: Mapping[str, Sequence[str]]
) -> list[str]:
    """Warnings about texts that are not in the form that a chain needs.

    Args:
        chains: chain → the form of hypotheses and references: TOKENISED, RUNNING, or "" for either.
        sides: "hypotheses" and "references", in this order → lines.
    """
    warnings = []
    for number, (side, lines) in enumerate(sides.items()):
        if subword_kind(lines) != "none":
            warnings.append(
                f"the {side} still hold subwords (@@ or {_PIECE}): give --remove-bpe auto"
            )
        attached = sum(len(_ATTACHED.findall(line)) for line in lines)
        alone = sum(len(_ALONE.findall(line)) for line in lines)
        look = RUNNING if attached > alone else TOKENISED
        wrong = ", ".join(name for name, wants in chains.items() if wants[number] not in ("", look))
        if wrong and attached != alone:
            remedy = "detokenise" if look == TOKENISED else "tokenise"
            warnings.append(
                f"{wrong}: the {side} look {look}, which makes the score wrong: {remedy} them"
            )
    return warnings
