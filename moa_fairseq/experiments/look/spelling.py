"""How the symbols of a dictionary are shown on a page: as text, and whether they continue a word."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.experiments.analysis.expert_tokens import BEGINS, CONTINUES
from moa_fairseq.experiments.analysis.gpt2_pieces import Gpt2Pieces, gpt2_pieces
from moa_fairseq.experiments.inference.text_model import TextModel
from moa_fairseq.text.codecs import ByteCodec


class Spelled(NamedTuple):
    """A symbol as the page shows it.

    Args:
        text: what is shown.
        is_glued: whether the symbol continues the word of the symbol before it.
    """

    text: str
    is_glued: bool


Symbols = Sequence[str]
Spelling = Callable[[Symbols], list[Spelled]]


def spelling_of(model: TextModel, dictionary: Any, data: Path) -> Spelling:
    """The function that spells the symbols of a sentence.

    Args:
        model: the model of a run, with its codec.
        dictionary: fairseq's dictionary of the symbols.
        data: the binarised folder, which may have the files of GPT-2's encoding.
    """
    if gpt2 := gpt2_pieces(model.task, data):
        return functools.partial(_spell_gpt2_ids, gpt2)
    if isinstance(model.codec, ByteCodec):
        return functools.partial(_spell_bytes, model.codec)
    if any(symbol.startswith(BEGINS) for symbol in dictionary.symbols):
        return _spell_pieces
    return _spell_merges


def _spell_gpt2_ids(gpt2: Gpt2Pieces, symbols: Symbols) -> list[Spelled]:
    """Ids of GPT-2's encoding: a piece with a space before it begins a word."""
    spelled = []
    for text, _ in gpt2.pieces(symbols):
        spelled.append(Spelled(text.strip() or text, not text.startswith((" ", "<"))))
    return spelled


def _spell_bytes(codec: ByteCodec, symbols: Symbols) -> list[Spelled]:
    """Numbers of bytes as characters, none of which begins a word."""
    return [Spelled(codec.decode(symbol) or symbol, True) for symbol in symbols]


def _spell_pieces(symbols: Symbols) -> list[Spelled]:
    """SentencePiece's pieces: BEGINS stands before the first piece of a word."""
    spelled = []
    for symbol in symbols:
        is_glued = not symbol.startswith((BEGINS, "<"))
        spelled.append(Spelled(symbol.removeprefix(BEGINS) or BEGINS, is_glued))
    return spelled


def _spell_merges(symbols: Symbols) -> list[Spelled]:
    """Subwords of subword-nmt: CONTINUES stands after each subword of a word but the last."""
    spelled = []
    is_glued = False
    for symbol in symbols:
        spelled.append(Spelled(symbol.removesuffix(CONTINUES) or symbol, is_glued))
        is_glued = symbol.endswith(CONTINUES)
    return spelled
