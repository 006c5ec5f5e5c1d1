"""Raw text to a model's symbols and back, as the data set that it was trained on was prepared."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import TRANSLATION
from moa_fairseq.experiments.data.job import CODES
from moa_fairseq.experiments.data.manifest import MANIFEST, read_manifest
from moa_fairseq.experiments.data.monolingual import MODEL
from moa_fairseq.experiments.data.text_files import rules_of, text_files
from moa_fairseq.experiments.data.text_stages import load_codes, words_of
from moa_fairseq.experiments.text import Step
from moa_fairseq.experiments.text.tokenizer import detokenize


class TranslationCodec(NamedTuple):
    """Line functions and merges.

    Args:
        steps: those of the source language.
        codes: the file of the merges, or "" for none.
        target: the target language, which text that was tokenised here is detokenised by.
    """

    steps: tuple[Step, ...] = ()
    codes: str = ""
    target: str = ""

    def encode(self, line: str) -> str:
        """A raw sentence of the source language as subwords with spaces between them."""
        tokens = words_of(line, self.steps)
        if self.codes:
            return load_codes(self.codes).process_line(tokens)
        return tokens

    def decode(self, symbols: str) -> str:
        """Subwords of the target language as raw text; tokens where the data set came tokenised."""
        if self.codes:
            tokens = (symbols + " ").replace("@@ ", "").strip()
        else:
            tokens = symbols
        is_tokenised_here = any(name == "tokenize" for name, _ in self.steps)
        if is_tokenised_here:
            return detokenize(tokens, self.target)
        return tokens


class PieceCodec(NamedTuple):
    """SentencePiece's pieces.

    Args:
        model: the file that has them.
    """

    model: str

    def encode(self, line: str) -> str:
        """Running text as pieces; a letter without a piece becomes <unk>."""
        processor = _processor(self.model)
        return " ".join(processor.id_to_piece(processor.encode(line)))

    def decode(self, symbols: str) -> str:
        """Pieces as running text."""
        return _processor(self.model).decode_pieces(symbols.split())


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


@functools.lru_cache(maxsize=1)
def _processor(model: str) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=model)


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
    if kind == TRANSLATION:
        codes = next((str(found[name]) for name in (f"bpe/{CODES}", CODES) if name in found), "")
        if rules.get("merges") and not codes:
            raise UserError(f"{root}/bpe/{CODES} is missing, by which the text was segmented. {remedy}")
        steps = tuple((name, options) for name, options in rules.get("steps", ()))
        return TranslationCodec(steps, codes, rules["target"])
    if rules.get("encoder") != "sentencepiece":
        if rules.get("encoder") == "bytes":
            return ByteCodec()
        return WordCodec()
    if f"model/{MODEL}" not in found:
        raise UserError(f"{root}/model/{MODEL} is missing, by which the text was segmented. {remedy}")
    return PieceCodec(str(found[f"model/{MODEL}"]))
