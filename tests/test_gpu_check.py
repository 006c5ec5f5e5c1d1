"""gpu_check.sh and wheels.sh: with stand-ins, which Python is taken and what is done again."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A python that imports torch and fairseq on request, says its machine, and notes what it was asked to run.
STAND_IN = """#!/usr/bin/env bash
case "$1" in
  -c) [ "$IMPORTS_IN" = all ] || [ "$IMPORTS_IN" = "$(basename "$(dirname "$0")")" ] ;;
  -) echo "${MACHINE:-a GPU, driver 1}" ;;
  *) echo "$TRITON_CACHE_DIR|$XDG_CACHE_HOME|$*" >> "$NOTES"; [[ "$*" != *"${BREAKS:-nothing}"* ]] ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """check(FLAG...) runs a copy of gpu_check.sh; returns (the process, the commands that its Python ran)."""
    (tmp_path / "project" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "gpu_check.sh", tmp_path / "project" / "scripts")
    for name in ("moa_fairseq", "benchmarks", "configs", "tests/layers/experts"):
        (tmp_path / "project" / name).mkdir(parents=True)
    (tmp_path / "project" / "benchmarks" / "attention.py").write_text("one")
    for python in ("project/.venv/bin/python", "path/python3", "path/python"):
        (tmp_path / python).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / python).write_text(STAND_IN)
        (tmp_path / python).chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "PYTHON")
    }
    kept["PATH"] = f"{tmp_path / 'path'}{os.pathsep}{kept['PATH']}"

    def run(*flags, **environment):
        notes = tmp_path / "notes"
        notes.write_text("")
        command = ["bash", str(tmp_path / "project/scripts/gpu_check.sh"), *map(str, flags)]
        environment = {"IMPORTS_IN": "all", "NOTES": str(notes), **environment}
        done = subprocess.run(
            command, env={**kept, **environment}, capture_output=True, text=True
        )
        return done, notes.read_text().splitlines()

    return run


def test_a_python_without_torch_is_passed_over(check, tmp_path):
    """A .venv that was left half made, say."""
    done, _ = check("--minutes", 0, IMPORTS_IN="path")
    assert f"by {tmp_path}/path/python3" in done.stdout
    assert f"by {tmp_path}/project/.venv/bin/python" in check("--minutes", 0)[0].stdout
    done, _ = check("--minutes", 0, IMPORTS_IN="none")
    assert done.returncode == 2 and "no Python here imports torch and fairseq" in done.stderr


def test_the_order_and_the_one_folder(check, tmp_path):
    """Right, fast, holding, whole models; results, verdict and caches beside each other."""
    left = tmp_path / "project" / "runs" / "gpu_check-cuda-checkpoints" / "multi30k-moa_tiny-1"
    left.mkdir(parents=True)
    for name in ("result.json", "train.jsonl", "generate-test.txt", "checkpoint_last.pt"):
        (left / name).write_text(name)
    done, notes = check("--multi30k", tmp_path, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    caches = {note.rsplit("|", 1)[0] for note in notes}
    commands = [note.rsplit("|", 1)[1] for note in notes]
    tests = tmp_path / "project" / "runs" / "gpu_check-cuda-checkpoints" / "triton"
    assert caches == {
        f"{each}|{tmp_path}/out/cache" for each in (f"{tmp_path}/out/cache/triton", tests)
    }
    marks = (
        "decoding_step.py",
        "--steps eager",
        "--steps overhead",
        "/training.py --device cuda --compiled",
    )
    marks += (
        "validate --device cuda --dtypes bfloat16 float16",
        "attention.py",
        "sdpa.py",
        "/kernels.py",
    )
    marks += (
        "--stage prepare",
        "train.seed=3",
        "/training.py --device cuda --output",
        "generation.py",
    )
    marks += ("dtypes float32",)
    places = [
        next(i for i, command in enumerate(commands) if mark in command) for mark in marks
    ]
    assert places == sorted(places)
    benchmarks = [command for command in commands if command.startswith("benchmarks/")]
    assert all(f"--output {tmp_path}/out/benchmarks" in command for command in benchmarks)
    trainings = [command for command in commands if "train.max_update=4000" in command]
    assert (
        len(trainings) == 12
        and len({re.search(r"--save-dir (\S+)", each)[1] for each in trainings}) == 12
    )
    assert f"{tmp_path}/out" not in "".join(trainings), (
        "checkpoints lie in the folder that is carried"
    )
    brought = {path.name for path in (tmp_path / "out" / "measured" / left.name).iterdir()}
    assert brought == {"result.json", "train.jsonl", "generate-test.txt"}


def test_what_is_done_is_done_for_this_machine_and_these_sources(check, tmp_path):
    done, first = check()
    assert done.returncode == 0 and len(first) > 10
    assert check()[1] == []
    assert len(check(MACHINE="a GPU, driver 2")[1]) == len(first)
    (tmp_path / "project" / "benchmarks" / "attention.py").write_text("two")
    assert len(check(MACHINE="a GPU, driver 2")[1]) == len(first)


def test_what_failed_or_had_no_time_is_done_next_time(check):
    done, notes = check("--minutes", 0)
    assert notes == [] and re.search(
        r"not finished: benchmark-decoding_step .*kernels-validate", done.stdout
    )
    done, first = check(BREAKS="benchmarks/sdpa.py")
    assert done.returncode == 1 and "failed: benchmark-sdpa" in done.stderr
    done, again = check()
    assert (
        done.returncode == 0 and len(first) > 10 and len(again) == 1 and "sdpa.py" in again[0]
    )


def test_the_subset_names_what_is_pinned():
    """Each of the twelve, with its hashes, is found where wheels.sh looks for it."""
    script = (ROOT / "scripts" / "wheels.sh").read_text(encoding="utf-8")
    names = re.search(r"for name in (.*?); do", script, re.S)[1].replace("\\\n", " ").split()
    pinned = (ROOT / "scripts" / "requirements.txt").read_text(encoding="utf-8")
    assert len(names) == 12
    for name in names:
        assert re.search(rf"^{re.escape(name)}==\S+ \\\n +--hash=sha256:", pinned, re.M), name
