"""Ids of GPT-2's byte-pair encoding as readable text: pieces, and the words that they make."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fairseq.data.encoders.gpt2_bpe_utils import Encoder

from moa_fairseq.experiments.data.gpt2_files import bpe_files, encoder_of

_SPACE = "\u0120"  # how the encoding writes the space before a word


class Gpt2Pieces:
    """Spells symbols of a dictionary that are ids of the encoding.

    Args:
        encoder: fairseq's encoder of GPT-2's byte-pair encoding.
        cut_samples: whether samples may begin or end inside a word.
    """

    def __init__(self, encoder: Encoder, cut_samples: bool = False) -> None:
        self.encoder = encoder
        self.cut_samples = cut_samples

    def pieces(self, symbols: Sequence[str | None]) -> Iterator[tuple[str, list[int]]]:
        """Each piece as text, with its position, [position]; None stands for a symbol that does not count.

        The text of a piece that begins a word begins with a space. Bytes that are not a character by
        themselves are written as \\xNN.
        """
        for position, symbol in enumerate(symbols):
            if symbol is not None:
                yield self._text(self._spelled(symbol)), [position]

    def words(self, symbols: Sequence[str | None]) -> Iterator[tuple[str, list[int]]]:
        """Each word with the positions of its pieces; words that the sample may cut do not count."""
        positions: list[int] = []
        spelled = ""
        is_whole = not self.cut_samples
        for position, symbol in enumerate(symbols):
            piece = self._spelled(symbol) if symbol is not None else ""
            begins_word = piece.startswith(_SPACE)
            if positions and (begins_word or not piece):
                yield self._text(spelled).strip(), positions
                positions = []
                spelled = ""
            # A None at position 0 is the <s> before every sample; a later one ends a line
            is_whole = is_whole or begins_word or (symbol is None and position > 0)
            if piece and is_whole:
                positions.append(position)
                spelled += piece

    def _spelled(self, symbol: str) -> str:
        """The encoding's spelling of an id, with a character for each byte; other symbols do not change."""
        if symbol.isdigit():
            return self.encoder.decoder.get(int(symbol), symbol)
        return symbol

    def _text(self, spelled: str) -> str:
        """The bytes of a spelling as text; a symbol that is not an id does not change."""
        letters = self.encoder.byte_decoder
        if not letters.keys() >= set(spelled):
            return spelled
        return bytes(letters[letter] for letter in spelled).decode("utf-8", "backslashreplace")


def gpt2_pieces(task: Any, data: Path) -> Gpt2Pieces | None:
    """The spelling of a task's symbols, or None if they are not ids of GPT-2's encoding.

    They are ids if all of them are numbers and either the data has the encoding's files or the model is a
    masked language model. Numbers alone are not enough, because the symbols of enwik8 are numbers of bytes.

    Args:
        task: fairseq's task with the dictionary and --sample-break-mode.
        data: the binarised folder.

    Raises:
        UserError: if the symbols are ids, and the encoding's files cannot be downloaded.
    """
    dictionary = task.source_dictionary
    ids = []
    for symbol in dictionary.symbols[dictionary.nspecial :]:
        if symbol != "<mask>" and not symbol.startswith("madeupword"):  # fairseq's fillers
            ids.append(symbol)
    is_gpt2 = bpe_files(data) is not None or hasattr(task, "mask_idx")
    if not (ids and all(map(str.isdigit, ids)) and is_gpt2):
        return None
    cut_samples = str(getattr(task.cfg, "sample_break_mode", "eos")) == "none"
    return Gpt2Pieces(encoder_of(data), cut_samples)
