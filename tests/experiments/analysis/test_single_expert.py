"""The command of docs/mae.md for single experts (Table 5), and what its generations are made of."""

import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.thorough
@pytest.mark.slow
def test_the_documented_command_generates_with_one_expert(fairseq, mae, toy_data, tmp_path):
    text = (ROOT / "docs" / "mae.md").read_text()
    generate, scoring = re.search(
        r"^fairseq-generate (DATA-BIN .*?) > one_expert\.txt\nmoa-fairseq (.*?)$",
        text,
        re.M | re.S,
    ).groups()
    values = {"DATA-BIN": toy_data, "CHECKPOINT": mae, "moa_fairseq": ROOT / "moa_fairseq"}
    scores = {}
    for how in ("mixture", "top-expert", "random-expert"):
        words = shlex.split(generate.replace("\\\n", " ").replace("random-expert", how))
        log = fairseq("generate", *(values.get(word, word) for word in words), "--cpu").stdout
        (tmp_path / "one_expert.txt").write_text(log)
        scored = fairseq("moa", *scoring.split(), cwd=tmp_path).stdout
        assert scored.startswith("multi-bleu")
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(mae)], arg_overrides={"mae_evaluate_with": how}
        )
        rows = dict(
            line.split("\t", 1) for line in log.splitlines() if line[:2] in ("S-", "H-")
        )
        scores[how] = []
        for number in range(20):
            score, hypothesis = rows[f"H-{number}"].split("\t")
            scores[how].append(float(score))
            expected = forced_score(model.eval(), task, rows[f"S-{number}"], hypothesis)
            assert float(score) == pytest.approx(expected, abs=2e-4)
    assert (
        scores["mixture"]
        != scores["top-expert"]
        != scores["random-expert"]
        != scores["mixture"]
    )
