"""The stages with a fake executor: what runs, what is skipped, what is refused, what survives a failure."""

import json
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.planner.throughput import read_rows
from moa_fairseq.recipes.runner import Options, planned_commands, run_recipe

CPU = Hardware()
SCORES = {
    "multi_bleu": {"score": 12.5},
    "compound_split_bleu": {"score": 13.0},
    "sacrebleu": {"score": 12.0, "signature": "nrefs:1"},
}


def write_checkpoint(path, content="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def option(command, flag):
    return command[command.index(flag) + 1]


class FakeExecutor:
    """Writes what the real commands would write. `fail`: program that fails once with a UserError."""

    calls: ClassVar[list] = []
    fail = None

    def __init__(self, environment=None, keep_open=()):
        self.environment = environment or {}

    def run(self, command, log, output=None, on_line=None, errors_too=False):
        FakeExecutor.calls.append(command)
        if FakeExecutor.fail == command[0]:
            FakeExecutor.fail = None
            if output:
                output.write_text("half of it")
            raise UserError(f"{command[0]} failed")
        if command[0] == "fairseq-train":
            folder = Path(option(command, "--save-dir"))
            for name in ("1", "2", "3", "_last", "_best"):
                write_checkpoint(folder / f"checkpoint{name}.pt")
            on_line("num. shared model params: 1,000 (num. trained: 1,000)")
            on_line(
                '| {"epoch": 3, "train_loss": "1", "train_wps": "10", "train_num_updates": "9", '
                '"train_wpb": "5"}'
            )
        elif command[:2] == ["moa-fairseq", "average"]:
            write_checkpoint(Path(option(command, "--output")), "average")
        elif command[0] == "fairseq-generate":
            output.write_text("H-0\t-1.0\tein Satz\n")
            on_line("H-0\t-1.0\tein Satz")
        elif command[:2] == ["moa-fairseq", "score"]:
            output.write_text(json.dumps(SCORES))

    @classmethod
    def programs(cls):
        names = [" ".join(c[:2]) if c[0] == "moa-fairseq" else c[0] for c in cls.calls]
        cls.calls = []
        return names


ALL = ["fairseq-train", "moa-fairseq average", "fairseq-generate", "moa-fairseq score"]


@pytest.fixture
def go(small, write_config, tmp_path, monkeypatch, binarised, said):
    """go(*overrides, **options) runs the small recipe on binarised data; returns (said, result path)."""
    FakeExecutor.calls, FakeExecutor.fail = [], None
    monkeypatch.chdir(tmp_path)
    small["data"]["recipe"] = "binarised"
    path = write_config(small)

    def run(*overrides, **options):
        said.clear()
        options.setdefault("data", binarised)
        result = run_recipe(load_recipe(path, overrides), CPU, Options(**options), FakeExecutor)
        return list(said), result

    return run


def test_all_stages_and_result(go, tmp_path):
    _, result = go(
        record=tmp_path / "results" / "measured" / "small.json", command_line="moa-fairseq recipe x"
    )
    assert FakeExecutor.programs() == ALL
    values = json.loads(result.read_text())
    assert values["experiment"] == "small"
    assert values["metrics"] == {
        "multi_bleu": 12.5,
        "compound_split_bleu": 13.0,
        "sacrebleu": 12.0,
        "sacrebleu_signature": "nrefs:1",
    }
    assert (values["parameters"], values["updates"], values["checkpoints_averaged"]) == (1000, 9, 2)
    assert values["generation"] == {"beam": 2, "lenpen": 1.0}
    assert values["command"] == "moa-fairseq recipe x"
    assert json.loads((tmp_path / "results" / "measured" / "small.json").read_text()) == values
    commands = (tmp_path / "runs" / "small" / "commands.sh").read_text()
    assert commands.count("fairseq-train ") == 1 and "moa-fairseq score" in commands


def test_a_second_run_does_nothing(go):
    go()
    FakeExecutor.programs()
    said, result = go(data=None)  # the data folder is remembered
    assert FakeExecutor.programs() == []
    assert result.is_file()
    assert sum("done before" in line for line in said) == 4


@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("generate.beam=3", ALL[2:]),
        ("average.epochs=3", ALL[1:]),
        ("score.headline=sacrebleu", ALL[3:]),
        ("train.max_epoch=5", ALL),  # going on for longer is the same training
        ("train.max_tokens=100", []),  # so is another machine
    ],
)
def test_only_what_a_change_touches_runs_again(go, override, again):
    go()
    FakeExecutor.programs()
    go(override)
    assert FakeExecutor.programs() == again


def test_other_settings_are_refused_and_named(go, tmp_path):
    go()
    FakeExecutor.programs()
    with pytest.raises(UserError, match=r"train\.flags\.lr: 0\.01 → 0\.5.*--restart"):
        go("train.flags.lr=0.5")
    assert FakeExecutor.programs() == []
    go("train.flags.lr=0.5", restart=True)
    assert FakeExecutor.programs() == ALL
    assert (tmp_path / "runs" / "small.old-1" / "result.json").is_file()


def test_foreign_checkpoints_are_refused(go, tmp_path):
    write_checkpoint(tmp_path / "runs" / "small" / "checkpoints" / "checkpoint_last.pt")
    with pytest.raises(UserError, match="did not make"):
        go()


def test_a_failed_generation_leaves_no_output_and_goes_on(go, tmp_path):
    FakeExecutor.fail = "fairseq-generate"
    with pytest.raises(UserError, match="fairseq-generate failed"):
        go()
    assert not (tmp_path / "runs" / "small" / "generate-test.txt").exists()
    FakeExecutor.programs()
    go()
    assert FakeExecutor.programs() == ALL[2:]


def test_an_interrupted_training_goes_on(go, tmp_path):
    FakeExecutor.fail = "fairseq-train"
    with pytest.raises(UserError):
        go()
    write_checkpoint(tmp_path / "runs" / "small" / "checkpoints" / "checkpoint_last.pt")
    FakeExecutor.programs()
    go()
    assert FakeExecutor.programs() == ALL


def test_a_cut_off_last_checkpoint_is_replaced_by_the_epochs(go, tmp_path):
    go()
    FakeExecutor.programs()
    folder = tmp_path / "runs" / "small" / "checkpoints"
    (folder / "checkpoint_last.pt").write_bytes((folder / "checkpoint3.pt").read_bytes()[:-10])
    go("train.max_epoch=4")
    assert option(FakeExecutor.calls[0], "--restore-file").endswith("checkpoint3.pt")


@pytest.mark.parametrize(("stage", "words"), [("train", "prepare"), ("generate", "prepare")])
def test_a_stage_alone_needs_the_one_before(go, stage, words):
    with pytest.raises(UserError, match=words):
        go(stage=stage, data=None)


def test_averaging_needs_enough_checkpoints(go, tmp_path):
    go(stage="train")
    for name in ("1", "2"):
        (tmp_path / "runs" / "small" / "checkpoints" / f"checkpoint{name}.pt").unlink()
    with pytest.raises(
        UserError, match=r"average\.epochs: .* 1 epoch checkpoints \(checkpoint3\.pt\), but 2"
    ):
        go(stage="average")


def test_generation_needs_the_average(go):
    go(stage="train")
    with pytest.raises(UserError, match="--stage average"):
        go(stage="generate")


def test_missing_data_says_what_to_bring(go):
    with pytest.raises(UserError, match=r"--data.*fairseq-preprocess|--data is missing"):
        go("data.recipe=parallel", data=None)


CELL = {"paper": "moa", "table": "1", "row": "a row", "column": "BLEU", "value": 1.0}


@pytest.fixture
def published(go, small, write_config):
    """`go`, of a recipe that stands for a row of a paper."""
    small["data"]["recipe"] = "binarised"
    write_config({**small, "reproduces": CELL})
    return go


def reproduces(result):
    return json.loads(result.read_text())["reproduces"]


def test_further_chains_stand_beside_the_papers_number(published, monkeypatch):
    monkeypatch.setitem(SCORES, "moa_release_bleu", {"score": 13.37})
    said, result = published()
    values = json.loads(result.read_text())
    assert values["metrics"]["multi_bleu"] == 12.5 and values["metrics"]["moa_release_bleu"] == 13.37
    assert values["reproduces"]["value"] == 1.0
    assert "multi_bleu 12.50, moa_release_bleu 13.37 on test; the paper prints 1.0" in said[-1]
    said, _ = published("generate.beam=1")  # no longer the paper's experiment
    assert "multi_bleu 12.50, moa_release_bleu 13.37 on test (" in said[-1]


def test_only_a_training_that_ran_to_the_recipes_end_stands_for_the_row(published):
    assert reproduces(published()[1])["row"] == "a row"
    _, result = published("train.max_epoch=2", save_dir=Path("short"), stage="train")
    for stage in ("average", "generate", "score"):  # without the --set: the recipe itself says 3 epochs
        _, result = published(save_dir=Path("short"), stage=stage)
    assert reproduces(result) is None


def test_a_later_stage_refuses_checkpoints_of_other_settings(published):
    published()
    for stage in ("average", "generate", "score"):
        with pytest.raises(UserError, match="was trained with other settings"):
            published("model.flags.dropout=0.5", stage=stage)


def test_the_result_says_how_the_file_it_scores_was_made(published):
    published("generate.beam=1")
    values = json.loads(published(stage="score")[1].read_text())
    assert values["generation"]["beam"] == 1 and values["reproduces"] is None


def test_an_unknown_subset_is_named_before_training(go, small, write_config, tmp_path):
    small["data"]["recipe"] = "parallel"
    write_config(small)
    (tmp_path / "text").mkdir()
    with pytest.raises(UserError, match="no subset foo"):
        go("generate.subsets=[foo]", data=tmp_path / "text")
    assert FakeExecutor.programs() == []


def test_a_result_of_another_average_stands_for_no_row(published):
    published()
    published("average.epochs=3", stage="average")
    published("average.epochs=3", stage="generate")
    values = json.loads(published(stage="score")[1].read_text())
    assert values["reproduces"] is None and values["checkpoints_averaged"] == 3
    assert reproduces(published()[1])["row"] == "a row"


def test_the_kept_recipe_claims_no_row_that_was_not_trained(published, tmp_path):
    published("train.max_epoch=2", stage="train")
    published(stage="average")
    kept = tmp_path / "runs" / "small" / "recipe.yaml"
    assert yaml.safe_load(kept.read_text())["reproduces"] is None
    published()
    assert yaml.safe_load(kept.read_text())["reproduces"]["row"] == "a row"


def test_recalled_data_must_be_what_the_recipe_asks_for(go):
    go(stage="prepare")
    with pytest.raises(UserError, match=r"data\.joined_dictionary: True → False"):
        go("data.joined_dictionary=false", "model.share_all_embeddings=false", stage="train", data=None)
    with pytest.raises(UserError, match="subset test1 is new"):
        go("generate.subsets=[test1]", stage="train", data=None)
    go("data.bpe=70", stage="train", data=None)  # of no effect on a folder that was binarised elsewhere
    assert FakeExecutor.programs() == ["fairseq-train"]


def test_a_stage_without_a_section_says_so(go):
    go(stage="train")
    said, _ = go("average=null", stage="average")
    assert any("no average section" in line for line in said)


def test_recording_needs_a_score(go, tmp_path):
    with pytest.raises(UserError, match=r"--record.*--stage average does not score"):
        go(stage="average", record=tmp_path / "x.json")
    with pytest.raises(UserError, match=r"--record.*no score section"):
        go("score=null", record=tmp_path / "x.json")
    assert FakeExecutor.programs() == []


def test_the_dry_run_plans_what_the_run_does(small, write_config, binarised, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FakeExecutor.calls, FakeExecutor.fail = [], None
    recipe = load_recipe(write_config(small))  # data.recipe says parallel, the folder is binarised
    options = Options(data=binarised)
    planned = planned_commands(recipe, CPU, options)
    run_recipe(recipe, CPU, options, FakeExecutor)
    assert FakeExecutor.calls == planned
    assert [line[line.index(">") + 1] for line in planned if ">" in line] == [
        "runs/small/generate-test.txt",
        "runs/small/score-test.json",
    ]


def test_the_speed_of_a_training_is_recorded_for_plans(go, tmp_path):
    path = tmp_path / "results" / "throughput" / "small.json"
    go(stage="train", record=path, command_line="moa-fairseq recipe x")
    row = json.loads(path.read_text())
    assert (row["experiment"], row["tokens_per_second"], row["precision"]) == ("small", 10.0, "fp32")
    assert row["macs_per_target_token"] > 1000 and row["command"] == "moa-fairseq recipe x"
    assert [found.speed for found in read_rows(tmp_path / "results")] == [10.0]


@pytest.mark.parametrize("mode", [[], ["--dry-run"], ["--hydra"]])
def test_a_run_folder_whose_models_fairseq_could_not_find_is_refused_first(
    small, write_config, binarised, tmp_path, mode, capsys
):
    """fairseq-generate splits --path at a colon: hours after the training began."""
    folder = tmp_path / "runs" / "12:30"
    line = ["recipe", str(write_config(small)), "--data", str(binarised), "--gpus", "0", *mode]
    assert main([*line, "--save-dir", str(folder)]) == 2
    said = capsys.readouterr()
    assert "12:30 cannot be used: fairseq takes a ':'" in said.err and not said.out
    assert not folder.exists()


IWSLT = {"train": 160239, "valid": 7283, "test": 6750}
MULTI30K = {"train": 29000, "valid": 1014, "test": 1000}
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "iwslt14_deen_mae7.yaml"


@pytest.fixture
def iwslt(tmp_path, monkeypatch, make_lines, said):
    """iwslt(lines or None, stage) runs IWSLT14's recipe on data of so many lines; (said, result path)."""
    monkeypatch.chdir(tmp_path)
    FakeExecutor.calls, FakeExecutor.fail = [], None

    def run(lines, stage="all"):
        data = make_lines(tmp_path / "data", lines) if lines else None
        said.clear()
        options = Options(data=data, save_dir=tmp_path / "run", stage=stage)
        result = run_recipe(load_recipe(CONFIG), CPU, options, FakeExecutor)
        return list(said), result

    return run


def test_iwslts_recipe_on_multi30k_stands_for_no_row(iwslt, tmp_path, capsys):
    said, result = iwslt(MULTI30K)
    assert reproduces(result) is None
    assert any(line.startswith("WARNING: this run does not stand for mae, table 3") for line in said)
    assert "reproduces: null" in (tmp_path / "run" / "recipe.yaml").read_text()
    assert main(["recipe", str(CONFIG), "--data", str(tmp_path / "data"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "WARNING: this run does not stand for" in out and "\nstands for" not in out


def test_iwslts_recipe_on_its_own_data_keeps_its_row(iwslt):
    said, result = iwslt(IWSLT)
    assert reproduces(result)["row"] == "MAE-7" and "stands for mae, table 3, MAE-7, BLEU: 35.5" in said


def test_a_later_stage_remembers_which_data_it_was(iwslt):
    iwslt(MULTI30K, "train")
    assert reproduces(iwslt(None)[1]) is None
