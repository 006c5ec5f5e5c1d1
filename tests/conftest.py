"""Shared fixtures: a toy parallel corpus, binarised once, and fairseq's commands as subprocesses."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import moa_fairseq

USER_DIR = str(Path(moa_fairseq.__file__).parent)


class Fairseq:
    """Runs `python -m fairseq_cli.NAME` on one thread and keeps its output."""

    def __call__(self, name, *args, cwd=None, stdin=None, check=True, env=None, timeout=300):
        command = [sys.executable, "-m", f"fairseq_cli.{name}", *map(str, args)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
        done = subprocess.run(
            command, cwd=cwd, input=stdin, env=environment, timeout=timeout, text=True, capture_output=True
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done

    def train(self, data, save_dir, *args, arch="moa_transformer_tiny", **options):
        """One layer each way, a few updates per epoch, JSON log lines, CPU."""
        return self(
            "train",
            data,
            *("--user-dir", USER_DIR, "--cpu", "--arch", arch, "--share-all-embeddings"),
            *("--encoder-layers", 1, "--decoder-layers", 1, "--optimizer", "adam", "--lr", 0.003),
            *("--criterion", "label_smoothed_cross_entropy_with_routing", "--label-smoothing", 0.1),
            *("--max-tokens", 400, "--num-workers", 0, "--seed", 7),
            *("--log-format", "json", "--log-interval", 1, "--save-dir", save_dir),
            *args,
            **options,
        )


@pytest.fixture(scope="session")
def fairseq():
    return Fairseq()


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory, fairseq):
    """A binarised corpus en → de: the target is the source reversed. 120 + 20 + 12 sentences."""
    folder = tmp_path_factory.mktemp("toy")
    generator = random.Random(0)
    words = [f"w{i}" for i in range(30)]
    for split, size in (("train", 120), ("valid", 20), ("test", 12)):
        rows = [[generator.choice(words) for _ in range(generator.randint(2, 9))] for _ in range(size)]
        (folder / f"{split}.en").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{split}.de").write_text("".join(" ".join(row[::-1]) + "\n" for row in rows))
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    target = folder / "bin"
    fairseq("preprocess", "-s", "en", "-t", "de", *prefixes, "--destdir", target, "--joined-dictionary")
    return target


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory, fairseq, toy_data):
    """A tiny MoA model after two epochs on `toy_data`; treat its folder as read-only."""
    folder = tmp_path_factory.mktemp("toy_checkpoints")
    fairseq.train(toy_data, folder, "--max-epoch", 2)
    return folder / "checkpoint_last.pt"
