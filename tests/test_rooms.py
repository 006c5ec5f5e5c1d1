"""The wings of the package and their rooms. Each imports only what is below it and nothing private.

`python tests/test_rooms.py` prints the drawing of ARCHITECTURE.md and the table of who imports whom.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "moa_fairseq"

# From the ground up. Those on one line do not know each other. A room is a folder of a wing, or a file of
# `experiments`; `layers` and `plugin` are the files of these wings themselves.
WINGS = (
    ("errors",),
    ("files",),
    ("layers", "process", "text"),
    ("integrations", "plugin"),
    ("experiments",),
    ("cli",),
)
ROOMS = (
    ("errors",),
    ("files",),
    ("layers.experts", "process", "text"),
    ("layers",),
    ("integrations", "plugin.patches"),
    ("plugin",),
    ("plugin.coordinate_descent", "plugin.criterions"),
    ("plugin.models", "plugin.tasks"),
    ("experiments.records", "experiments.tables"),
    ("experiments.make",),
    ("experiments.data",),
    ("experiments.corpus", "experiments.scoring"),
    ("experiments.convert",),
    ("experiments.recipes",),
    ("experiments.analysis",),
    ("experiments.inference", "experiments.study"),
    ("experiments.look",),
    ("cli",),
)
FAIRSEQ = ("fairseq", "omegaconf", "hydra")
OTHERS = ("transformers", "accelerate", "peft", "timm")  # what the integrations are for


@functools.cache
def imports() -> list[tuple[str, int, str]]:
    """(file, line, imported module) of every import in the package."""
    return list(_imports())


def _imports() -> Iterator[tuple[str, int, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the room"
                module = node.module or ""
                folder = (
                    PACKAGE.parent / module.replace(".", "/")
                ).is_dir() and module.startswith("moa_fairseq")
                names = (
                    [f"{module}.{alias.name}" for alias in node.names] if folder else [module]
                )
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                yield path.relative_to(PACKAGE).as_posix(), node.lineno, name


def parts_of(name: str) -> list[str]:
    """Of a file of the package, or of an imported module; empty for others' modules."""
    if name.endswith(".py"):
        parts = list(Path(name).with_suffix("").parts)
        return parts[:-1] if parts[-1] == "__init__" else parts
    first, *parts = name.split(".")
    return parts if first == "moa_fairseq" else []


def wing_of(name: str) -> str:
    return ".".join(parts_of(name)[:1])


def room_of(name: str) -> str:
    parts = parts_of(name)
    known = {room for floor in ROOMS for room in floor}
    longest = ".".join(parts[:2])
    return longest if longest in known else ".".join(parts[:1])


def arrows(place) -> dict[str, set[str]]:
    """Wing or room → those that it imports."""
    known: dict[str, set[str]] = defaultdict(set)
    for file, _, module in imports():
        if parts_of(file) and parts_of(module) and place(module) != place(file):
            known[place(file)].add(place(module))
    return known


@pytest.mark.parametrize(("floors", "place"), [(WINGS, wing_of), (ROOMS, room_of)])
def test_each_imports_only_what_is_below_it(floors, place):
    height = {name: floor for floor, names in enumerate(floors) for name in names}
    found = {place(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert found - {"", "experiments"} == set(height) - {"experiments"}
    wrong = [
        f"{one} must not import {other}"
        for one, others in arrows(place).items()
        for other in others
        if height[other] >= height[one]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_private_is_imported_from_another_room():
    wrong = [
        f"{file}:{line}: {module}"
        for file, line, module in imports()
        if any(part.startswith("_") for part in parts_of(module))
        and room_of(module) != room_of(file)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "wing", ("errors", "files", "layers", "integrations", "process", "text")
)
def test_what_needs_no_fairseq_imports_none(wing):
    wrong = [
        f"{file}:{line}"
        for file, line, module in imports()
        if wing_of(file) == wing and module.split(".")[0] in FAIRSEQ
    ]
    assert not wrong


def test_only_integrations_know_other_libraries():
    users = {wing_of(file) for file, _, module in imports() if module.split(".")[0] in OTHERS}
    knowing = {
        wing_of(file) for file, _, module in imports() if wing_of(module) == "integrations"
    }
    assert users == knowing == {"integrations"}


def drawing() -> str:
    """The wings from the top down as Mermaid draws them; an arrow goes to what is imported."""
    known = arrows(wing_of)
    lines = [
        f"    {wing} --> {' & '.join(sorted(known[wing]))}"
        for floor in reversed(WINGS)
        for wing in floor
        if known[wing]
    ]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def test_the_drawing_is_of_today():
    assert drawing() in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), drawing()


if __name__ == "__main__":
    print(drawing(), "\n")
    for number, floor in reversed(list(enumerate(ROOMS))):
        for room in floor:
            print(f"{number:2d}  {room:27s} {', '.join(sorted(arrows(room_of)[room]))}")
    for place in (wing_of, room_of):
        print(sum(len(others) for others in arrows(place).values()), "arrows")
