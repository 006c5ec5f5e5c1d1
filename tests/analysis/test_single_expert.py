"""Table 5's rows: what runs, what is not run again, what is computed; and the real commands once."""

import json
import math
import statistics

import pytest
import torch
import yaml
from fairseq import checkpoint_utils

from moa_fairseq.analysis import single_expert
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.cli import main

SCORES = {"mixture": 26.0, "top-expert": 25.75, "random-expert-1": 20.0, "random-expert-2": 23.0}


class FakeExecutor:
    """Writes what the real commands would write, with SCORES."""

    def __init__(self, environment=None, keep_open=()):
        self.environment = environment or {}

    def run(self, command, log, output=None, on_line=None, errors_too=False):
        FakeExecutor.calls.append(command)
        score = SCORES[output.parent.name]
        if command[0] == "fairseq-generate":
            output.write_text("H-0\t-1.0\ta b\n")
            on_line("H-0\t-1.0\ta b")
        elif command[0] == "fairseq-eval-lm":
            output.write_text(f"Evaluated 10 tokens\nLoss (base 2): 4.0, Perplexity: {score}\n")
        else:
            output.write_text(json.dumps({"multi_bleu": {"score": score}}))


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(single_expert, "Executor", FakeExecutor)
    FakeExecutor.calls = []
    return FakeExecutor.calls


def analyze(run, *flags):
    return main(["analyze", "single-expert", str(run), "--cpu", *map(str, flags)])


def overrides_of(command):
    return command[command.index("--model-overrides") + 1]


def test_rows_are_computed_and_kept(mae, make_run, calls, tmp_path, capsys):
    run, numbers = make_run(mae), tmp_path / "table5.json"
    assert analyze(run, "--draws", 2, "--json", numbers) == 0
    report = json.loads(numbers.read_text())
    assert (report["mixture"], report["gate"], report["metric"]) == (26.0, "learned", "multi_bleu")
    assert report["top_expert"] == {"score": 25.75, "difference": -0.25}
    drawn = report["random_expert"]
    assert drawn["scores"] == [20.0, 23.0] and (drawn["mean"], drawn["difference"]) == (21.5, -4.5)
    assert drawn["sd"] == pytest.approx(statistics.stdev([20.0, 23.0])) == pytest.approx(3 / math.sqrt(2))
    generated = [command for command in calls if command[0] == "fairseq-generate"]
    assert [overrides_of(command) for command in generated] == [
        "{'mae_evaluate_with': 'mixture', 'mae_evaluate_seed': 1}",
        "{'mae_evaluate_with': 'top-expert', 'mae_evaluate_seed': 1}",
        "{'mae_evaluate_with': 'random-expert', 'mae_evaluate_seed': 1}",
        "{'mae_evaluate_with': 'random-expert', 'mae_evaluate_seed': 2}",
    ]
    line = " ".join(generated[1])
    assert f"--path {run}/checkpoints/checkpoint_best.pt --gen-subset valid --beam 2" in line
    assert "--max-len-b 12" in line and line.endswith(f"{run}/single-expert/top-expert/generate-valid.txt")
    printed = capsys.readouterr().out
    assert "25.75   -0.25" in printed and "21.50   -4.50 ± 2.12" in printed
    # a second time, with fewer or more draws, only what is missing is done
    del calls[:]
    assert analyze(run, "--draws", 1) == 0 and not calls
    (run / "single-expert" / "mixture" / "generate-valid.txt").unlink()
    assert analyze(run, "--draws", 2) == 0
    assert {overrides_of(c) for c in calls if c[0] == "fairseq-generate"} == {
        "{'mae_evaluate_with': 'mixture', 'mae_evaluate_seed': 1}"
    }
    del calls[:]  # another model: all again
    (run / "checkpoints" / "checkpoint_best.pt").touch()
    assert analyze(run, "--draws", 0) == 0
    assert len([c for c in calls if c[0] == "fairseq-generate"]) == 2


def test_uniform_gates_have_no_top_expert(uniform_mae, make_run, calls, tmp_path, capsys):
    assert analyze(make_run(uniform_mae), "--draws", 1, "--json", tmp_path / "out.json") == 0
    assert "top-expert is left out: the gates are uniform" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["top_expert"] is None and report["random_expert"]["sd"] is None
    assert not any("top-expert" in word for command in calls for word in command)


def test_a_language_model_is_scored_by_its_perplexity(mae, make_run, calls, capsys):
    train = {"task": "language_modeling_bcd", "max_tokens": 400, "criterion": "cross_entropy", "max_epoch": 1}
    score = {"headline": "lm_ppl", "subsets": ["valid"], "flags": {"context-window": 4}}
    run = make_run(mae, data={"recipe": "binarised"}, train=train, score=score, generate=None)
    assert analyze(run, "--draws", 0) == 0
    assert [command[0] for command in calls] == ["fairseq-eval-lm"] * 2
    assert "'top-expert'" in overrides_of(calls[1]) and "--context-window" in calls[1]
    assert "lm_ppl on valid" in capsys.readouterr().out


def test_what_is_no_run_of_a_mixture_is_refused(mae, toy_checkpoint, make_run, tmp_path, calls, capsys):
    assert analyze(tmp_path) == 2 and "lacks recipe.yaml" in capsys.readouterr().err
    run = make_run(toy_checkpoint)
    assert analyze(run) == 2 and "has no gates of MAE" in capsys.readouterr().err
    (run / "checkpoints" / "checkpoint_best.pt").write_bytes(mae.read_bytes())
    assert analyze(run, "--draws", -1) == 2 and "--draws -1" in capsys.readouterr().err
    assert not calls


def test_a_strangers_recipe_brings_no_code(mae, make_run, calls, tmp_path, capsys):
    run = make_run(mae)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["generate"]["flags"]["user-dir"] = str(tmp_path / "trap")
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert analyze(run, "--draws", 0) == 2 and not calls
    assert f"{run}/recipe.yaml: generate.flags.user-dir" in capsys.readouterr().err


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
def test_fairseq_generate_step_by_step_is_the_model_with_one_expert(mae, make_run, capfd):
    run = make_run(mae)
    assert analyze(run, "--draws", 1) == 0
    assert "one random expert, 1 draw(s)" in capfd.readouterr().out
    scores = {}
    for part in ("mixture", "top-expert", "random-expert-1"):
        how = {"mae_evaluate_with": part.replace("-1", "")}
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(mae)], arg_overrides=how)
        modules = [m for m in model.eval().modules() if isinstance(m, MixtureOfAttentiveExperts)]
        assert len(modules) == 6 and {m.evaluate_with for m in modules} == set(how.values())
        log = (run / "single-expert" / part / "generate-valid.txt").read_text().splitlines()
        rows = dict(line.split("\t", 1) for line in log if line[:2] in ("S-", "H-"))
        scores[part] = []
        for number in range(20):
            score, hypothesis = rows[f"H-{number}"].split("\t")
            scores[part].append(float(score))
            assert float(score) == pytest.approx(
                forced_score(model, task, rows[f"S-{number}"], hypothesis), abs=2e-4
            )
    assert scores["mixture"] != scores["top-expert"] != scores["random-expert-1"] != scores["mixture"]
