"""Conversion between raw text and a model's symbols: merges, pieces, bytes, ids or words.

Symbols are separated by spaces. These classes need neither fairseq nor the rest of the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from moa_fairseq.text.steps import Step, detokenize, words_of
from moa_fairseq.text.subwords import join_subwords, plain

# The number of words whose segmentation is cached. subword-nmt's cache has no limit, and is cleared beyond
# it.
REMEMBERED = 1_000_000


class MergeCodec(NamedTuple):
    """Tokens as subwords of subword-nmt.

    Args:
        merges: a `BPE` of subword-nmt.
    """

    merges: Any

    def encode(self, line: str) -> str:
        """Tokens as subwords; every subword of a word except the last ends in the mark @@."""
        if len(self.merges.cache) > REMEMBERED:
            self.merges.cache.clear()
        return self.merges.process_line(line)

    def text(self) -> str:
        """The merges in the format of subword-nmt's files."""
        rows = sorted(self.merges.bpe_codes, key=self.merges.bpe_codes.__getitem__)
        version = ".".join(map(str, self.merges.version))
        return f"#version: {version}\n" + "".join(f"{first} {second}\n" for first, second in rows)

    def decode(self, symbols: str) -> str:
        """Subwords as tokens."""
        return join_subwords(symbols, "subword_nmt")


class PieceCodec(NamedTuple):
    """SentencePiece's pieces.

    Args:
        processor: SentencePiece's processor, which holds the pieces.
    """

    processor: Any

    def encode(self, line: str) -> str:
        """Running text as pieces; a letter without a piece becomes bytes, or <unk> if the model has none."""
        # Encoded as text, such a letter would be a piece itself; encoded as a number, it becomes <unk>.
        return " ".join(self.processor.id_to_piece(self.processor.encode(plain(line))))

    def decode(self, symbols: str) -> str:
        """Pieces as running text."""
        return join_subwords(symbols, "sentencepiece")


class ByteCodec(NamedTuple):
    """Bytes as decimal numbers (enwik8); a line ends with a line feed."""

    def encode(self, line: str) -> str:
        """Text as the numbers of its UTF-8 bytes."""
        return " ".join(map(str, line.encode()))

    def decode(self, symbols: str) -> str:
        """Numbers as text; bytes that are not UTF-8 become replacement characters."""
        numbers = map(int, filter(str.isdigit, symbols.split()))
        return bytes(byte for byte in numbers if byte < 256).decode("utf-8", errors="replace")


class Gpt2Codec:
    """GPT-2's byte-pair encoding, computed by `tokenizers`. A symbol is an id, or a mark such as <mask>.

    Args:
        encoder, merges: the paths of encoder.json and vocab.bpe.
    """

    def __init__(self, encoder: str, merges: str):
        self.files = (encoder, merges)
        self._bpe: Any = None

    @property
    def bpe(self) -> Any:
        """The encoding, which is loaded at its first use, because export only copies the files."""
        if self._bpe is None:
            from tokenizers import ByteLevelBPETokenizer

            self._bpe = ByteLevelBPETokenizer.from_file(*self.files)
        return self._bpe

    def encode(self, line: str) -> str:
        """Running text as ids. <mask> stands for a word with the blank before it."""
        parts = line.split("<mask>")
        if len(parts) > 1:
            parts = [part.rstrip() for part in parts]
        symbols = [" ".join(map(str, self.bpe.encode(part).ids)) for part in parts]
        return " <mask> ".join(symbols).strip()

    def decode(self, symbols: str) -> str:
        """Ids as running text; other symbols are not changed."""
        text = ""
        for is_ids, run in itertools.groupby(symbols.split(), str.isdigit):
            words = list(run)
            text += self.bpe.decode(list(map(int, words))) if is_ids else "".join(words)
        return text


class WordCodec(NamedTuple):
    """Words without any segmentation; also for text that is already segmented."""

    def encode(self, line: str) -> str:
        """The line, unchanged."""
        return line

    def decode(self, symbols: str) -> str:
        """The symbols, unchanged."""
        return symbols


class TranslationCodec(NamedTuple):
    """Functions of a line, and the segmentation of both languages.

    Args:
        steps: the steps for the source language.
        segmentations: the codecs of source and target.
        target: the code of the target language, for the detokeniser.
    """

    steps: Sequence[Step] = ()
    segmentations: tuple[Any, Any] = (WordCodec(), WordCodec())
    target: str = ""

    def encode(self, line: str) -> str:
        """A raw sentence of the source language as subwords with spaces between them."""
        return self.segmentations[0].encode(words_of(line, self.steps))

    def encode_target(self, line: str) -> str:
        """A raw sentence of the target language as subwords, by the same steps."""
        steps = []
        for name, options in self.steps:
            if "lang" in options:
                options = options | {"lang": self.target}
            steps.append((name, options))
        return self.segmentations[1].encode(words_of(line, steps))

    def decode(self, symbols: str) -> str:
        """Subwords of the target language as raw text; as tokens if the data set was already tokenised."""
        tokens = self.segmentations[1].decode(symbols)
        is_tokenised_here = any(name == "tokenize" for name, _ in self.steps)
        if is_tokenised_here:
            return detokenize(tokens, self.target)
        return tokens
