"""What a text shows: remaining subwords, whether it is tokenised, unknown words."""

import re
from typing import Dict, List, Sequence

_LEFT_OVER = re.compile(r"\S@@(?: |$)")
_PIECE = "\u2581"
# A sign that a tokenizer separates from its word, and the same sign alone. In numbers, commas and full stops
# stand before a digit; full stops within a line may belong to abbreviations.
_ATTACHED = re.compile(r"\w[,!?](?!\S)|\w\.$")
_ALONE = re.compile(r"(?<!\S)[,!?](?!\S)|(?<!\S)\.$")
TOKENISED, RUNNING, UNDECIDED = "tokenised", "running", "undecided"

# How fairseq writes a word that its dictionary lacks: in a reference, in a hypothesis.
_UNKNOWN_REFERENCE, _UNKNOWN_HYPOTHESIS = "<<unk>>", "<unk>"


def subword_kind(lines: Sequence[str]) -> str:
    """The kind of subwords in `lines`: "subword_nmt", "sentencepiece" or "none"."""
    if any(_LEFT_OVER.search(line) for line in lines):
        return "subword_nmt"
    # A stray ▁ is a character of the text: sentencepiece begins every line with one.
    filled = [line for line in lines if line.strip()]
    begun = sum(line.lstrip().startswith(_PIECE) for line in filled)
    return "sentencepiece" if filled and begun > len(filled) / 2 else "none"


def lines_with_subwords(lines: Sequence[str]) -> int:
    """How many lines show subwords of the kind that the text is made of; 0 for whole words."""
    kind = subword_kind(lines)
    if kind == "none":
        return 0
    return sum(_PIECE in line if kind == "sentencepiece" else bool(_LEFT_OVER.search(line)) for line in lines)


def tokenisation(lines: Sequence[str]) -> str:
    """TOKENISED, RUNNING or UNDECIDED: whether most punctuation signs stand alone or at a word."""
    attached = sum(len(_ATTACHED.findall(line)) for line in lines)
    alone = sum(len(_ALONE.findall(line)) for line in lines)
    if attached == alone:
        return UNDECIDED
    return RUNNING if attached > alone else TOKENISED


def one_word_for_unknown(line: str, reference: bool) -> str:
    """`line` with fairseq's mark of an unknown word replaced by one character that nothing splits or matches.

    multi-bleu.perl counts `<<unk>>` as one word that never matches; sacreBLEU's tokenizer would make five
    words of it, and the reference longer.
    """
    # Unicode gives these two code points no meaning.
    mark, stand_in = (_UNKNOWN_REFERENCE, "\ufdd0") if reference else (_UNKNOWN_HYPOTHESIS, "\ufdd1")
    return line.replace(mark, stand_in)


def doubts(chains: Dict[str, Sequence[str]], sides: Dict[str, List[str]]) -> List[str]:
    """Warnings about hypotheses or references that a chain is not made for.

    chains: chain → what the hypotheses and the references must be (TOKENISED, RUNNING or "" for either).
    sides: "hypotheses" and "references" → lines.
    """
    warnings = []
    for side, lines in sides.items():
        left = lines_with_subwords(lines)
        if left:
            warnings.append(
                f"{left} of {len(lines)} lines of the {side} still hold subwords (@@ or {_PIECE}), so the "
                f"scores are not those of words: join them with --remove-bpe auto"
            )
    found = [tokenisation(lines) for lines in sides.values()]
    said: Dict[str, List[str]] = {}
    for chain, wants in chains.items():
        for look, words in ((RUNNING, "untokenised"), (TOKENISED, "tokenised already")):
            wrong = [
                side
                for side, have, want in zip(sides, found, wants)
                if have == look and want and want != have
            ]
            if wrong:
                verb = f"the {' and the '.join(wrong)} look {words}"
                said.setdefault(verb, []).append(chain)
    remedies = {"untokenised": "it counts words between spaces: give tokenised text"}
    for verb, names in said.items():
        remedy = remedies.get(verb.rpartition(" ")[2], "it needs running text there: detokenise it first")
        warnings.append(f"{', '.join(names)}: {verb}; {remedy}")
    return warnings
