"""From raw text to a model's symbols and back, as its training data was prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.catalogue import SENTENCEPIECE, TRANSLATION
from moa_fairseq.experiments.data.job import CODES
from moa_fairseq.experiments.data.manifest import MANIFEST, read_manifest
from moa_fairseq.experiments.data.text_files import rules_of, text_files
from moa_fairseq.experiments.data.text_stages import load_codes
from moa_fairseq.text.codecs import ByteCodec, MergeCodec, PieceCodec, TranslationCodec, WordCodec


def codec_of(data: Path, kind: str) -> Any:
    """The codec that turns raw text into symbols and back, as the training data was prepared.

    Args:
        data: a binarised folder that `moa-fairseq prepare` or a recipe made, next to its manifest.json.
        kind: the kind of its data set, `catalogue.TRANSLATION` or `catalogue.LANGUAGE_MODELING`.

    Raises:
        UserError: for a folder of another origin or kind of data, and if its merges or pieces are missing.
    """
    root = data.parent
    remedy = "Give text that is tokenised and segmented like the model's, with --segmented."
    rules = rules_of(read_manifest(root))
    if not rules:
        raise UserError(
            f"There is no {MANIFEST} next to {data} with its text preparation. {remedy}"
        )
    if rules.get("kind") != kind or (kind == TRANSLATION and not rules.get("target")):
        verb = "translate" if rules.get("kind") == TRANSLATION else "complete"
        hint = f"`moa-fairseq {verb}` reads such runs, fill-mask those of masked language models."
        raise UserError(f"{root / MANIFEST} is not for {kind} data: {hint}")
    files = text_files(data)

    def pieces_of(name: str) -> PieceCodec:
        if f"model/{name}" not in files:
            raise UserError(f"{root}/model/{name} is missing, but it segmented the text. {remedy}")
        return PieceCodec(pieces.processor(str(files[f"model/{name}"])))

    if kind == TRANSLATION:
        steps = tuple((name, options) for name, options in rules.get("steps", ()))
        codes = next((str(files[name]) for name in (f"bpe/{CODES}", CODES) if name in files), "")
        if rules.get("merges") and not codes:
            raise UserError(f"{root}/bpe/{CODES} is missing, but it segmented the text. {remedy}")
        pair: tuple[Any, Any] = (WordCodec(), WordCodec())
        if rules.get("encoder") == SENTENCEPIECE:
            names = pieces.names(
                (rules["source"], rules["target"]), f"model/{pieces.MODEL}" in files
            )
            pair = (pieces_of(names[rules["source"]]), pieces_of(names[rules["target"]]))
        elif codes:
            merges = MergeCodec(load_codes(codes))
            pair = (merges, merges)
        return TranslationCodec(steps, pair, rules["target"])
    if rules.get("encoder") != SENTENCEPIECE:
        if rules.get("encoder") == "bytes":
            return ByteCodec()
        return WordCodec()
    return pieces_of(pieces.MODEL)
