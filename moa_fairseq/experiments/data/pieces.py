"""SentencePiece: models are learnt on text, and turn text into pieces."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

MODEL = "sentencepiece.model"
SPACE = "\u2581"  # SentencePiece's sign for one
# SwitchHead's, of language models: the text is normalised (NFKC), and all else is SentencePiece's default.
RELEASED: dict[str, Any] = {"model_type": "bpe", "split_digits": True}
# SentencePiece cuts <unk>, <s> and </s> out of what it learns on, so that < and > are too rare there for
# pieces. WikiText's <unk> is a word of the text: it gets a piece, which fairseq does not take for its own
# <unk>, that of letters without a piece.
LANGUAGE_MODEL: dict[str, Any] = {
    **RELEASED,
    "user_defined_symbols": [f"{SPACE}<unk>"],
    "required_chars": "</>",
}


def translation_settings(piece_model: str, byte_fallback: bool) -> dict[str, Any]:
    """The trainer's settings for translation, by which decoded pieces are the raw text.

    Only white space is normalised, as scores of a text and of its NFKC form are not the same.

    Args:
        piece_model: unigram or bpe.
        byte_fallback: a character without a piece becomes the bytes of its UTF-8, and none is unknown. Of the
            training text the rarest characters, 0.05 %, have no piece then; without it all have one.
    """
    coverage = 0.9995 if byte_fallback else 1.0
    settings = {"model_type": piece_model, "byte_fallback": byte_fallback, "character_coverage": coverage}
    return {**settings, "normalization_rule_name": "identity", "hard_vocab_limit": False}


def learn(lines: Iterable[str], what: object, count: int, model: Path, **settings: Any) -> int:
    """Learn a model on text.

    Args:
        lines: of the text.
        what: the text's file, for the error.
        count: how many pieces; without `hard_vocab_limit` fewer where the text gives no more.
        model: the file to write.
        settings: of SentencePiece's trainer.

    Returns:
        The number of pieces.

    Raises:
        UserError: where SentencePiece cannot learn so many on this text.
    """
    with atomic_write(model, "wb") as stream:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=stream,
                minloglevel=2,
                vocab_size=count,
                **settings,
            )
        except RuntimeError as error:
            problem = f"SentencePiece cannot learn {count:,} pieces on {what}: {error}"
            raise UserError(f"{problem}. Ask for another number: --bpe N (data.bpe).") from error
    return processor(str(model)).get_piece_size()


def processor(model: str) -> Any:
    """SentencePiece's processor of a file, read once per process unless the file changes.

    Raises:
        UserError: for a file that SentencePiece did not write.
    """
    stat = os.stat(model)
    return _read(model, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(model: str, size: int, time: int) -> Any:
    try:
        return sentencepiece.SentencePieceProcessor(model_file=model)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{model} is no model of SentencePiece's: give the file that it wrote.") from error


def encode(model: str, line: str) -> str:
    """A line as pieces between spaces; by number, so that a letter without a piece becomes <unk>."""
    found = processor(model)
    return " ".join(found.id_to_piece(found.encode(line)))


def names(languages: Sequence[str], joined: bool) -> dict[str, str]:
    """Language → the file of its model: one for both, or one for each."""
    stem = MODEL.removesuffix(".model")
    return {language: MODEL if joined else f"{stem}.{language}.model" for language in languages}


def write_dictionary(model: Path) -> None:
    """Write fairseq's dictionary of all pieces beside a model: `dict.*.txt`.

    That of the training text would lack the bytes and pieces that only other texts need. fairseq has symbols
    of its own for <unk>, <s> and </s>, which are not written.
    """
    found = processor(str(model))
    texts = [number for number in range(found.get_piece_size()) if not found.is_unknown(number)]
    with atomic_write(dictionary_of(model)) as stream:
        stream.writelines(
            f"{found.id_to_piece(number)} 1\n" for number in texts if not found.is_control(number)
        )


def dictionary_of(model: Path) -> Path:
    """The dictionary beside a model."""
    return model.with_name(model.name.replace("sentencepiece", "dict").replace(".model", ".txt"))


def obtain(model: Path, given: Path) -> int:
    """Copy a model that was learnt elsewhere, and count its pieces. Raises UserError as `processor`."""
    processor(str(given))
    shutil.copyfile(given, model)
    return processor(str(model)).get_piece_size()
