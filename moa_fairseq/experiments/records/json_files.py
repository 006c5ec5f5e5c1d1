"""Writes JSON files, and reads JSON and YAML files, which a stranger, a crash or a bad disk may have spoilt.

Only plain values are read: mappings, lists, text in UTF-8, numbers, true, false and null, up to a size.
"""

import contextlib
import json
import logging
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

import portalocker
import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write, disk_errors, refuse_irregular, refuse_link, sync_folder
from moa_fairseq.process import refuse_without_locks

log = logging.getLogger(__name__)

Values = dict[str, Any]  # JSON values by key
# The largest files. PyYAML reads some 100,000 bytes a second, and the longest study here has 8,000.
MOST_BYTES = {"JSON": 64 << 20, "YAML": 256 << 10}
MOST_VALUES = 100_000  # the most values of a YAML file, with every `*alias` written out
LOCK_SECONDS = 60  # the longest time that another process may take to append a line


def is_number(value: Any) -> bool:
    """True for a finite int or float that fits into a float; False for anything else, also for a bool."""
    try:
        return (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:  # an int of some hundred digits
        return False


# The kinds of values, in the words of error messages.
TEXT = "text"
NUMBER = "a number"
MAPPING = "a mapping"
LIST = "a list"
_KINDS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    NUMBER: is_number,
    MAPPING: lambda value: isinstance(value, dict),
    LIST: lambda value: isinstance(value, list),
}
# In addition to its own errors PyYAML passes on any error of a value that does not fit its tag
# (`!!bool maybe`), and Python's for text that is nested too deeply, and for numbers of some thousand digits.
_PARSE_ERRORS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_TAGS = [
    f"tag:yaml.org,2002:{name}"
    for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge")
]


def read_json(path: Path, remedy: str) -> Any:
    """The value of a JSON file.

    Args:
        path: the file, in UTF-8.
        remedy: a sentence that ends the error.

    Raises:
        FileNotFoundError: if there is no such file.
        UserError: if it is not an ordinary file, is too long, is not JSON, or has a key twice or half a
            letter (a lone surrogate); the message names the file.
    """
    return _read(
        path, "JSON", lambda text: json.loads(text, object_pairs_hook=_each_key_once), remedy
    )


def read_json_lines(path: Path, remedy: str) -> dict[int, Any]:
    """The values of a JSON Lines file.

    A last line that a kill cut off, which is not JSON and has no line end, is skipped with a warning.

    Args:
        path: the file; each of its lines is a value, or empty.
        remedy: a sentence that ends the error.

    Returns:
        Number of the line, from 1 → its value.

    Raises:
        FileNotFoundError: if there is no such file.
        UserError: see `read_json`; the message names the line.
    """
    return _read(path, "JSON", lambda text: _parse_lines(text, path), remedy)


def _parse_lines(text: str, path: Path) -> dict[int, Any]:
    """The values of the lines of a text, without a last line that was cut off."""
    values = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values[number] = json.loads(line, object_pairs_hook=_each_key_once)
        except (ValueError, RecursionError) as error:  # all errors of JSON for a text
            if number < len(lines):
                raise ValueError(f"line {number}: {error}") from error
            log.warning("%s, line %d was cut off, and does not count", path, number)
    return values


def append_json_line(path: Path, content: Any) -> None:
    """Append a value to a JSON Lines file and wait until it is on the disk; other processes may do the same.

    Earlier lines are never written again. A last line that a kill cut off is removed.

    Args:
        path: the file; it and its folder are made if necessary.
        content: the value.

    Raises:
        UserError: if the disk is full, or the file cannot be written or locked or is not an ordinary file.
    """
    line = json.dumps(content).encode("ascii") + b"\n"
    with _locked(path) as stream:
        stream.seek(0)
        last_line = stream.read().rpartition(b"\n")[2]
        if _is_json(last_line):
            line = b"\n" + line
        elif last_line:
            stream.truncate(stream.tell() - len(last_line))
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())


def check_appendable(path: Path) -> None:
    """Check that `append_json_line` can write to a file, before hours are spent on the line.

    Args:
        path: the file; it and its folder are made if necessary.

    Raises:
        UserError: see `append_json_line`.
    """
    with _locked(path):
        pass


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A locked file, to which no other process can append meanwhile."""
    refuse_link(path)
    refuse_irregular(path, "File")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with portalocker.Lock(path, "a+b", timeout=LOCK_SECONDS) as stream:
                yield stream
        # Another process holds it, or the disk has no locks
        except portalocker.LockException as error:
            refuse_without_locks(path, error)
            remedy = "Look for what holds it, and run the same command again."
            raise UserError(
                f"{path} was locked for {LOCK_SECONDS} s by another process. {remedy}"
            ) from error
        sync_folder(path.parent)


def _is_json(line: bytes) -> bool:
    """Whether a line is a value of JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):  # all errors of JSON for a text
        return False
    return True


def read_yaml(path: Path, remedy: str) -> Any:
    """The value of a YAML file.

    1e-3 is a number and 2020-01-01 is text, as in YAML 1.2. `&`, `*` and `<<` may be used, if the file with
    every alias written out stays small.

    Args:
        path: the file, in UTF-8.
        remedy: a sentence that ends the error.

    Raises:
        FileNotFoundError, UserError: see `read_json`; also for values that JSON does not have.
    """
    return _read(path, "YAML", lambda text: _load_yaml(text, path.name), remedy)


def saved_json(path: Path) -> Values:
    """The mapping in a JSON file that this program wrote; {} if there is no file, or a damaged one.

    Raises:
        UserError: if the file exists and cannot be read now, because its content must not be ignored.
    """
    try:
        content = read_json(path, "Run the same command again when it can be.")
    except FileNotFoundError:
        return {}
    except UserError as error:  # damaged
        cause = error.__cause__
        # NotADirectoryError: a folder of the path is a file, so that this file cannot exist
        if isinstance(cause, OSError) and not isinstance(cause, NotADirectoryError):
            raise
        return {}
    return content if isinstance(content, dict) else {}


def _read(path: Path, language: str, parse: Callable[[str], Any], remedy: str) -> Any:
    """Read and parse a file up to its largest size. Raise UserError for anything but plain values."""
    refuse_irregular(path, "File")
    try:
        with open(path, "rb") as stream:
            data = stream.read(MOST_BYTES[language] + 1)
        if len(data) > MOST_BYTES[language]:
            raise ValueError(f"more than {MOST_BYTES[language]:,} bytes")
        content = parse(data.decode())
        json.dumps(
            content, ensure_ascii=False
        ).encode()  # raises for a date, or half of a surrogate pair
    except FileNotFoundError:
        raise
    except OSError as error:  # from opening or reading; it has the reason
        raise UserError(f"{path} cannot be read ({error.strerror}). {remedy}") from error
    except _PARSE_ERRORS as error:
        reason = " ".join(str(error).split())[:500]
        raise UserError(f"{path} is not valid {language}: {reason}. {remedy}") from error
    return content


def _each_key_once(pairs: list[tuple[str, Any]]) -> Values:
    """A mapping of pairs; ValueError for a key that occurs twice."""
    mapping: Values = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"duplicate key {key[:80]!r}")
        mapping[key] = value
    return mapping


class _Loader(yaml.SafeLoader):
    """Numbers and text as in YAML 1.2."""

    yaml_implicit_resolvers: ClassVar = {
        letter: [(tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _load_yaml(text: str, name: str) -> Any:
    """The value of a YAML text. Raise YAMLError for too many values."""
    loader = _Loader(text)
    loader.name = name  # in the messages
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _checked_count(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _checked_count(node: yaml.Node, counted: dict[int, int]) -> int:
    """The number of values in a node, with every alias written out.

    Args:
        node: the node.
        counted: id of a node that was counted before → its number; 0 while it is counted.

    Raises:
        YAMLError: if the node contains itself, too many values, a key twice, or a value of another kind.
    """
    if id(node) in counted:
        if counted[id(node)] == 0:
            _refuse("a value that holds itself", node)
        return counted[id(node)]
    counted[id(node)] = 0
    if node.tag not in _TAGS:
        _refuse(f"a value of the kind {node.tag[:80]}", node)
    children = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
        names = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in names:
                _refuse(f"duplicate key {key.value[:80]}", key)
            names.add((key.tag, key.value))
    counted[id(node)] = 1 + sum(_checked_count(child, counted) for child in children)
    if counted[id(node)] > MOST_VALUES:
        _refuse(f"more than {MOST_VALUES:,} values, each alias written out", node)
    return counted[id(node)]


def _refuse(problem: str, node: yaml.Node) -> NoReturn:
    """Raise PyYAML's error, with the position of the node."""
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON; a failure leaves the old file unchanged."""
    with atomic_write(path) as stream:
        json.dump(content, stream, indent=1, ensure_ascii=False)
        stream.write("\n")


def write_yaml(path: Path, content: Any) -> None:
    """Write `content` as YAML with its keys in order; a failure leaves the old file unchanged."""
    with atomic_write(path) as stream:
        yaml.safe_dump(content, stream, sort_keys=False, allow_unicode=True)


def selected(mapping: Mapping[str, Any], keys: Iterable[str]) -> Values:
    """A part of a mapping: the given keys with their values.

    Args:
        mapping: the mapping.
        keys: the keys of the result, in its order; the value of a key that the mapping lacks is None.
    """
    return {key: mapping.get(key) for key in keys}


def check_kinds(
    mapping: Any, kinds: Mapping[str, str], where: str, remedy: str, required: Sequence[str] = ()
) -> None:
    """Check that a value is a mapping with values of the right kinds; other keys are not checked.

    Args:
        mapping: the value that was read.
        kinds: key → TEXT, NUMBER, MAPPING or LIST; a key may be missing or null unless it is required.
        where: the beginning of the error: the file, or the part of it.
        remedy: the last sentence of the error.
        required: keys that must be present and not null.

    Raises:
        UserError: for another value; the message names the key.
    """
    if not isinstance(mapping, dict):
        raise UserError(f"{where} must be {MAPPING}, not {reprlib.repr(mapping)}. {remedy}")
    missing = [key for key in required if mapping.get(key) is None]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}. {remedy}")
    for key, kind in kinds.items():
        value = mapping.get(key)
        if value is not None and not _KINDS[kind](value):
            raise UserError(
                f"{where}: {str(key)[:80]} must be {kind}, not {reprlib.repr(value)}. {remedy}"
            )


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key → 'old → new' for every value that differs between two mappings of JSON values.

    Args:
        before, now: the two mappings, which may contain further mappings.
        prefix: the beginning of the dotted keys.
    """
    differences: dict[str, str] = {}
    for key in sorted(before.keys() | now.keys()):
        old = before.get(key, "not set")
        new = now.get(key, "not set")
        if isinstance(old, dict) and isinstance(new, dict):
            differences.update(changes(old, new, f"{prefix}{key}."))
        elif old != new:
            differences[f"{prefix}{key}"] = f"{old} → {new}"
    return differences
