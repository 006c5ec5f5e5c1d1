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
        inside = not self.cut_samples
        for position, symbol in enumerate(symbols):
            piece = None
            if symbol is not None:
                piece = self._spelled(symbol)
            if positions and (piece is None or piece.startswith(_SPACE)):
                yield self._text(spelled).strip(), positions
                spelled = ""
                positions = []
            # Every sample begins with <s>, a None at position 0; a later None ends a line
            inside = inside or (piece.startswith(_SPACE) if piece is not None else position > 0)
            if piece is not None and inside:
                spelled = spelled + piece
                positions = [*positions, position]

    def _spelled(self, symbol: str) -> str:
        """The encoding's spelling of an id, with a character for each byte; other symbols do not change."""
        if symbol.isdigit():
            return self.encoder.decoder.get(int(symbol), symbol)
        return symbol

    def _text(self, spelled: str) -> str:
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
    has_files = bpe_files(data) is not None
    if not ids or not all(map(str.isdigit, ids)) or not (has_files or hasattr(task, "mask_idx")):
        return None
    cut_samples = str(getattr(task.cfg, "sample_break_mode", "eos")) == "none"
    return Gpt2Pieces(encoder_of(data), cut_samples)
