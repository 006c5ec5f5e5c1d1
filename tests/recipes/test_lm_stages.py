"""Recipes of causal language models: their commands, their rules, and what is read from fairseq-eval-lm."""

from pathlib import Path

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.jobs.causal_lm import read_report
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.runner import Options, planned_commands, run_recipe
from moa_fairseq.recipes.schema import CAUSAL_LM

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "wikitext103_lm_mae7.yaml"
CPU = Hardware()
REPORT = """INFO:fairseq_cli.eval_lm:Evaluated 245,569 tokens in 12.5s (19645.5 tokens/s)
INFO:fairseq_cli.eval_lm:Loss (base 2): 4.2258, Perplexity: 18.71
"""


def test_the_stages_are_prepare_train_and_an_evaluation_of_each_subset():
    recipe = load_recipe(CONFIG)
    assert recipe.kind == CAUSAL_LM
    plan = planned_commands(recipe, CPU, Options())
    programs = [command[0] for command in plan]
    assert programs == ["fairseq-preprocess", "fairseq-train", "fairseq-eval-lm", "fairseq-eval-lm"]
    assert "--only-source" in plan[0] and "--source-lang" not in plan[1]
    line = " ".join(plan[2])
    assert "--gen-subset test" in line and "--context-window 480" in line and "--cpu" in line
    assert "--task language_modeling_bcd" in line and "checkpoints/checkpoint_best.pt" in line
    assert plan[2][1] == plan[1][1]  # one folder of data


def test_the_perplexity_and_its_settings_are_read():
    scores = read_report(REPORT, Path("x"), load_recipe(CONFIG))
    assert scores["lm_ppl"] == {"score": 18.71, "loss_base2": 4.2258}
    assert scores["lm_bits"] == {"score": 4.2258}  # of a token: of a byte in enwik8
    evaluation = scores["meta"]["evaluation"]
    assert evaluation["context_window"] == 480 and evaluation["tokens"] == 245569
    with pytest.raises(UserError, match=r"no perplexity.*eval-lm-test\.txt"):
        read_report("Killed\n", Path("eval-lm-test.txt"), load_recipe(CONFIG))


@pytest.mark.parametrize("number", ["1.2.3", ".", "1.", "4.2258.", "1e5", "-1", "4,2", "9 9", ""])
def test_what_is_no_number_is_no_perplexity(number):
    recipe = load_recipe(CONFIG)
    for old in ("4.2258", "18.71"):
        with pytest.raises(UserError, match="no perplexity"):
            read_report(REPORT.replace(old, number), Path("x"), recipe)


@pytest.mark.parametrize("tokens", [",", "1,2,3", "9" * 5000, "1,000," + "000," * 9000 + "000"])
def test_what_is_no_count_of_tokens_is_left_out(tokens):
    scores = read_report(REPORT.replace("245,569", tokens), Path("x"), load_recipe(CONFIG))
    assert scores["lm_ppl"]["score"] == 18.71 and "tokens" not in scores["meta"]["evaluation"]


def test_a_diverged_models_perplexity_is_read():
    for word, value in (("inf", float("inf")), ("nan", pytest.approx(float("nan"), nan_ok=True))):
        report = REPORT.replace("4.2258", word).replace("18.71", word)
        assert read_report(report, Path("x"), load_recipe(CONFIG))["lm_ppl"]["score"] == value


class FakeExecutor:
    """Writes what the programs would; counts them."""

    ran = ()

    def __init__(self, environment=None, lock=None):
        self.environment = environment or {}

    def run(self, command, log, output=None, on_line=None, errors_too=False):
        FakeExecutor.ran += (command[0],)
        if command[0] == "fairseq-train":
            import torch

            folder = Path(command[command.index("--save-dir") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
                torch.save({"model": {}}, folder / name)
        elif output:
            output.write_text(REPORT)


def test_a_run_ends_in_a_result_and_repeats_nothing(tmp_path, monkeypatch, fairseq, said):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b c\n" * 9)
    prefixes = [f"--{split}pref={tmp_path / split}.txt" for split in ("train", "valid", "test")]
    fairseq("preprocess", "--only-source", *prefixes, "--destdir", tmp_path / "bin")
    recipe, options = load_recipe(CONFIG), Options(data=tmp_path / "bin", save_dir=tmp_path / "run")
    FakeExecutor.ran = ()
    result = run_recipe(recipe, CPU, options, FakeExecutor)
    assert FakeExecutor.ran == ("fairseq-train", "fairseq-eval-lm", "fairseq-eval-lm")
    assert "lm_ppl 18.71 on test" in said[-1]
    assert '"lm_ppl": 18.71' in result.read_text()
    assert '"reproduces": null' in result.read_text()  # nine lines are not WikiText-103
    run_recipe(recipe, CPU, options, FakeExecutor)
    assert len(FakeExecutor.ran) == 3


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.source=en", r"data\.source: has no meaning for a causal language model"),
        ("data.recipe=multi30k", r"data\.recipe: 'multi30k' makes no data"),
        ("data.recipe=wikitext103_gpt2bpe", "makes no data for train.task 'language_modeling_bcd'"),
        ("score.headline=multi_bleu", "is no score of train.task"),
        ("score.headline=masked_lm_ppl", "is no score of train.task"),
        ("score.subsets=[]", r"score\.subsets: is empty"),
        ("score.flags.path=x", r"score\.flags\.path: is not a free flag"),
    ],
)
def test_contradictions_are_refused_by_key(override, message):
    with pytest.raises(UserError, match=message):
        load_recipe(CONFIG, [override])
    with pytest.raises(UserError, match=r"is no score of train\.task 'translation'"):
        load_recipe(ROOT / "configs" / "multi30k_ende_transformer_tiny.yaml", ["score.headline=lm_ppl"])
