"""The planted faults of faults.yaml: each can be planted, and what it asks is there."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from test_rooms import PACKAGE, room_of

FAULTS = faults.load()
FIELDS = {"id", "room", "file", "old", "new", "what", "tests"}
OF_VERDICTS = {"caught", "witness", "reason"}
SMALL = {
    "id": "errors-01",
    "room": "errors",
    "file": "moa_fairseq/errors.py",
    "what": "",
    "old": "class UserError(",
    "new": "class OtherError(",
}
# A test in the copy; and, in a Python that has imported nothing of this package, how it is asked.
TEST = """
import subprocess, sys
from pathlib import Path

FIND = "import importlib.util; print(importlib.util.find_spec('moa_fairseq').origin)"

def test_a_child_finds_the_copy():
    words = [sys.executable, "-c", FIND]
    package = Path(subprocess.run(words, cwd="/", capture_output=True, text=True).stdout.strip()).parent
    assert package.parent == Path.cwd()
    assert "class UserError(" in (package / "errors.py").read_text()
"""
PROGRAM = """
import sys, tempfile
sys.path.insert(0, {tests!r})
import faults
with tempfile.TemporaryDirectory() as folder:
    copy = faults.Copy(folder)
    options = "def pytest_addoption(parser): parser.addoption('--all', action='store_true')"
    (copy.folder / "tests" / "conftest.py").write_text(options)
    (copy.folder / "tests" / "test_child.py").write_text({test!r})
    print(copy.ask(["tests/test_child.py"], 300))
    print(faults.verdict({fault!r}, copy, 300, False))
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["id"])
def test_a_fault_can_be_planted(fault):
    assert not faults.problem(fault)
    assert fault["old"] != fault["new"] and fault["what"]
    assert FIELDS <= fault.keys() <= FIELDS | OF_VERDICTS
    room = (
        room_of(fault["file"].removeprefix("moa_fairseq/")) or fault["file"].partition("/")[0]
    )
    assert room == fault["room"]
    paths = [
        word.partition("::")[0] for target in fault["tests"] for word in faults.words_of(target)
    ]
    assert paths and all((faults.ROOT / path).exists() for path in paths if "=" not in path)


def test_every_large_room_has_one_and_each_has_a_name_of_its_own():
    assert len({fault["id"] for fault in FAULTS}) == len(FAULTS) <= 150
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path.relative_to(PACKAGE).as_posix())
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    large = {room for room, count in lines.items() if count > 300}
    assert large <= {fault["room"] for fault in FAULTS}


def test_faults_have_a_verdict_and_few_survive():
    """What catches it, or why nothing does; a new fault is asked with --record."""
    assert not [fault["id"] for fault in FAULTS if fault.get("caught") and fault.get("reason")]
    assert not [
        fault["id"] for fault in FAULTS if not fault.get("caught") and not fault.get("reason")
    ]
    assert sum("reason" in fault for fault in FAULTS) <= 0.03 * len(FAULTS)


def test_no_two_faults_are_the_same():
    """By what they make of a file, however much of it they quote."""
    texts = {
        name: (faults.ROOT / name).read_text("utf-8")
        for name in {fault["file"] for fault in FAULTS}
    }
    planted = {(f["file"], texts[f["file"]].replace(f["old"], f["new"])) for f in FAULTS}
    assert len(planted) == len(FAULTS)


def test_a_sample_follows_from_the_date():
    ids = lambda date: [fault["id"] for fault in faults.chosen(FAULTS, [], 10, date)]  # noqa: E731
    assert ids("2026-01-01") == ids("2026-01-01") != ids("2026-01-02")
    assert len(set(ids("2026-01-01"))) == 10
    rooms = faults.chosen(FAULTS, ["text", "layers-01"], None, "")
    assert {fault["room"] for fault in rooms} == {"text", "layers"} and rooms[-1][
        "id"
    ] == "layers-01"
    with pytest.raises(SystemExit, match="nowhere"):
        faults.chosen(FAULTS, ["nowhere"], None, "")


class Answers:
    """A copy of the tree in which tests end as they are told to."""

    checksum = "0"

    def __init__(self, folder, *statuses):
        self.folder, self.statuses, self.asked = Path(folder), list(statuses), []
        (self.folder / "moa_fairseq").mkdir()
        (self.folder / SMALL["file"]).write_text((faults.ROOT / SMALL["file"]).read_text())

    def ask(self, words, timeout):
        planted = SMALL["new"] in (self.folder / SMALL["file"]).read_text()
        self.asked.append((words, planted))
        status = self.statuses.pop(0)
        return status, [f"{words[0]}::test_x"] if status == 1 else []


@pytest.mark.parametrize(
    "statuses, expected",
    [
        ((1, 0), (faults.CAUGHT, "tests/a.py::test_x")),
        ((0, 1, 0), (faults.CAUGHT, "tests/b::test_x")),  # another folder is asked
        ((1, 1), (faults.NO_VERDICT, "tests/a.py::test_x fails without the fault, too")),
        ((0, 0), (faults.SURVIVES, "tests/a.py tests/b")),
        ((None,), (faults.NO_VERDICT, "tests/a.py took more than 9 s")),
        ((5,), (faults.NO_VERDICT, "tests/a.py has no test")),
    ],
)
def test_a_verdict(tmp_path, monkeypatch, statuses, expected):
    monkeypatch.setattr(faults, "MEMORY", tmp_path / "memory.json")
    copy = Answers(tmp_path, *statuses)
    assert (
        faults.verdict({**SMALL, "tests": ["tests/a.py", "tests/b"]}, copy, 9, True) == expected
    )
    confirmed = [planted for words, planted in copy.asked if "::" in words[0]]
    assert not any(confirmed) and all(
        planted for words, planted in copy.asked if "::" not in words[0]
    )
    assert SMALL["old"] in (tmp_path / SMALL["file"]).read_text(), "the fault was left behind"


def test_a_fault_whose_old_text_is_gone_does_not_apply(tmp_path):
    copy = Answers(tmp_path)
    assert (
        faults.verdict({**SMALL, "old": "nowhere", "tests": ["x"]}, copy, 9, True)[0]
        == faults.MISSING
    )
    assert not copy.asked


@pytest.mark.thorough
def test_a_tenth_of_the_faults_is_caught_as_recorded():
    """Another tenth each day of ten; MOA_FAIRSEQ_TESTS_DATE=YYYY-MM-DD asks that of another day."""
    date = os.environ.get("MOA_FAIRSEQ_TESTS_DATE", datetime.date.today().isoformat())
    ids = [
        fault["id"]
        for fault in FAULTS[datetime.date.fromisoformat(date).toordinal() % 10 :: 10]
        if "caught" in fault and "integrations" not in fault["caught"]
    ]
    print(f"the faults of {date}: {' '.join(ids)}")
    words = [sys.executable, faults.__file__, *ids, "--caught", "--no-baseline"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
def test_a_test_and_its_child_processes_see_the_planted_fault():
    """In a real copy: nothing else of this package is found."""
    fault = {**SMALL, "tests": ["tests/test_child.py"]}
    program = PROGRAM.format(tests=str(Path(faults.__file__).parent), test=TEST, fault=fault)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    caught = (faults.CAUGHT, "tests/test_child.py::test_a_child_finds_the_copy")
    assert done.stdout.splitlines() == ["(0, [])", str(caught)], done.stderr
