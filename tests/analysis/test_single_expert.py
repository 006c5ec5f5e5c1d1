"""The loop of docs/mae.md over single experts (Table 5), and what its generations are made of."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

ROOT = Path(__file__).resolve().parents[2]


def forced_score(model, task, source, hypothesis):
    """log2 p per token of a whole hypothesis at once, as in fairseq-generate's H lines."""
    dictionary = task.target_dictionary
    source = dictionary.encode_line(source, add_if_not_exist=False).long()[None]
    target = dictionary.encode_line(hypothesis, add_if_not_exist=False).long()[None]
    previous = torch.cat([target[:, -1:], target[:, :-1]], 1)
    with torch.no_grad():
        output = model(source, torch.tensor([source.size(1)]), previous)
        log_probs = model.get_normalized_probs(output, log_probs=True)
    return log_probs.gather(-1, target.unsqueeze(-1)).mean().item() / math.log(2)


@pytest.mark.slow
def test_the_documented_loop_generates_with_one_expert(mae, toy_data, tmp_path):
    (loop,) = re.findall(r"^for how in .*?^done$", (ROOT / "docs" / "mae.md").read_text(), re.M | re.S)
    values = {
        "DATA-BIN": toy_data,
        "CHECKPOINT": mae,
        "--user-dir moa_fairseq": f"--user-dir {ROOT}/moa_fairseq",
    }
    values |= {
        "{1..5}": "1",
        "2000": "2000 --cpu",
        "one_expert.txt\n": "one_expert.txt; cat one_expert.txt\n",
    }
    for name, value in values.items():
        loop = loop.replace(name, str(value))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", loop], cwd=tmp_path, env={**os.environ, "PATH": path}, text=True, capture_output=True
    )
    assert done.returncode == 0 and done.stdout.count("\nmulti-bleu") == 3, done.stderr
    scores = {}
    for how, log in zip(("mixture", "top-expert", "random-expert"), done.stdout.split("\nmulti-bleu")):
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(mae)], arg_overrides={"mae_evaluate_with": how}
        )
        rows = dict(line.split("\t", 1) for line in log.splitlines() if line[:2] in ("S-", "H-"))
        scores[how] = []
        for number in range(20):
            score, hypothesis = rows[f"H-{number}"].split("\t")
            scores[how].append(float(score))
            expected = forced_score(model.eval(), task, rows[f"S-{number}"], hypothesis)
            assert float(score) == pytest.approx(expected, abs=2e-4)
    assert scores["mixture"] != scores["top-expert"] != scores["random-expert"] != scores["mixture"]
