"""SentencePiece: learning models on text, and turning text into pieces."""

import functools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.text.codecs import PieceCodec
from moa_fairseq.text.subwords import plain

MODEL = "sentencepiece.model"
SPACE = "\u2581"  # SentencePiece's sign for a space
# SwitchHead's settings for language models. Everything else, among it the normalisation to NFKC, is
# SentencePiece's default.
RELEASED: dict[str, Any] = {"model_type": "bpe", "split_digits": True}
# SentencePiece cuts <unk>, <s> and </s> out of its training text, so that < and > are too rare there for
# pieces. WikiText's <unk> is a word of the text: it gets a piece, which fairseq does not confuse with its own
# <unk>, the symbol of letters without a piece.
LANGUAGE_MODEL: dict[str, Any] = RELEASED | {
    "user_defined_symbols": [f"{SPACE}<unk>"],
    "required_chars": "</>",
}
# SentencePiece silently skips these lines of its training text: longer lines, and lines with a letter
# that it uses itself.
LONGEST = 4192  # bytes, the default of SentencePiece's max_sentence_length
RESERVED = "\u2585"
# SentencePiece's messages for a number of pieces that is too large or too small, with the limit
_TOO_MANY = re.compile(r"too high .* <= (\d+)")
_TOO_FEW = re.compile(r"required_chars. \d+ vs (\d+)")


def translation_settings(
    piece_model: str, byte_fallback: bool, coverage: float | None = None
) -> dict[str, Any]:
    """The trainer's settings for translation: decoded pieces equal the raw text.

    Only white space is normalised, because scores of a text and of its NFKC form differ.

    Args:
        piece_model: "unigram" or "bpe".
        byte_fallback: True if a character without a piece becomes the bytes of its UTF-8, so that none is
            unknown. By default 0.05 % of the characters, the rarest, then have no piece; otherwise all have.
        coverage: the share of the characters that have a piece, instead of that default.
    """
    return {
        "model_type": piece_model,
        "byte_fallback": byte_fallback,
        "character_coverage": coverage or (0.9995 if byte_fallback else 1.0),
        "normalization_rule_name": "identity",
        "hard_vocab_limit": False,
    }


def learn(
    lines: Iterable[str],
    source: Path | str,
    count: int,
    model: Path,
    released: bool = False,
    fixed: bool = False,
    **settings: Any,
) -> dict[str, int]:
    """Learn a model on text.

    Args:
        lines: the lines of the text.
        source: the text's file, for the error.
        count: the number of pieces; without `hard_vocab_limit` a text with fewer gives fewer.
        model: the file to write.
        released: True to let SentencePiece skip the lines that it skips; False to give it parts of them.
        fixed: True if the data set determines the number, so that the user cannot choose another.
        settings: settings of SentencePiece's trainer.

    Returns:
        "pieces": the number of pieces; "lines": the number of lines that were read; "left_out": the number of
        lines that SentencePiece skipped.

    Raises:
        UserError: if SentencePiece cannot learn so many pieces on this text, or if the text cannot be read.
    """
    facts = {"lines": 0, "left_out": 0}
    failure: BaseException | None = None

    def read() -> Iterator[str]:
        nonlocal failure
        try:
            for line in lines:
                facts["lines"] += 1
                if released:
                    facts["left_out"] += RESERVED in line or len(line.encode()) > LONGEST
                    yield line
                else:
                    yield from _parts(line)
        # Kept, because the trainer replaces it by its own error
        except (Exception, KeyboardInterrupt) as error:
            failure = error
            raise

    with atomic_write(model, "wb") as stream:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=read(),
                model_writer=stream,
                minloglevel=2,
                vocab_size=count,
                **settings,
            )
        except (RuntimeError, ValueError) as error:  # a ValueError for a number beyond C++'s int
            if failure:
                raise failure from None
            raise UserError(_explanation(str(error), source, count, facts, fixed)) from error
    return {"pieces": processor(str(model)).get_piece_size()} | facts


def _explanation(
    problem: str, source: Path | str, count: int, facts: dict[str, int], fixed: bool
) -> str:
    """The message for a text in the right form on which SentencePiece cannot learn.

    Args:
        problem: SentencePiece's own message.
        source, count, fixed: see `learn`.
        facts: the numbers of lines that were read and left out.
    """
    if "sentences_" in problem or "all_chars_count" in problem:
        if facts["left_out"]:
            reason = f"SentencePiece skips all of its lines, which have more than {LONGEST:,} bytes"
            return f"{source} has no text to learn pieces on: {reason} (docs/defaults.md)."
        return f"{source} has no text to learn pieces on. Give text."
    number = "N"
    reason = "SentencePiece needs three for itself" if count <= 3 else problem
    if limit := _TOO_MANY.search(problem):
        number = limit[1]
        reason = f"the text has only {int(number):,}"
    elif limit := _TOO_FEW.search(problem):
        number = limit[1]
        reason = f"its letters alone need {int(number):,}"
    failure = f"SentencePiece cannot learn {count:,} pieces on {source}: {reason}."
    if fixed:
        return (
            f"{failure} The data set requires that number: give all of its text, or use text_sp, which has "
            "--bpe."
        )
    return f"{failure} Choose another number: --bpe {number} (data.bpe)."


def _parts(line: str) -> Iterator[str]:
    """A line in parts that SentencePiece learns from, split at spaces if there are any.

    A part is read like a word after a space: a split at a space does not change what is learnt.
    """
    text = plain(line).replace(RESERVED, " ").encode()
    start = 0
    while len(text) - start > LONGEST:
        end = text.rfind(b" ", start + 1, start + LONGEST + 1)
        if end < 0:
            end = start + LONGEST
            while text[end] & 0xC0 == 0x80:  # within a letter
                end -= 1
        yield text[start:end].decode()
        start = end
    yield text[start:].decode()


def processor(model: str) -> Any:
    """SentencePiece's processor of a file, read once per process unless the file changes.

    Raises:
        UserError: for a file that SentencePiece did not write.
    """
    stat = os.stat(model)
    return _read(model, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(model: str, size: int, time: int) -> Any:
    """Read a model; its size and time are keys of the cache."""
    try:
        return sentencepiece.SentencePieceProcessor(model_file=model)
    except (OSError, RuntimeError) as error:  # SentencePiece's errors for any other file
        raise UserError(
            f"{model} is not a SentencePiece model. Give the file that it wrote."
        ) from error


def encode(model: str, line: str) -> str:
    """A line as pieces between spaces; a letter without a piece becomes <unk>."""
    return PieceCodec(processor(model)).encode(line)


def model_names(languages: Sequence[str], joined: bool) -> dict[str, str]:
    """Language → the name of its model's file: one file for all languages (joined), or one for each."""
    stem = MODEL.removesuffix(".model")
    return {language: MODEL if joined else f"{stem}.{language}.model" for language in languages}


def write_dictionary(model: Path) -> None:
    """Write fairseq's dictionary of all pieces next to a model: `dict.*.txt`.

    A dictionary of the training text would lack the bytes and pieces that only other texts need. <unk>, <s>
    and </s> are left out, because fairseq has its own symbols for them.
    """
    vocabulary = processor(str(model))
    with atomic_write(dictionary_of(model)) as stream:
        for index in range(vocabulary.get_piece_size()):
            if not (vocabulary.is_unknown(index) or vocabulary.is_control(index)):
                stream.write(f"{vocabulary.id_to_piece(index)} 1\n")


def dictionary_of(model: Path) -> Path:
    """The dictionary next to a model."""
    return model.with_name(model.name.replace("sentencepiece", "dict").replace(".model", ".txt"))


def copy_model(model: Path, original: Path) -> int:
    """Copy a model that was learnt elsewhere, and count its pieces. Raises UserError, see `processor`."""
    processor(str(original))  # an error for another file, before it is copied
    shutil.copyfile(original, model)
    return processor(str(model)).get_piece_size()
