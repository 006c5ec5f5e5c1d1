"""What a text shows: remaining subwords, whether it is tokenised, unknown words."""

import re
from typing import List, Mapping, Sequence

TOKENISED, RUNNING = "tokenised already", "untokenised"
_SUBWORD, _PIECE = re.compile(r"\S@@(?: |$)"), "\u2581"
# Signs at their word, and alone. Commas stand in numbers, too, and full stops in abbreviations.
_ATTACHED = re.compile(r"\w[,!?](?!\S)|\w\.$")
_ALONE = re.compile(r"(?<!\S)[,!?](?!\S)|(?<!\S)\.$")


def subword_kind(lines: Sequence[str]) -> str:
    """The kind of subwords in `lines`: "subword_nmt", "sentencepiece" or "none"."""
    if any(_SUBWORD.search(line) for line in lines):
        return "subword_nmt"
    # A stray ▁ is a character of the text: sentencepiece begins every line with one.
    marks = [line.lstrip().startswith(_PIECE) for line in lines if line.strip()]
    return "sentencepiece" if sum(marks) > len(marks) / 2 else "none"


def doubts(chains: Mapping[str, Sequence[str]], sides: Mapping[str, Sequence[str]]) -> List[str]:
    """Warnings about what the chains are not made for.

    sides: "hypotheses" and "references" → lines. chains: chain → what each side must be: TOKENISED, RUNNING
    or "" for either.
    """
    warnings = []
    for number, (side, lines) in enumerate(sides.items()):
        if subword_kind(lines) != "none":
            warnings.append(f"the {side} still hold subwords (@@ or {_PIECE}): give --remove-bpe auto")
        attached, alone = (sum(len(sign.findall(line)) for line in lines) for sign in (_ATTACHED, _ALONE))
        look = RUNNING if attached > alone else TOKENISED
        wrong = ", ".join(name for name, wants in chains.items() if wants[number] not in ("", look))
        if wrong and attached != alone:
            remedy = "detokenise" if look == TOKENISED else "tokenise"
            warnings.append(f"{wrong}: the {side} look {look}, which makes the score wrong: {remedy} them")
    return warnings
