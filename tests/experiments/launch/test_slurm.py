"""The Slurm script with two stand-in machines: one is killed, the job is started again, training goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moa_fairseq import process
from moa_fairseq.experiments.make import read_step_records
from moa_fairseq.experiments.recipes.train_log import read_records
from moa_fairseq.plugin.fairseq_compat import load_checkpoint

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "scripts" / "launch"
SCRIPTS = ("slurm.sh", "multinode.sh", "torchrun.sh")
# Starts the command once for each machine, passes SIGTERM on and fails when one of them failed.
SRUN = """#!/usr/bin/env bash
machines=${SLURM_NNODES:-1} pids=() status=0 output=
while [[ $1 == --* ]]; do
  case $1 in --nodes=*) machines=${1#*=} ;; --output=*) output=${1#*=} ;; esac
  shift
done
for ((i = 0; i < machines; i++)); do
  log=${output:-/dev/stdout} log=${log//%j/$SLURM_JOB_ID}
  SLURM_NODEID=$i "$@" >> "${log//%t/$i}" 2>&1 & pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || status=$?; done
done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in show) echo 127.0.0.1 ;; requeue) echo "requeued $2" ;; esac
"""
EPOCHS = 16
RECIPE = f"""
experiment: small
summary: a small recipe
data: {{recipe: binarised, source: en, target: de}}
model: {{arch: moa_transformer_tiny, num_experts: 4, experts_per_token: 2, expert_dim: 8,
  share_all_embeddings: true, flags: {{encoder-layers: 1, encoder-embed-dim: 16, decoder-layers: 1,
  decoder-embed-dim: 16}}}}
train: {{effective_batch_tokens: 800, max_tokens: 400, max_epoch: {EPOCHS}, log_interval: 1,
  criterion: label_smoothed_cross_entropy_with_routing,
  flags: {{optimizer: adam, lr: 0.001, num-workers: 0}}}}
"""
# In place of Python: prepares, then trains as MODE says.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> calls
case "$*" in
  *"--stage prepare"*) mkdir -p run/checkpoints; exit 0 ;;
  *"--stage train"*) ;;
  *) exit 0 ;;
esac
echo "machine $SLURM_NODEID"
[ "$MODE" != crash ] || exit 2
[ "$MODE" != end ] || exit 0
trap 'echo saved; exit 130' TERM
touch "ready-$SLURM_NODEID"
sleep 100 & wait
"""


@pytest.fixture
def job(toy_data, tmp_path):
    """A small recipe without anything after the training, and the environment of a job of two machines."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "small.yaml").write_text(RECIPE, encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.update(
        SLURM_JOB_ID=str(os.getpid()), SLURM_NNODES="2", SLURM_JOB_NODELIST="two"
    )
    environment.update(
        MOA_FAIRSEQ_ROOT=str(ROOT), VIRTUAL_ENV=sys.prefix, PYTHONWARNINGS="ignore"
    )
    options = f"small.yaml --gpus 0 --data {toy_data} --save-dir run".split()

    def start(*words, script="slurm.sh", **more):
        command = ["bash", str(LAUNCH / script), *options, *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment.update(more)
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)

    return start


def wait_for(condition, running, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None and time.monotonic() < deadline, running.stdout.read()[
            -3000:
        ]
        time.sleep(0.02)


def training_of_machine(number, folder):
    """The process id of a machine's fairseq-train, from what the system says about all processes."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        wanted = ("fairseq_cli.train\0", f"--distributed-rank\0{number}\0")
        if all(words in command for words in wanted) and os.readlink(
            entry.parent / "cwd"
        ) == str(folder):
            return int(entry.parent.name)
    return None


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="finds the processes in /proc"
)
def test_a_killed_machine_ends_the_job_and_the_next_one_goes_on(job, tmp_path):
    first = job()
    wait_for((tmp_path / "run" / "checkpoints" / "checkpoint2.pt").exists, first)
    os.kill(training_of_machine(1, tmp_path), signal.SIGKILL)
    output = first.communicate(timeout=60)[0]
    assert first.returncode == 0 and f"requeued {os.getpid()}" in output, output[-3000:]
    logs = [
        (tmp_path / "run" / f"slurm-{os.getpid()}-{number}.log").read_text()
        for number in (0, 1)
    ]
    assert (
        "Another process of this training stopped" in logs[0]
        and "was killed by signal 9" in logs[1]
    )
    reached = max(record["epoch"] for record in read_records(tmp_path / "run" / "train.jsonl"))
    assert reached < EPOCHS

    last = tmp_path / "run" / "checkpoints" / "checkpoint_last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 255  # and the disk of the dying machine wrote nonsense
    last.write_bytes(content)
    second = job()
    wait_for(lambda: not last.exists() or last.read_bytes() != content, second)
    second.send_signal(signal.SIGUSR1)  # time is almost up
    output = second.communicate(timeout=240)[0]
    assert second.returncode == 0 and f"requeued {os.getpid()}" in output, output[-3000:]
    log = (tmp_path / "run" / f"slurm-{os.getpid()}-0.log").read_text()
    assert "checkpoint_last.pt is damaged" in log and "resuming from checkpoint" in log
    saved = load_checkpoint(last)["optimizer_history"][-1]["num_updates"]

    third = job()
    output = third.communicate(timeout=240)[0]
    assert third.returncode == 0 and "train: done before" in output, output[-3000:]
    log = (tmp_path / "run" / f"slurm-{os.getpid()}-0.log").read_text()
    assert f"resuming from update {saved:,}" in log
    sessions = read_step_records(tmp_path / "run")["train"]["made_by"]
    assert all(session["hardware"].startswith("2 processes, ") for session in sessions)
    ended = [r for r in read_records(tmp_path / "run" / "train.jsonl") if "valid_loss" in r]
    assert [record["epoch"] for record in ended] == list(range(1, EPOCHS + 1))


@pytest.fixture
def stand_in(tmp_path):
    """An environment without a Python: PYTHON is in its place."""
    path = tmp_path / "venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(PYTHON)
    path.chmod(0o755)
    return {"VIRTUAL_ENV": str(tmp_path / "venv")}


def test_a_crash_is_requeued_until_three_in_a_row_brought_no_checkpoint(
    job, stand_in, tmp_path
):
    def crash():
        running = job(MODE="crash", **stand_in)
        output = running.communicate(timeout=60)[0]
        return running.returncode, f"requeued {os.getpid()}" in output

    assert [crash() for _ in range(4)] == [(0, True)] * 3 + [(2, False)]
    last = tmp_path / "run" / "checkpoints" / "checkpoint_last.pt"
    last.touch()
    os.utime(last, (time.time() + 1,) * 2)  # the clock of file systems is coarse
    assert crash() == (0, True)  # training got on
    for number in (0, 1):
        log = tmp_path / "run" / f"slurm-{os.getpid()}-{number}.log"
        assert log.read_text() == f"machine {number}\n" * 5


@pytest.mark.parametrize(
    ("number", "status", "again"), [(signal.SIGUSR1, 0, True), (signal.SIGTERM, 143, False)]
)
def test_signals_are_passed_on_before_the_job_ends(
    job, stand_in, tmp_path, number, status, again
):
    running = job(MODE="wait", **stand_in)
    wait_for(
        lambda: all((tmp_path / f"ready-{machine}").exists() for machine in (0, 1)), running
    )
    running.send_signal(number)
    output = running.communicate(timeout=60)[0]
    assert (running.returncode, f"requeued {os.getpid()}" in output) == (status, again), output
    for machine in (0, 1):
        assert "saved" in (tmp_path / "run" / f"slurm-{os.getpid()}-{machine}.log").read_text()


def calls(folder):
    """The stages that Python was asked for, with --restart where it was given; and torchrun's options."""
    found = []
    for words in map(str.split, (folder / "calls").read_text().splitlines()):
        if "torch.distributed.run" in words:
            found.append(" ".join(words[2 : words.index("moa_fairseq.cli") - 1]))
        elif "moa_fairseq.cli" in words:
            stage = words[words.index("--stage") + 1] if "--stage" in words else "all"
            found.append(stage + " --restart" * ("--restart" in words))
    return found


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_requeued_job_moves_nothing_aside(job, stand_in, tmp_path, count):
    running = job("--restart", MODE="crash", SLURM_RESTART_COUNT=count, **stand_in)
    running.communicate(timeout=60)
    first = "prepare --restart" if count == "0" else "prepare"
    assert calls(tmp_path) == [first, "train", "train"]


@pytest.mark.parametrize("rank", [0, 1])
def test_machine_0_prepares_and_the_others_wait_for_it(job, stand_in, tmp_path, rank):
    here = ("--nodes", "2", "--node-rank", str(rank), "--master", "head")
    environment = {"MODE": "end", "MOA_FAIRSEQ_POLL_SECONDS": "0.01", **stand_in}
    running = job(*here, script="multinode.sh", SLURM_NODEID=str(rank), **environment)
    if rank:
        assert "waiting for machine 0" in running.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.3)
        assert calls(tmp_path) == []
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "state.json").write_text("{}")
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 0, output
    assert calls(tmp_path) == (["train"] if rank else ["prepare", "train", "all"])
    if rank:
        again = job(*here, "--restart", script="multinode.sh", **environment)
        assert "machine 0 only" in again.communicate(timeout=60)[0] and again.returncode == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["prepare", "--nproc-per-node gpu --max-restarts 3 --standalone", "all"]),
        (
            ("--", "--nproc-per-node", "2"),
            ["prepare", "--nproc-per-node 2 --max-restarts 3 --standalone", "all"],
        ),
        (
            ("--", "--nnodes", "2:4", "--max-restarts", "10"),
            ["--nnodes 2:4 --max-restarts 10 --nproc-per-node gpu"],
        ),
    ],
)
def test_of_several_machines_under_torchrun_each_only_trains(
    job, stand_in, tmp_path, words, expected
):
    running = job(*words, script="torchrun.sh", SLURM_NODEID="0", MODE="end", **stand_in)
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 0, output
    assert calls(tmp_path) == expected


def test_torchrun_without_a_gpu_asks_for_the_number_of_processes(job, tmp_path):
    running = job(script="torchrun.sh", CUDA_VISIBLE_DEVICES="")
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 2 and "--nproc-per-node" in output, output
    assert "Traceback" not in output and not (tmp_path / "run").exists()


def test_the_job_asks_for_memory():
    lines = (LAUNCH / "slurm.sh").read_text(encoding="utf-8").splitlines()
    asked = [line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")]
    assert (
        any(option.startswith("--mem") for option in asked) and "--signal=B:USR1@300" in asked
    )
    lead = int(
        next(option for option in asked if option.startswith("--signal")).rpartition("@")[2]
    )
    assert lead > process.SAVE_SECONDS


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_explain_themselves_and_refuse_what_they_do_not_know(script, tmp_path):
    path = LAUNCH / script
    assert path.stat().st_mode & 0o111 and "set -euo pipefail" in path.read_text(
        encoding="utf-8"
    )
    environment = {**os.environ, "MOA_FAIRSEQ_ROOT": str(ROOT), "VIRTUAL_ENV": sys.prefix}

    def run(*words):
        command = ["bash", str(path), *words]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    told = run("--help")
    assert (
        told.returncode == 0
        and f"scripts/launch/{script}" in told.stdout
        and "#" not in told.stdout
    )
    assert run().returncode == 2
    assert "there is no recipe no_such" in run("no_such").stderr
    assert "leave --stage out" in run("quickstart_moa", "--stage", "train").stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    files = sorted(map(str, LAUNCH.glob("*.sh")))
    command = ["shellcheck", "-x", "-e", "SC1091,SC2154,SC2034", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
