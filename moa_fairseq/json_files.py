"""Writes JSON files, and reads those that a crash, a bad disk or an edit may have damaged."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write


def is_number(value: Any) -> bool:
    """True for a finite int or float that fits into a float; false for true and false."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int of some hundred digits
        return False


# The kinds of values, in the words of error messages.
TEXT, NUMBER, MAPPING = "text", "a number", "a mapping"
_KINDS: Dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    NUMBER: is_number,
    MAPPING: lambda value: isinstance(value, dict),
}


def read_json(path: Path, remedy: str) -> Any:
    """The value that a JSON file holds.

    Raises FileNotFoundError, or a UserError that names the file and ends with `remedy`.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}). {remedy}") from error


def saved_json(path: Path) -> Dict[str, Any]:
    """The mapping in a JSON file that this program wrote; {} where there is none, or a damaged one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON that people can read, whole or not at all."""
    with atomic_write(path) as stream:
        json.dump(content, stream, indent=1, ensure_ascii=False)
        stream.write("\n")


def check_kinds(
    mapping: Any, kinds: Mapping[str, str], where: str, remedy: str, required: Sequence[str] = ()
) -> None:
    """Raise a UserError that names `where`, the key and `remedy` unless `mapping` is as described.

    kinds: key → TEXT, NUMBER or MAPPING. A key may be missing or null unless it is required; other keys are
    not checked.
    """
    if not isinstance(mapping, dict):
        raise UserError(f"{where} must be {MAPPING}, not {reprlib.repr(mapping)}. {remedy}")
    missing = [key for key in required if mapping.get(key) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}. {remedy}")
    for key, kind in kinds.items():
        value = mapping.get(key)
        if value is not None and not _KINDS[kind](value):
            raise UserError(f"{where}: {str(key)[:80]} must be {kind}, not {reprlib.repr(value)}. {remedy}")
