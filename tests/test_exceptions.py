"""Handlers of broad exceptions: each is looked at, and says what it is meant for."""

import ast
from collections.abc import Iterator
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.download import Unavailable  # noqa: F401  (and what it imports: subclasses)

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("moa_fairseq", "benchmarks", "scripts", "data-prep", "docs")
# Each has more causes than whoever writes a handler thinks of. No right to read a file, a full disk and a
# file system without locks are OSErrors; a mistake in the code may be any of them.
BROAD = {
    "BaseException",
    "Exception",
    "OSError",
    "RuntimeError",
    "UserError",
    "ValueError",
    "LockException",
}


def unexplained(path: Path) -> Iterator[int]:
    """Lines of handlers with a broad exception and without a comment in that line, or next to it."""
    text = path.read_text(encoding="utf-8")
    lines = ["", *text.splitlines(), ""]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            kinds = [node.type or ast.Name("BaseException")]
            last = node.body[0].lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            kinds = node.args
            last = node.end_lineno + 1
        else:
            continue
        parts = (part for kind in kinds for part in ast.walk(kind))
        names = {getattr(part, "id", getattr(part, "attr", "")) for part in parts}
        is_explained = any("# " in line for line in lines[node.lineno - 1 : last + 1])
        if names & BROAD and not is_explained:
            yield node.lineno


def test_every_handler_of_a_broad_exception_says_what_it_is_meant_for():
    """Narrow it, or write a comment: in the line of `except` or `suppress`, or the one before or behind."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unexplained(path)]
    assert not found


def subclasses(kind: type) -> Iterator[type]:
    yield kind
    for one in kind.__subclasses__():
        yield from subclasses(one)


def test_no_error_has_two_full_stops():
    """A reason in it, of another program, may end in one; a path may have two, and an omission three."""
    message = "a.txt: The disk is full.. Name x/.., .. or 'b'.. for all... of it.."
    kinds = [*subclasses(UserError)]
    assert len(kinds) >= 4
    for kind in kinds:
        assert (
            str(kind(message))
            == "a.txt: The disk is full. Name x/.., .. or 'b'. for all... of it."
        )


def test_a_new_one_is_noticed(tmp_path):
    path = tmp_path / "x.py"
    for handler, noticed in (
        ("except OSError:", True),
        ("except (KeyError, portalocker.LockException) as error:", True),
        ("except:", True),
        ("except OSError:  # only Linux has it", False),
        ("except FileNotFoundError:", False),
    ):
        path.write_text(f"try:\n    work()\n{handler}\n    pass\n")
        assert list(unexplained(path)) == [3] * noticed, handler
    path.write_text("with contextlib.suppress(Exception):\n    work()\n")
    assert list(unexplained(path)) == [1]
