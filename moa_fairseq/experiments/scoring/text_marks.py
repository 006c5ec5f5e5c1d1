"""What a text shows: remaining subwords, whether it is tokenised, unknown words."""

import re
from collections.abc import Mapping, Sequence

from moa_fairseq.text.languages import language_of, writes_no_spaces

TOKENISED = "tokenised already"
RUNNING = "untokenised"
_SUBWORD = re.compile(r"\S@@(?: |$)")
_PIECE = "\u2581"
# Signs at their word, and alone. Commas stand in numbers, too, and full stops in abbreviations.
_ATTACHED = re.compile(r"\w[,!?](?!\S)|\w\.$")
_ALONE = re.compile(r"(?<!\S)[,!?](?!\S)|(?<!\S)\.$")


def lacks_spaces(lang: str | None, words: int, lines: int) -> bool:
    """True where spaces do not part words, so that n-grams of words say nothing.

    Args:
        lang: the text's language, which decides. Without one, or where three letters may stand for anything
            ("tgt"), text with hardly more words than lines has no spaces.
        words: what spaces part.
        lines: those that hold text.
    """
    if lang and (writes_no_spaces(lang) or len(language_of(lang)) == 2):
        return writes_no_spaces(lang)
    return words < 2 * lines


def subword_kind(lines: Sequence[str]) -> str:
    """The kind of subwords in `lines`: "subword_nmt", "sentencepiece" or "none"."""
    if any(map(_SUBWORD.search, lines)):
        return "subword_nmt"
    # A stray ▁ is a character of the text: sentencepiece begins every line with one.
    marks = [line.lstrip().startswith(_PIECE) for line in lines if line.strip()]
    if sum(marks) > len(marks) / 2:
        return "sentencepiece"
    return "none"


def score_warnings(
    chains: Mapping[str, Sequence[str]], sides: Mapping[str, Sequence[str]]
) -> list[str]:
    """Warnings about what the chains are not made for.

    Args:
        chains: chain → what each side must be: TOKENISED, RUNNING or "" for either.
        sides: "hypotheses" and "references" → lines, in this order.
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
