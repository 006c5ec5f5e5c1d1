"""SentencePiece: models are learnt on text, and turn text into pieces."""

from __future__ import annotations

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
# What SentencePiece leaves out of what it learns on, without a word: longer lines, and those with a letter
# that it uses itself.
LONGEST = 4192  # bytes
RESERVED = "\u2585"
_NEXT_LINE = "\x85"  # white space to fairseq, a letter to SentencePiece
_LIMIT = re.compile(r"too high .* <= (?P<most>\d+)|required_chars. \d+ vs (?P<least>\d+)")


def translation_settings(
    piece_model: str, byte_fallback: bool, coverage: float | None = None
) -> dict[str, Any]:
    """The trainer's settings for translation, by which decoded pieces are the raw text.

    Only white space is normalised, as scores of a text and of its NFKC form are not the same.

    Args:
        piece_model: unigram or bpe.
        byte_fallback: a character without a piece becomes the bytes of its UTF-8, and none is unknown. Of the
            training text the rarest characters, 0.05 %, have no piece then; without it all have one.
        coverage: another share of the characters that have a piece.
    """
    coverage = coverage or (0.9995 if byte_fallback else 1.0)
    settings = {"model_type": piece_model, "byte_fallback": byte_fallback, "character_coverage": coverage}
    return {**settings, "normalization_rule_name": "identity", "hard_vocab_limit": False}


def learn(
    lines: Iterable[str],
    what: object,
    count: int,
    model: Path,
    released: bool = False,
    fixed: bool = False,
    **settings: Any,
) -> dict[str, int]:
    """Learn a model on text.

    Args:
        lines: of the text.
        what: the text's file, for the error.
        count: how many pieces; without `hard_vocab_limit` fewer where the text gives no more.
        model: the file to write.
        released: lines that SentencePiece leaves out stay out; else it gets them in parts.
        fixed: the data set says the number, and nobody can ask for another.
        settings: of SentencePiece's trainer.

    Returns:
        pieces, their number; lines that were read; of these left_out, which were not learnt from.

    Raises:
        UserError: where SentencePiece cannot learn so many on this text; and as reading it raises.
    """
    facts = {"lines": 0, "left_out": 0}
    interruptions: list[BaseException] = []

    def read() -> Iterator[str]:
        try:
            for line in lines:
                facts["lines"] += 1
                if released:
                    facts["left_out"] += RESERVED in line or len(line.encode()) > LONGEST
                    yield line
                else:
                    yield from _parts(line)
        except (Exception, KeyboardInterrupt) as error:  # which the trainer turns into one of its own
            interruptions.append(error)
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
        except (RuntimeError, ValueError) as error:  # the latter for a number that is no int of C++
            if interruptions:
                raise interruptions[0] from None
            raise UserError(_story(str(error), what, count, facts, fixed)) from error
    return {"pieces": processor(str(model)).get_piece_size(), **facts}


def _story(problem: str, what: object, count: int, facts: dict[str, int], fixed: bool) -> str:
    """What is wrong where nothing is wrong with the text's form, and what helps."""
    limit = _LIMIT.search(problem)
    if "sentences_" in problem or "all_chars_count" in problem:
        if facts["left_out"]:
            why = f"all of its lines have more than {LONGEST:,} bytes, which are left out"
            return f"{what} has no text to learn pieces on: {why} (docs/defaults.md)."
        return f"{what} has no text to learn pieces on: give text."
    if limit and limit["most"]:
        number = limit["most"]
        why = f"the text has only {int(number):,}"
    elif limit:
        number = limit["least"]
        why = f"its letters alone take {int(number):,}"
    else:
        number = "N"
        why = "three are its own" if count <= 3 else problem
    story = f"SentencePiece cannot learn {count:,} pieces on {what}: {why}."
    if fixed:
        return (
            f"{story} The data set has that number: give all of its text, or take text_sp, which has --bpe."
        )
    return f"{story} Ask for another number: --bpe {number} (data.bpe)."


def _parts(line: str) -> Iterator[str]:
    """A line in parts that SentencePiece learns from, cut at spaces if there are any.

    A part is read like a word behind a space: where the cut is at a space, nothing is learnt otherwise.
    """
    line = plain(line).replace(RESERVED, " ")
    if len(line) * 4 <= LONGEST:
        yield line
        return
    text = line.encode()
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


def plain(line: str) -> str:
    """A line with white space that SentencePiece knows."""
    return line.replace(_NEXT_LINE, " ")


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
    except (OSError, RuntimeError) as error:  # what SentencePiece raises for any other file
        raise UserError(f"{model} is no model of SentencePiece's: give the file that it wrote.") from error


def encode(model: str, line: str) -> str:
    """A line as pieces between spaces; by number, so that a letter without a piece becomes <unk>."""
    found = processor(model)
    return " ".join(found.id_to_piece(found.encode(plain(line))))


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
