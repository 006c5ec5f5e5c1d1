"""The rooms of the package: each imports only rooms below it, and no private module of another.

`python tests/test_rooms.py` prints the table.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "moa_fairseq"

# From the ground up. Rooms on one line do not know each other.
FLOORS = (
    ("errors", "torch_compat", "host_memory"),
    ("tables",),
    ("files",),
    ("kernels",),
    ("attention", "json_files", "text"),
    ("running",),
    ("fairseq_patches", "feed_forward", "integrations"),
    ("fairseq_compat",),
    ("transformer",),
    ("coordinate_descent", "criterions"),
    ("models", "tasks"),
    ("data_prep",),
    ("corpus", "evaluation"),
    ("convert",),
    ("recipes",),
    ("analysis",),
    ("inference", "study"),
    ("cli",),
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
TORCH_ALONE = ("kernels", "attention", "feed_forward", "errors", "torch_compat")
FAIRSEQ = ("fairseq", "omegaconf", "hydra")
OTHERS = ("transformers", "accelerate", "peft", "timm")  # what the integrations are for


@functools.cache
def imports() -> List[Tuple[str, int, str]]:
    """(file, line, imported module) of every import in the package."""
    return list(_imports())


def _imports() -> Iterator[Tuple[str, int, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the room"
                whole = node.module == "moa_fairseq"
                names = [f"moa_fairseq.{alias.name}" for alias in node.names] if whole else [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                yield path.relative_to(PACKAGE).as_posix(), node.lineno, name


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def test_every_room_has_its_floor():
    rooms = {room_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert rooms - {"__init__"} == set(FLOOR)


def test_rooms_import_only_what_is_below_them():
    wrong = []
    for file, line, module in imports():
        room, parts = room_of(file), module.split(".")
        if parts[0] != "moa_fairseq" or len(parts) < 2 or room == "__init__":
            continue
        other = parts[1]
        if other != room and FLOOR[other] >= FLOOR[room]:
            wrong.append(f"{file}:{line}: {room} must not know {other}")
        if other != room and any(part.startswith("_") for part in parts[2:]):
            wrong.append(f"{file}:{line}: {module} is private to {other}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", (*TORCH_ALONE, "integrations"))
def test_the_attention_needs_no_fairseq(room):
    wrong = [
        f"{file}:{line}"
        for file, line, module in imports()
        if room_of(file) == room and module.split(".")[0] in FAIRSEQ
    ]
    assert not wrong


def test_only_integrations_know_other_libraries():
    users = {room_of(file) for file, _, module in imports() if module.split(".")[0] in OTHERS}
    inside = "moa_fairseq.integrations"
    knowing = {room_of(file) for file, _, module in imports() if module.startswith(inside)}
    assert users == knowing == {"integrations"}


def table() -> str:
    """Which room imports which, from the top floor down."""
    known: Dict[str, Set[str]] = defaultdict(set)
    for file, _, module in imports():
        parts = module.split(".")
        if parts[0] == "moa_fairseq" and len(parts) > 1 and parts[1] != room_of(file):
            known[room_of(file)].add(parts[1])
    rooms = [room for floor in reversed(FLOORS) for room in floor]
    return "\n".join(f"{FLOOR[room]:2d}  {room:18s} {', '.join(sorted(known[room]))}" for room in rooms)


if __name__ == "__main__":
    print(table())
