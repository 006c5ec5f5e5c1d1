"""From raw text to a model's symbols and back, as its training data was prepared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.catalogue import SENTENCEPIECE, TRANSLATION
from moa_fairseq.experiments.data.job import CODES
from moa_fairseq.experiments.data.manifest import MANIFEST, read_manifest
from moa_fairseq.experiments.data.text_files import TextRules, rules_of, text_files
from moa_fairseq.experiments.data.text_stages import load_codes
from moa_fairseq.text.codecs import ByteCodec, MergeCodec, PieceCodec, TranslationCodec, WordCodec

_REMEDY = "Give text that is tokenised and segmented like the model's, with --segmented."


def codec_of(data: Path, kind: str) -> Any:
    """The codec that turns raw text into symbols and back, as the training data was prepared.

    Args:
        data: a binarised folder that `moa-fairseq prepare` or a recipe made, next to its manifest.json.
        kind: the kind of its data set, `catalogue.TRANSLATION` or `catalogue.LANGUAGE_MODELING`.

    Raises:
        UserError: for a folder of another origin or kind of data, and if its merges or pieces are missing.
    """
    rules = rules_of(read_manifest(data.parent))
    if rules is None:
        raise UserError(
            f"There is no {MANIFEST} next to {data} with its text preparation. {_REMEDY}"
        )
    manifest = data.parent / MANIFEST
    if rules.kind != kind:
        verb = "translate" if rules.kind == TRANSLATION else "complete"
        raise UserError(
            f"{manifest} is not for {kind} data: `moa-fairseq {verb}` reads such runs, and "
            "`moa-fairseq fill-mask` reads runs of masked language models."
        )
    if kind == TRANSLATION and not rules.target:
        raise UserError(f"{manifest} names no target language. {_REMEDY}")
    files = text_files(data)
    if kind == TRANSLATION:
        codecs = _translation_codecs(rules, files, data.parent)
        return TranslationCodec(rules.steps, codecs, rules.target)
    if rules.encoder == SENTENCEPIECE:
        return _piece_codec(pieces.MODEL, files, data.parent)
    return ByteCodec() if rules.encoder == "bytes" else WordCodec()


def _translation_codecs(
    rules: TextRules, files: Mapping[str, Path], folder: Path
) -> tuple[Any, Any]:
    """The codecs of the source's and the target's words.

    Args:
        rules: the preparation of the text.
        files: name of a file in a prepared folder → its path.
        folder: the prepared folder, for the error.
    """
    if rules.encoder == SENTENCEPIECE:
        is_joined = f"model/{pieces.MODEL}" in files
        models = pieces.model_names((rules.source, rules.target), is_joined)
        source = _piece_codec(models[rules.source], files, folder)
        return source, _piece_codec(models[rules.target], files, folder)
    for name in (f"bpe/{CODES}", CODES):
        if name in files:
            codec = MergeCodec(load_codes(str(files[name])))
            return codec, codec
    if rules.merges:
        raise _missing(folder / "bpe" / CODES)
    return WordCodec(), WordCodec()


def _piece_codec(model: str, files: Mapping[str, Path], folder: Path) -> PieceCodec:
    """The codec of one SentencePiece model of a prepared folder."""
    name = f"model/{model}"
    if name not in files:
        raise _missing(folder / name)
    return PieceCodec(pieces.processor(str(files[name])))


def _missing(path: Path) -> UserError:
    return UserError(f"{path} is missing, but it segmented the text. {_REMEDY}")
