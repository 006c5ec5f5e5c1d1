"""`whole_models` is shared by the tests here; so is a family's way from a training to its experts' loads."""

import json
import sys
from pathlib import Path

import pytest

from moa_fairseq.cli import main

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def loads_after_training(fairseq, toy_data, tmp_path):
    """loads_after_training(arch, *flags, logged=WORDS) → what `analyze expert-load` says of each module.

    Trains for an epoch, whose log must have `logged`, and translates all 12 test sentences.
    """

    def run(arch, *flags, logged):
        log = fairseq.train(toy_data, tmp_path, "--max-epoch", 1, *flags, arch=arch).stdout
        assert all(f'"train_{name}"' in log for name in logged)
        checkpoint = tmp_path / "checkpoint_last.pt"
        user_dir = ("--user-dir", "moa_fairseq")
        out = fairseq(
            "generate", toy_data, "--path", checkpoint, *user_dir, "--cpu", "--beam", 5
        ).stdout
        assert len([line for line in out.splitlines() if line.startswith("H-")]) == 12
        loads = tmp_path / "loads.json"
        model = [
            "expert-load",
            str(checkpoint),
            "--data",
            str(toy_data),
            "--subset",
            "valid",
            "--cpu",
        ]
        assert (
            main(
                [
                    "analyze",
                    *model,
                    "--output",
                    str(tmp_path / "loads.png"),
                    "--json",
                    str(loads),
                ]
            )
            == 0
        )
        return json.loads(loads.read_text())["modules"]

    return run
