"""The engine on small Python programs: what is made again, what an interruption leaves."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moa_fairseq import process
from moa_fairseq.errors import UserError
from moa_fairseq.experiments import make as make_module
from moa_fairseq.experiments.make import OUT, Step, file_signature, make, read_step_records
from moa_fairseq.experiments.records import json_files, provenance
from moa_fairseq.process import held_locks, locked

# Writes a file in small pieces; with PAUSE slowly enough to be killed in between.
SLOW = """
import os, sys, time
with open(sys.argv[1], "w") as stream:
    for number in range(40):
        print(number, sys.argv[2], file=stream, flush=True)
        time.sleep(float(os.environ.get("PAUSE", 0)))
"""
# Goes on in a folder, as a training does: a line a step, up to the goal.
GOES_ON = """
import os, pathlib, sys, time
file = pathlib.Path(sys.argv[1]) / "steps"
file.parent.mkdir(exist_ok=True)
done = len(file.read_text().splitlines()) if file.exists() else 0
for number in range(done, int(sys.argv[2])):
    with open(file, "a") as stream:
        stream.write(f"{number}\\n")
    time.sleep(float(os.environ.get("PAUSE", 0)))
"""


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.setattr(
        process, "to_argv", lambda command: [sys.executable, "-c", *command[1:]]
    )


def chain(folder, word="a", goal=30):
    """A command, one whose print is kept, a function, a folder to go on in: each after the one before."""
    slow = Step("slow", folder / "slow.txt", ["python", SLOW, OUT, word], {"word": word})
    copy = "import sys; print(open(sys.argv[1]).read())"
    said = Step(
        "said",
        folder / "said.txt",
        ["python", copy, str(slow.output)],
        {"from": slow},
        captured="out",
    )

    def count(new):
        new.mkdir()
        (new / "count").write_text(str(len(said.output.read_text())))
        return {"count": 1}

    counted = Step("counted", folder / "counted", count, {"from": said})
    train = ["python", GOES_ON, OUT, str(goal)]
    return [
        slow,
        said,
        counted,
        Step(
            "train",
            folder / "train",
            train,
            {"from": counted},
            in_place=True,
            goal={"steps": goal},
        ),
    ]


def tree(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix != ".log"
        and path.name not in (".lock", "state.json", "commands.sh")
    }


def test_all_is_made_once_and_again_from_what_was_changed(tmp_path, said):
    facts = make(chain(tmp_path), tmp_path)
    assert facts["counted"] == {"count": 1} and "0 a\n" in (tmp_path / "said.txt").read_text()
    said.clear()
    assert make(chain(tmp_path), tmp_path) == facts and len(said) == 4
    (tmp_path / "said.txt").write_text("cut")
    said.clear()
    make(chain(tmp_path)[:3], tmp_path)
    assert [line.partition(":")[0] for line in said if "done before" in line] == ["slow"]


def test_a_file_of_the_same_size_and_second_is_another_one(tmp_path):
    path = tmp_path / "x"
    seen = []
    for nanosecond in (0, 1_000_000):
        path.write_text("same")
        os.utime(path, ns=(10**18, 10**18 + nanosecond))
        seen.append(file_signature(path))
    assert seen[0] != seen[1]


def test_an_input_that_changed_while_a_step_read_it_is_read_again(tmp_path):
    source = tmp_path / "source"
    source.write_text("old")
    read = []

    def copy(new):
        read.append(source.read_text())
        new.write_text(read[-1])
        if len(read) == 1:
            source.write_text("newer")

    for _ in range(3):
        make([Step("x", tmp_path / "x", copy, {"source": source})], tmp_path)
    assert read == ["old", "newer"] and (tmp_path / "x").read_text() == "newer"


def test_what_is_shown_is_what_runs(tmp_path, said):
    make(chain(tmp_path), tmp_path, dry_run=True)
    shown = list(said)
    assert (
        len(shown) == 3
        and f"> {tmp_path / 'said.txt'}" in shown[1]
        and not os.listdir(tmp_path)
    )
    said.clear()
    make(chain(tmp_path), tmp_path)
    assert list(said) == shown
    kept = (tmp_path / "commands.sh").read_text()
    assert all(line.removeprefix("$ ") in kept for line in shown)


def test_a_new_goal_is_gone_on_to_and_other_inputs_are_refused(tmp_path):
    make(chain(tmp_path, goal=3), tmp_path)
    make(chain(tmp_path, goal=5), tmp_path)
    assert (tmp_path / "train" / "steps").read_text().split() == list("01234")
    with pytest.raises(UserError, match=r"other settings \(from.*--restart"):
        make(chain(tmp_path, word="b"), tmp_path)
    (tmp_path / "state.json").write_text(
        '{"train": {"settings": {}, "done": "x"}, "slow": 3, "said": {'
    )
    with pytest.raises(UserError, match=r"state\.json was damaged.*--restart"):
        make(chain(tmp_path), tmp_path)


def test_a_failure_leaves_nothing_under_the_final_name(tmp_path):
    def fail(made):
        raise UserError("is not a result")

    step = Step("x", tmp_path / "x.txt", ["python", "print(1)"], captured="out", finish=fail)
    with pytest.raises(UserError, match="not a result"):
        make([step], tmp_path)
    with pytest.raises(UserError, match="status 3"):
        make(
            [Step("x", tmp_path / "x.txt", ["python", "print(1); exit(3)"], captured="out")],
            tmp_path,
        )
    with pytest.raises(UserError, match=r"x ended without writing.*x\.log"):
        make([Step("x", tmp_path / "x.txt", ["python", "pass"])], tmp_path)
    assert not step.output.exists() and "x" not in read_step_records(tmp_path)
    missing = Step("y", tmp_path / "y", ["python", "pass"], {"from": step})
    with pytest.raises(UserError, match=r"x\.txt is missing: run --stage x"):
        make([missing], tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(UserError, match=f"{tmp_path / 'run'}"):
        make(chain(tmp_path / "run"), tmp_path / "run")


def test_a_full_disk_is_named_and_leaves_no_output(tmp_path):
    def fill(new):
        new.symlink_to("/dev/full")
        with open(new, "w") as stream:
            stream.write("x" * 100_000)

    with pytest.raises(UserError, match="disk is full"):
        make([Step("x", tmp_path / "x.txt", fill)], tmp_path)
    assert not (tmp_path / "x.txt").exists()


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_make
from moa_fairseq import process
from moa_fairseq.process import signals
from moa_fairseq.experiments import make
process.to_argv = lambda command: [sys.executable, "-c", *command[1:]]
with signals.terminate_as_interrupt():
    make.make(test_make.chain(Path({folder!r})), Path({folder!r}), patience={patience})
"""


def start(folder, patience=60.0):
    path = [os.path.dirname(__file__), *filter(None, sys.path)]
    code = PROGRAM.format(path=path, folder=str(folder), patience=patience)
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    slowly = {**os.environ, "PAUSE": "0.01"}
    return subprocess.Popen([sys.executable, "-c", code], env=slowly, **streams)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_any_moment_and_resumed_the_files_are_the_same(tmp_path, number):
    make(chain(tmp_path / "whole"), tmp_path / "whole")
    chance = random.Random(int(number))
    killed = tmp_path / "killed"
    for _ in range(4):
        running = start(killed)
        time.sleep(chance.uniform(0.3, 1.8))
        running.send_signal(number)
        running.communicate()
        finished = [
            name for name, mark in read_step_records(killed).items() if mark.get("fingerprint")
        ]
        outputs = {step.name: step.output for step in chain(killed)}
        for name in set(outputs) - set(finished) - {"train"}:
            assert not outputs[name].exists() or name not in read_step_records(killed)
    make(chain(killed), killed, patience=30)
    made = {name: digest for name, digest in tree(killed).items() if ".partial" not in name}
    assert made == tree(tmp_path / "whole")


def test_of_two_processes_one_waits_and_finds_all_done_or_is_refused(tmp_path):
    both = [start(tmp_path / "x") for _ in range(2)]
    assert [running.wait() for running in both] == [0, 0]
    commands = (tmp_path / "x" / "commands.sh").read_text()
    assert commands.count(" > ") == 1 and json.loads(
        (tmp_path / "x" / "state.json").read_text()
    )
    with locked(tmp_path / "y"), locked(tmp_path / "y"):  # by this program, twice
        second = start(tmp_path / "y", patience=0.1)
        assert b"Another run is at work" in second.communicate()[1] and second.returncode


def test_a_child_keeps_the_lock_that_it_inherited(tmp_path):
    with locked(tmp_path):
        child = subprocess.Popen(["sleep", "60"], pass_fds=held_locks())
    with pytest.raises(UserError, match="at work"), locked(tmp_path, patience=0.2):
        pass
    child.kill()
    child.wait()
    with locked(tmp_path, patience=0.2):
        pass


def test_an_old_output_is_forgotten_before_the_new_one_takes_its_place(tmp_path, monkeypatch):
    """Killed between the two, nothing says of the new file what was true of the old one, of the same size."""
    make(chain(tmp_path)[:1], tmp_path)

    def stop(new, old):
        os.replace(new, old)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(make_module, "replace", stop)
        make(chain(tmp_path, word="b")[:1], tmp_path)
    assert "0 b\n" in (tmp_path / "slow.txt").read_text() and "slow" not in read_step_records(
        tmp_path
    )
    make(chain(tmp_path)[:1], tmp_path)
    assert "0 a\n" in (tmp_path / "slow.txt").read_text()


def test_what_a_killed_step_left_is_no_part_of_the_next_ones_output(tmp_path):
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "stale").write_text("stale")

    def write(new):
        new.mkdir(exist_ok=True)
        (new / "fresh").write_text("fresh")

    make([Step("x", tmp_path / "x", write)], tmp_path)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["fresh"]


def test_a_folder_takes_the_place_of_a_file_and_a_file_that_of_a_folder(tmp_path):
    """An output of another kind, as a later version may make it under the same name."""

    def folder(new):
        new.mkdir()
        (new / "within").write_text("x")

    for number, write in enumerate(
        (lambda new: new.write_text("x"), folder, lambda new: new.write_text("y"))
    ):
        make([Step("x", tmp_path / "x", write, {"version": number})], tmp_path)
        assert (tmp_path / "x").is_dir() == (write is folder)
    assert (tmp_path / "x").read_text() == "y" and not list(tmp_path.glob("x.*"))


def test_an_empty_folder_is_no_output(tmp_path):
    with pytest.raises(UserError, match="x ended without writing"):
        make([Step("x", tmp_path / "x", lambda new: new.mkdir())], tmp_path)
    assert not (tmp_path / "x").exists() and "x" not in read_step_records(tmp_path)


def test_a_log_in_an_output_may_grow(tmp_path):
    made = []

    def write(new):
        new.mkdir()
        for name in ("data", "preprocess.log"):
            (new / name).write_text("x")
        made.append(new)

    for _ in range(2):
        make([Step("x", tmp_path / "x", write)], tmp_path)
        (tmp_path / "x" / "preprocess.log").write_text("xx")
    assert len(made) == 1


def test_facts_of_earlier_parts_of_a_training_stay(tmp_path):
    """Later parts may not see them again (the number of parameters is said once); new values count."""
    facts = iter(
        [{"parameters": 7, "updates": 3, "speed": 1}, {"parameters": None, "updates": 5}, None]
    )

    def train(goal):
        line = ["python", GOES_ON, OUT, str(goal)]
        finish = lambda made: next(facts)  # noqa: E731
        return Step(
            "train",
            tmp_path / "train",
            line,
            in_place=True,
            goal={"steps": goal},
            finish=finish,
        )

    assert make([train(1)], tmp_path)["train"] == {"parameters": 7, "updates": 3, "speed": 1}
    for goal in (2, 3):
        assert make([train(goal)], tmp_path)["train"] == {
            "parameters": 7,
            "updates": 5,
            "speed": 1,
        }


def test_a_folder_by_another_name_is_the_same_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    with locked(tmp_path / "run"), locked(Path("run"), 0.1), locked(tmp_path / "link", 0.1):
        assert len(held_locks()) == 1


@pytest.fixture
def source(monkeypatch):
    """The source tree: its commit can change."""
    found = SimpleNamespace(commit="one")
    monkeypatch.setattr(provenance, "commit", lambda: found.commit)
    return found


def commits(folder, name):
    return [
        session["commit"] for session in make_module.made_by_of(read_step_records(folder)[name])
    ]


def test_what_made_an_output_is_said_once_and_stays(tmp_path, source):
    """Steps that are found done are not ascribed to what finds them."""
    make(chain(tmp_path), tmp_path)
    source.commit = "two"
    make(chain(tmp_path), tmp_path)
    assert [commits(tmp_path, step.name) for step in chain(tmp_path)] == [["one"]] * 4
    make(chain(tmp_path, word="b")[:3], tmp_path)
    assert commits(tmp_path, "slow") == ["two"] and commits(tmp_path, "train") == ["one"]
    (session,) = read_step_records(tmp_path)["slow"]["made_by"]
    assert session["versions"]["python"] and session["date"]


def failing(folder, code):
    """A training that ends with an error behind some code."""
    program = f"import pathlib, sys; new = pathlib.Path(sys.argv[1]); {code}; sys.exit(1)"
    return Step("train", folder / "train", ["python", program, OUT], {}, in_place=True)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", ["one", "three"]),
        ("(new / 'x').write_text('trained')", ["one", "two", "three"]),
    ],
)
def test_a_training_names_all_commits_that_trained_it(tmp_path, source, code, expected):
    """Those that wrote a checkpoint: an attempt that failed before is none of them."""
    train = lambda goal: [Step(**{**vars(chain(tmp_path, goal=goal)[-1]), "inputs": {}})]  # noqa: E731
    make(train(10), tmp_path)
    source.commit = "two"
    with pytest.raises(UserError):
        make([failing(tmp_path, code)], tmp_path)
    source.commit = "three"
    make(train(20), tmp_path)
    assert commits(tmp_path, "train") == expected
    source.commit = "four"
    make(train(20), tmp_path)
    assert commits(tmp_path, "train") == expected, "it was done"


def test_a_training_that_left_nothing_says_nothing_of_the_next(tmp_path, source):
    """Neither its commit nor its facts are those of a training with other settings."""
    first = failing(tmp_path, "new.mkdir()")
    with pytest.raises(UserError):
        make([first], tmp_path)
    mark = read_step_records(tmp_path)["train"]
    make_module.write_step_record(tmp_path, "train", **{**mark, "facts": {"parameters": 1}})
    source.commit = "two"
    other = Step(**{**vars(chain(tmp_path)[-1]), "inputs": {"rate": 2}})
    make([other], tmp_path)
    assert (
        commits(tmp_path, "train") == ["two"]
        and not read_step_records(tmp_path)["train"]["facts"]
    )


def test_what_cannot_be_read_now_is_not_taken_for_nothing(tmp_path, monkeypatch):
    """A state.json on a server that does not answer: what stands in it would be written over."""
    make(chain(tmp_path), tmp_path)
    before = (tmp_path / "state.json").read_bytes()

    def refused(path, *arguments):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(json_files, "open", refused, raising=False)
        with pytest.raises(UserError, match=r"state\.json cannot be read"):
            make(chain(tmp_path, word="b"), tmp_path)
    assert (tmp_path / "state.json").read_bytes() == before
    (tmp_path / "state.json").write_text("half of i")
    assert read_step_records(tmp_path) == {}
