"""From raw text to a model's symbols and back, as its training data was prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.catalogue import SENTENCEPIECE, TRANSLATION
from moa_fairseq.experiments.data.job import CODES
from moa_fairseq.experiments.data.manifest import MANIFEST, read_manifest
from moa_fairseq.experiments.data.text_files import rules_of, text_files
from moa_fairseq.experiments.data.text_stages import load_codes, words_of
from moa_fairseq.experiments.scoring.text_marks import join_subwords
from moa_fairseq.experiments.text import Step
from moa_fairseq.experiments.text.tokenizer import detokenize


class MergeCodec(NamedTuple):
    """Tokens in subwords of subword-nmt.

    Args:
        codes: the file of the merges.
    """

    codes: str

    def encode(self, line: str) -> str:
        """Tokens as subwords, all but the last of a word with the mark @@."""
        return load_codes(self.codes).process_line(line)

    def decode(self, symbols: str) -> str:
        """Subwords as tokens."""
        return join_subwords(symbols, "subword_nmt")


class PieceCodec(NamedTuple):
    """SentencePiece's pieces.

    Args:
        model: the file that has them.
    """

    model: str

    def encode(self, line: str) -> str:
        """Running text as pieces; a letter without a piece becomes bytes, or <unk> if the model has none."""
        return pieces.encode(self.model, line)

    def decode(self, symbols: str) -> str:
        """Pieces as running text."""
        return join_subwords(symbols, "sentencepiece")


class ByteCodec(NamedTuple):
    """Bytes as decimal numbers (enwik8); a line feed is the end of a line."""

    def encode(self, line: str) -> str:
        """Text as the numbers of its UTF-8 bytes."""
        return " ".join(str(byte) for byte in line.encode("utf-8"))

    def decode(self, symbols: str) -> str:
        """Numbers as text; bytes that are not UTF-8 are shown as such."""
        found = [int(symbol) for symbol in symbols.split() if symbol.isdigit()]
        return bytes(byte for byte in found if byte < 256).decode("utf-8", errors="replace")


class WordCodec(NamedTuple):
    """Words as they stand, which is also how text that is segmented already is taken."""

    def encode(self, line: str) -> str:
        """The line as it is."""
        return line

    def decode(self, symbols: str) -> str:
        """The symbols as they are."""
        return symbols


class TranslationCodec(NamedTuple):
    """Line functions, and the segmentation of both languages.

    Args:
        steps: those of the source language.
        segmentations: what segments source and target: a codec each.
        target: the target language, which text that was tokenised here is detokenised by.
    """

    steps: tuple[Step, ...] = ()
    segmentations: tuple[Any, Any] = (WordCodec(), WordCodec())
    target: str = ""

    def encode(self, line: str) -> str:
        """A raw sentence of the source language as subwords with spaces between them."""
        return self.segmentations[0].encode(words_of(line, self.steps))

    def decode(self, symbols: str) -> str:
        """Subwords of the target language as raw text; as tokens where the data set came tokenised."""
        tokens = self.segmentations[1].decode(symbols)
        is_tokenised_here = any(name == "tokenize" for name, _ in self.steps)
        if is_tokenised_here:
            return detokenize(tokens, self.target)
        return tokens


def codec_of(data: Path, kind: str) -> Any:
    """What turns raw text into symbols and back, by a folder that `moa-fairseq prepare` or a recipe made.

    Args:
        data: the binarised folder, beside its manifest.json.
        kind: of its data set: TRANSLATION or LANGUAGE_MODELING of `catalogue`.

    Raises:
        UserError: for a folder of another origin or kind of data, and where its merges or pieces are missing.
    """
    root = data.parent
    remedy = "Give text that is tokenised and segmented as the model's, with --segmented."
    rules = rules_of(read_manifest(root))
    if not rules:
        raise UserError(f"No {MANIFEST} beside {data} says how its text was prepared. {remedy}")
    if rules.get("kind") != kind or (kind == TRANSLATION and not rules.get("target")):
        if rules.get("kind") == TRANSLATION:
            verb = "translate"
        else:
            verb = "complete"
        other = f"`moa-fairseq {verb}` reads such runs, fill-mask those of masked language models."
        raise UserError(f"{root / MANIFEST} is not of data for {kind}: {other}")
    found = text_files(data)

    def pieces_of(name: str) -> PieceCodec:
        if f"model/{name}" not in found:
            raise UserError(f"{root}/model/{name} is missing, by which the text was segmented. {remedy}")
        return PieceCodec(str(found[f"model/{name}"]))

    if kind == TRANSLATION:
        steps = tuple((name, options) for name, options in rules.get("steps", ()))
        codes = next((str(found[name]) for name in (f"bpe/{CODES}", CODES) if name in found), "")
        if rules.get("merges") and not codes:
            raise UserError(f"{root}/bpe/{CODES} is missing, by which the text was segmented. {remedy}")
        pair: tuple[Any, Any] = (WordCodec(), WordCodec())
        if rules.get("encoder") == SENTENCEPIECE:
            names = pieces.names((rules["source"], rules["target"]), f"model/{pieces.MODEL}" in found)
            pair = (pieces_of(names[rules["source"]]), pieces_of(names[rules["target"]]))
        elif codes:
            pair = (MergeCodec(codes), MergeCodec(codes))
        return TranslationCodec(steps, pair, rules["target"])
    if rules.get("encoder") != SENTENCEPIECE:
        if rules.get("encoder") == "bytes":
            return ByteCodec()
        return WordCodec()
    return pieces_of(pieces.MODEL)
