"""The stages of each kind of recipe: what runs, what is skipped, what is refused, what survives a failure."""

import argparse
import dataclasses
import json
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import yaml

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import catalogue
from moa_fairseq.experiments.data.binarised import check_stem
from moa_fairseq.experiments.data.prepare import size_digest
from moa_fairseq.experiments.make import read_step_records
from moa_fairseq.experiments.recipes import checkpoints, command, running
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.headline import headline_of
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.experiments.recipes.speeds import read_speeds
from moa_fairseq.experiments.records import provenance
from moa_fairseq.files import checksum
from moa_fairseq.process import Executor

pytestmark = pytest.mark.usefixtures("forked_commands")

CPU = Hardware()
SCORES = {
    "multi_bleu": {"score": 12.5},
    "compound_split_bleu": {"score": 13.0},
    "sacrebleu": {"score": 12.0, "signature": "nrefs:1"},
    "masked_lm_ppl": {"score": 7.0},
    "accuracy": {"score": 50.0},
}
REPORT = "Evaluated 245,569 tokens in 12.5s\nLoss (base 2): 4.2258, Perplexity: 18.71\n"
TRAINED = '| {"epoch": 3, "train_loss": "1", "train_wps": "10", "train_num_updates": "9", "train_wpb": "5"}'


def write_checkpoint(path, content="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def json_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def option(command, flag):
    return command[command.index(flag) + 1]


class FakeExecutor:
    """Writes what the real commands would write.

    `fail`: program that fails once with a UserError. `left_out`: sentences that are not translated.
    """

    calls: ClassVar[list] = []
    fail = None
    left_out = 0

    def __init__(self, environment=None):
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
            on_line(TRAINED)
        elif command[:2] == ["moa-fairseq", "average"]:
            write_checkpoint(Path(option(command, "--output")), "average")
        elif command[0] == "fairseq-generate":
            pair = "-".join(option(command, f"--{side}-lang") for side in ("source", "target"))
            name = (
                f"{option(command, '--gen-subset')}.{pair}.{option(command, '--target-lang')}"
            )
            count = check_stem(Path(command[1]) / name) - FakeExecutor.left_out
            lines = [f"H-{n}\t-1.0\tein Satz" for n in range(count)]
            output.write_text("\n".join(lines))
            for line in lines:
                on_line(line)
        elif command[0] == "fairseq-eval-lm":
            output.write_text(REPORT)
        elif command[1] == "zero-shot":
            digest = checksum(Path(command[2], "checkpoints/checkpoint_best.pt"))
            task = {"metrics": {"acc": 0.25}}
            record = {
                "checkpoint_sha256": digest,
                "limit": None,
                "tasks": {"lambada_openai": task},
            }
            Path(option(command, "--output")).write_text(json.dumps(record))
        elif "score" in command:
            output.write_text(json.dumps(SCORES))

    @classmethod
    def programs(cls):
        names = [" ".join(c[:2]) if c[0] == "moa-fairseq" else c[0] for c in cls.calls]
        cls.calls = []
        return names


ALL = ["fairseq-train", "moa-fairseq average", "fairseq-generate", "moa-fairseq score"]
# Small recipes of the kinds that are not translations.
SMALL = yaml.safe_load("""
masked:
  experiment: masked
  summary: a small masked language model
  data: {recipe: wikitext2_gpt2bpe}
  model: {arch: moa_roberta_tiny, num_experts: 4, experts_per_token: 2, expert_dim: 8, flags: &tiny
    {encoder-layers: 1, encoder-embed-dim: 16, encoder-ffn-embed-dim: 16}}
  train: {task: masked_lm, criterion: masked_lm_with_routing, max_tokens: 240, max_epoch: 2,
    keep_last_epochs: 2, log_interval: 1,
    flags: {tokens-per-sample: 24, optimizer: adam, lr: 0.01, num-workers: 0}}
  average: {epochs: 2}
  score: {headline: masked_lm_ppl, subsets: [test], flags: {maskings: 2}}
classifier:
  experiment: classifier
  summary: a small classifier
  data: {recipe: listops}
  model: {arch: switchhead_roberta_listops, num_experts: 2, experts_per_token: 1, expert_dim: 4, flags: *tiny}
  train: {task: sentence_prediction_by_length, criterion: sentence_prediction_with_routing, max_tokens: 800,
    max_epoch: 2, log_interval: 1,
    flags: {num-classes: 10, init-token: 0, optimizer: adam, lr: 0.01, num-workers: 0}}
  score: {headline: accuracy, subsets: [test]}
causal:
  experiment: causal
  summary: a small language model
  data: {recipe: wikitext103_word}
  model: {arch: transformer_lm, flags: {decoder-layers: 1, decoder-embed-dim: 16}}
  train: {task: language_modeling, criterion: cross_entropy, max_tokens: 240, max_epoch: 2,
    flags: {tokens-per-sample: 24, optimizer: adam, lr: 0.01, num-workers: 0}}
  score: {headline: lm_ppl, subsets: [test, valid], flags: {context-window: 4}}
""")
# kind → its programs without those of the data, its headline's value, its first data command
KINDS = {
    "translation": (ALL, ("multi_bleu", 12.5), "--source-lang"),
    "masked": (ALL[:2] + ALL[3:], ("masked_lm_ppl", 7.0), "--only-source"),
    "classifier": (ALL[:1] + ALL[3:], ("accuracy", 50.0), "--only-source"),
    "causal": (ALL[:1] + ["fairseq-eval-lm"] * 2, ("lm_ppl", 18.71), "--only-source"),
}


@pytest.fixture
def recipe_of(small, write_config):
    """recipe_of(kind)"""
    return lambda kind: load_recipe(write_config(SMALL.get(kind, small)))


@pytest.fixture
def data_of(request, tmp_path):
    """data_of(kind) → binarised data, as fairseq-preprocess leaves it."""

    def make(kind):
        if kind == "translation":
            return request.getfixturevalue("binarised")
        if kind == "masked":
            return request.getfixturevalue("toy_wiki_data")
        folder = tmp_path / "data"
        if kind == "classifier":
            line = f"prepare listops {folder} --sizes 60 10 20 --workers 1".split()
            assert main(line) == 0
            return folder / "binarised"
        texts = {
            f"{split}pref": f"{tmp_path}/{split}.txt" for split in ("train", "valid", "test")
        }
        for path in texts.values():
            Path(path).write_text("a b c\n" * 9)
        preprocess = request.getfixturevalue("preprocess")
        preprocess({"only-source": True, "destdir": str(folder), **texts})
        return folder

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown_run_and_found_done(
    kind, recipe_of, data_of, shown, tmp_path, monkeypatch, said
):
    monkeypatch.chdir(tmp_path)
    FakeExecutor.calls = []
    FakeExecutor.fail = None
    programs, (headline, value), first = KINDS[kind]
    if kind != "translation":  # whose recipe asks for text that is not there
        assert shown(recipe_of(kind))[0][:2] == ["fairseq-preprocess", first]
    recipe = recipe_of(kind)
    data = data_of(kind)
    options = Options(data=data, save_dir=tmp_path / "run", command_line="moa-fairseq recipe x")
    planned = shown(recipe, CPU, options)
    result = run_recipe(recipe, CPU, options, FakeExecutor)
    ran = [[word.replace(".partial", "") for word in command] for command in FakeExecutor.calls]
    assert [
        command[: command.index(">")] if ">" in command else command for command in planned
    ] == ran
    assert FakeExecutor.programs() == programs
    values = json_of(result)
    assert values["metrics"][headline] == value and (
        values["parameters"],
        values["updates"],
    ) == (
        1000,
        9,
    )
    assert values["command"] == "moa-fairseq recipe x" and values["reproduces"] is None
    assert f"{headline} {value:.2f} on test" in said[-1]
    if kind == "causal":  # whose words are all known
        assert (
            values["evaluation"]["unknown"] == 0
            and "0.00% of its symbols are <unk>" in said[-1]
        )
    kept = (tmp_path / "run" / "commands.sh").read_text()
    assert kept.count("fairseq-train ") == 1
    said.clear()
    assert run_recipe(recipe, CPU, Options(save_dir=tmp_path / "run"), FakeExecutor) == result
    # the run's copy of what reads and writes its text is a step, too
    assert (
        FakeExecutor.programs() == []
        and sum("done before" in line for line in said) == len(programs) + 1
    )
    for stage in ("average", "generate"):
        if not getattr(recipe, stage):
            run_recipe(
                recipe, CPU, Options(stage=stage, save_dir=tmp_path / "run"), FakeExecutor
            )
            assert any(f"no {stage} section" in line for line in said)


def test_zero_shot_tasks_are_the_last_stage(
    recipe_of, data_of, shown, tmp_path, monkeypatch, said
):
    """lm_eval is asked for before the training; a result stays that of its model if the tasks fail."""
    FakeExecutor.calls = []
    FakeExecutor.fail = None
    recipe = dataclasses.replace(
        recipe_of("causal"), average=None, zero_shot=["lambada_openai", "cbt"]
    )
    options = Options(data=data_of("causal"), save_dir=tmp_path / "run")
    last = shown(recipe, CPU, options)[-1]
    assert last[:3] == ["moa-fairseq", "zero-shot", str(tmp_path / "run")]
    assert option(last, "--tasks") == "lambada_openai,cbt" and "--cpu" in last
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"setup\.sh --zero-shot.*zero_shot=null"):
        run_recipe(recipe, CPU, options, FakeExecutor)
    assert FakeExecutor.programs() == [] and not (tmp_path / "run").exists()
    monkeypatch.setattr(running, "require_lm_eval", lambda *words: None)
    FakeExecutor.fail = "moa-fairseq"
    with pytest.raises(UserError):
        run_recipe(recipe, CPU, options, FakeExecutor)
    result = tmp_path / "run" / "result.json"
    assert json_of(result)["metrics"]["lm_ppl"] == 18.71
    FakeExecutor.calls = []
    record = tmp_path / "record.json"
    for stage in ("zero-shot", "score", "all"):
        copy = None if stage == "zero-shot" else record
        run_recipe(
            recipe, CPU, dataclasses.replace(options, stage=stage, record=copy), FakeExecutor
        )
    assert FakeExecutor.programs() == ["moa-fairseq zero-shot"], "once"
    scores = {"lm_ppl": 18.71, "lm_bits": 4.2258, "lambada_acc": 25.0}
    assert json_of(record)["metrics"] == json_of(result)["metrics"] == scores
    write_checkpoint(tmp_path / "run" / "checkpoints" / "checkpoint_best.pt", "another")
    run_recipe(recipe, CPU, dataclasses.replace(options, stage="score"), FakeExecutor)
    assert "lambada_acc" not in json_of(result)["metrics"], "of another checkpoint"


@pytest.mark.parametrize(
    "tasks, kind", [([], "causal"), (["cbt"], "masked"), (["--x"], "causal"), ("cbt", "causal")]
)
def test_tasks_that_cannot_be_evaluated_are_refused(tasks, kind, write_config):
    with pytest.raises(UserError, match=r"zero_shot: .*(empty|causal|name|list)"):
        load_recipe(write_config({**SMALL[kind], "zero_shot": tasks}))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "classifier"])
def test_all_stages_for_real(kind, recipe_of, tmp_path, toy_wiki_data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"train": 150, "valid": 20, "test": 35}
    monkeypatch.setitem(catalogue.datasets()["listops"].generated, "sizes", sizes)
    data = toy_wiki_data if kind == "masked" else None
    path = run_recipe(recipe_of(kind), CPU, Options(data=data, save_dir=tmp_path / "run"))
    result = json_of(path)
    assert result["parameters"] > 1000 and result["subset"] == "test"
    if kind == "masked":
        assert (
            1 < result["metrics"]["masked_lm_ppl"] < 300
            and result["evaluation"]["maskings"] == 2
        )
        assert result["metrics"]["masked_lm_word_ppl"] > result["metrics"]["masked_lm_ppl"]
    else:
        scores = json_of(tmp_path / "run" / "score-test.json")["accuracy"]
        assert result["metrics"] == {"accuracy": scores["score"]} and scores["sentences"] == 35
        assert sorted(scores["by"]["dependency"]) == ["2", "3", "4", "5", "6"]


CELL = {"paper": "moa", "table": "1", "row": "a row", "column": "BLEU", "value": 1.0}


@pytest.fixture
def go(small, write_config, tmp_path, monkeypatch, make_lines, said):
    """go(*overrides, **options) runs the small recipe on the row's data; returns (said, result path)."""
    FakeExecutor.calls = []
    FakeExecutor.fail = None
    monkeypatch.chdir(tmp_path)
    small["data"]["recipe"] = "wmt14_en_de"
    path = write_config({**small, "reproduces": CELL})
    binarised = make_lines(tmp_path / "bin", {"train": 1, "valid": 3000, "test": 3003}, "en-de")
    dataset = catalogue.datasets()["wmt14_en_de"]
    settings = vars(load_recipe(path).data)
    steps = {split: dataset.treatment(split, settings) for split in dataset.splits}
    made = {"settings": settings, "dataset": "wmt14_en_de", "steps": steps}
    (binarised / "manifest.json").write_text(json.dumps(made))

    def run(*overrides, of=(), **options):
        said.clear()
        options.setdefault("data", binarised)
        more = Options(**options, published_recipe=load_recipe(path, of))
        return list(said), run_recipe(load_recipe(path, overrides), CPU, more, FakeExecutor)

    return run


def test_a_result_names_the_commit_of_its_training(go, tmp_path, monkeypatch):
    """Not that of the call that scores it; nor are a call's command and hardware those of the training."""
    source = SimpleNamespace(commit="one")
    monkeypatch.setattr(provenance, "commit", lambda: source.commit)
    go(stage="train", command_line="moa-fairseq recipe small")
    source.commit = "two"
    for name in ("average", "generate"):
        go(stage=name)
    source.commit = "three"
    values = json_of(go(stage="score", command_line="moa-fairseq recipe --stage score")[1])
    facts = (values["commit"], values["command"], values["hardware"])
    assert facts == ("one", "moa-fairseq recipe small", CPU.describe())
    assert values["commits"] == {
        **dict.fromkeys(("train-text", "train"), "one"),
        **dict.fromkeys(("average", "generate-test"), "two"),
        "score-test": "three",
    }
    state = tmp_path / "runs" / "small" / "state.json"
    known = json_of(state)
    del known["train"]["made_by"]  # as an earlier version left it
    known["train"]["facts"]["hardware"] = "an abacus"
    state.write_text(json.dumps(known))
    values = json_of(go()[1])
    assert (values["commit"], values["versions"], values["hardware"]) == (
        None,
        None,
        "an abacus",
    )


def test_a_training_does_not_go_on_with_text_of_another_content(go, tmp_path):
    """Its files have the names and sizes of those that it was trained on."""
    go(stage="train")
    binarised = tmp_path / "bin" / "train.en-de.en.bin"
    text = binarised.read_bytes()
    binarised.write_bytes(bytes(byte ^ 1 for byte in text))
    with pytest.raises(UserError, match=r"data: \w+ → \w+.*--restart"):
        go("train.max_epoch=4", stage="train")
    # an older version knew the data by the sizes of its files, and its training by the content
    state = tmp_path / "runs" / "small" / "state.json"
    known = json_of(state)
    known["train"]["inputs"]["data"] = size_digest(tmp_path / "bin")
    state.write_text(json.dumps(known))
    with pytest.raises(UserError, match=r"another content.*--data.*--restart"):
        go("train.max_epoch=4", stage="train")
    binarised.write_bytes(text)
    go("train.max_epoch=4", stage="train")


def test_the_runs_recipe_says_how_far_it_was_trained(go, tmp_path):
    """Not how far a later call that trains nothing would train it."""
    go(stage="train")
    go("train.max_epoch=50", stage="average")
    assert (
        yaml.safe_load((tmp_path / "runs/small/recipe.yaml").read_text())["train"]["max_epoch"]
        == 3
    )


def test_the_speed_of_a_training_says_what_trained_it(go, tmp_path, monkeypatch):
    """A later call, for another batch, finds it done, and records it."""
    monkeypatch.setattr(provenance, "commit", lambda: "one")
    go("train.max_tokens=100", stage="train")
    monkeypatch.setattr(provenance, "commit", lambda: "two")
    record = tmp_path / "speed.json"
    go("train.max_tokens=200", stage="train", record=record)
    values = json_of(record)
    facts = [values[key] for key in ("commit", "precision", "max_tokens", "update_freq")]
    assert facts == ["one", "fp32", 100, 4]


def test_a_run_of_another_row_of_the_file_says_so(go, tmp_path):
    path = tmp_path / "configs" / "small.yaml"
    rows = {"wide beam": {"reproduces.value": 2.0, "generate.beam": 7}}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rows": rows}))
    beam = ["generate.beam=7"]
    values = json_of(go(*beam, of=beam)[1])
    assert (
        values["row"] == values["reproduces"]["row"] == "wide beam"
        and values["reproduces"]["value"] == 2.0
    )
    assert (
        yaml.safe_load((tmp_path / "runs" / "small" / "recipe.yaml").read_text())["rows"] == {}
    )
    assert "row" not in json_of(go()[1])
    assert "row" not in json_of(go(*beam, "generate.lenpen=0.5", of=beam)[1])


def reproduces(result):
    return json_of(result)["reproduces"]


def test_the_result_has_all_that_is_needed(go, tmp_path, said):
    _, result = go(record=tmp_path / "results" / "measured" / "small.json")
    assert not any("--allow-partial" in call for call in FakeExecutor.calls)
    values = json_of(result)
    assert "updated_parameters" not in values
    assert (
        values["metrics"]["sacrebleu_signature"] == "nrefs:1"
        and values["checkpoints_averaged"] == 2
    )
    assert (
        values["generation"] == {"beam": 2, "lenpen": 1.0}
        and values["reproduces"]["row"] == "a row"
    )
    assert (
        "the paper prints 1.0" in said[-2]
        and "reproduces moa, table 1, a row, BLEU: 1.0" in said
    )
    assert json_of(tmp_path / "results" / "measured" / "small.json") == values


@pytest.mark.thorough(keep=("again0", "again3", "again5"))
@pytest.mark.parametrize(
    ("override", "again"),
    [
        ("generate.beam=3", ALL[2:]),
        ("average.epochs=3", ALL[1:]),
        ("score.headline=sacrebleu", ALL[3:]),
        ("train.max_epoch=5", ALL),  # going on for longer is the same training
        ("train.max_tokens=100", []),  # the same for another machine
        ("train.flags.ddp-backend=legacy_ddp", []),
        ("train.flags.keep-best-checkpoints=2", []),
        ("train.flags.stop-time-hours=2", ALL),
    ],
)
def test_only_what_a_change_touches_runs_again(go, override, again):
    go()
    FakeExecutor.programs()
    go(override)
    assert FakeExecutor.programs() == again


def test_other_settings_are_refused_and_named_by_every_stage(go, tmp_path):
    go()
    FakeExecutor.programs()
    for stage in ("all", "train", "average", "generate", "score"):
        with pytest.raises(UserError, match=r"train\.flags\.lr: 0\.01 → 0\.5.*--restart"):
            go("train.flags.lr=0.5", stage=stage)
    assert FakeExecutor.programs() == []
    go("train.flags.lr=0.5", restart=True)
    assert FakeExecutor.programs() == ALL
    assert (tmp_path / "runs" / "small.old-1" / "result.json").is_file()


@pytest.mark.parametrize("program", ["fairseq-train", "fairseq-generate", "moa-fairseq"])
def test_what_failed_is_made_again_and_nothing_else(go, tmp_path, program):
    FakeExecutor.fail = program
    with pytest.raises(UserError, match=f"{program} failed"):
        go()
    done = [name for name in FakeExecutor.programs() if not name.startswith(program)]
    if program == "fairseq-train":
        write_checkpoint(tmp_path / "runs" / "small" / "checkpoints" / "checkpoint_last.pt")
    run = tmp_path / "runs" / "small"
    assert (
        not (run / "generate-test.txt").exists() and not (run / "average.pt").exists()
    ) or done
    go()
    assert FakeExecutor.programs() == ALL[len(done) :]


@pytest.mark.parametrize("best", [2.0, 1.0])
def test_a_save_that_a_full_disk_cut_short_is_completed(go, tmp_path, monkeypatch, best):
    """The copies to best and last had no space, and fairseq has nothing left to do."""
    go(stage="train")
    folder = tmp_path / "runs" / "small" / "checkpoints"
    state = {"model": {"w": torch.ones(2)}, "extra_state": {"val_loss": 2.0, "best": best}}
    torch.save(state, folder / "checkpoint3.pt")
    (folder / "checkpoint_last.pt").unlink()
    (folder / "checkpoint_best.pt").write_bytes(b"PK half")
    run = FakeExecutor.run

    def trains_no_more(self, command, *words, **options):
        return (
            FakeExecutor.calls.append(command)
            if "train" in command[0]
            else run(self, command, *words, **options)
        )

    copied = []

    def note(copy, source, target, to=checkpoints.copy_whole):
        copied.append(Path(target).name)
        return to(copy, source, target)

    monkeypatch.setattr(checkpoints, "copy_whole", note)
    monkeypatch.setattr(FakeExecutor, "run", trains_no_more)
    go("train.max_epoch=4")
    # the last one says that all is done
    assert copied == ["checkpoint_best.pt"] * (best == 2.0) + ["checkpoint_last.pt"]
    assert (
        FakeExecutor.programs() == ALL[:1] + ALL and "--restore-file" not in FakeExecutor.calls
    )
    newest = (folder / "checkpoint3.pt").read_bytes()
    assert (folder / "checkpoint_last.pt").read_bytes() == newest
    assert ((folder / "checkpoint_best.pt").read_bytes() == newest) == (best == 2.0)


def test_the_log_of_a_training_that_left_no_checkpoint_is_not_the_next_ones(go, tmp_path):
    """It was killed before its first save: the next one begins anew, with a clock of its own."""
    go(stage="prepare")
    log = tmp_path / "runs" / "small" / "train.jsonl"
    log.write_text('{"epoch": 1, "loss": "9", "num_updates": "1", "wall": "50"}\n')
    go(stage="train")
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [3]


def test_a_training_without_its_optimizer_does_not_go_on(go):
    """fairseq would begin at update 0 again, with the trained weights."""
    flag = "train.flags.no-save-optimizer-state=true"
    go(flag)
    assert FakeExecutor.programs() == ALL
    go(flag)
    with pytest.raises(UserError, match=r"train\.flags\.no-save-optimizer-state.*--restart"):
        go(flag, "train.max_epoch=4")
    assert FakeExecutor.programs() == []
    go(flag, "train.max_epoch=4", restart=True)


def test_a_run_of_an_earlier_version_is_known(go, tmp_path):
    """Which counted more flags among what a training is."""
    flags = ["train.flags.save-interval-updates=7", "train.flags.patience=3"]
    go(*flags)
    path = tmp_path / "runs" / "small" / "state.json"
    state = json_of(path)
    state["train"]["inputs"]["train"]["flags"].update(
        {"save-interval-updates": 7, "patience": 3}
    )
    del state["train"]["goal"]["patience"], state["train"]["facts"]["save-interval-updates"]
    path.write_text(json.dumps(state))
    FakeExecutor.programs()
    go(*flags)
    assert FakeExecutor.programs() == []
    go(*flags, "train.flags.patience=4")  # which may go further
    assert FakeExecutor.programs() == ALL


def test_what_comes_after_the_training_may_be_changed_after_it(go, tmp_path):
    """No remedy leads back to where it came from."""
    updates = [
        "average.epochs=null",
        "average.updates=2",
        "train.flags.save-interval-updates=1",
    ]
    go("train.flags.save-interval-updates=2")
    with pytest.raises(UserError, match=r"average\.updates: .*--set average=null"):
        go(*updates, stage="average")  # the fake training leaves epochs only
    FakeExecutor.programs()
    _, result = go("average=null")
    assert FakeExecutor.programs() == ALL[2:]
    assert json_of(result)["checkpoints_averaged"] == 1
    (tmp_path / "runs" / "small" / "checkpoints" / "checkpoint_best.pt").unlink()
    with pytest.raises(UserError, match=r"checkpoint_best\.pt is missing.*average\.epochs=N"):
        go("average=null")
    go("average.epochs=2")
    assert FakeExecutor.programs() == ALL[2:]


@pytest.mark.parametrize("section", ["train", "generate", "score"])
def test_files_are_asked_for_before_the_training(go, section):
    flag = {"train": "continue-once", "generate": "lm-path", "score": "raw-reference"}[section]
    with pytest.raises(UserError, match=rf"{section}\.flags\.{flag}: there is no file nowhere"):
        go(f"{section}.flags.{flag}=nowhere")
    assert FakeExecutor.programs() == []


@pytest.mark.parametrize(
    ("stage", "options", "words"),
    [
        ("train", {"data": None}, "prepare"),
        ("generate", {"data": None}, "prepare"),
        ("generate", {}, "--stage average|--stage train"),
        ("score", {}, "--stage generate"),
        ("average", {"record": Path("x.json")}, "--record.*--stage average does not score"),
    ],
)
def test_a_stage_alone_needs_the_one_before(go, stage, options, words):
    with pytest.raises(UserError, match=words):
        go(stage=stage, **options)


def test_averaging_needs_enough_checkpoints(go, tmp_path):
    go(stage="train")
    for name in ("1", "2"):
        (tmp_path / "runs" / "small" / "checkpoints" / f"checkpoint{name}.pt").unlink()
    with pytest.raises(UserError, match=r"average\.epochs: .*checkpoint3\.pt"):
        go(stage="average")


def test_only_a_training_that_ran_to_the_recipes_end_stands_for_the_row(go, tmp_path):
    assert reproduces(go()[1])["row"] == "a row"
    go("train.max_epoch=2", save_dir=Path("short"), stage="train")
    # Without the --set: the recipe itself says 3 epochs
    for stage in (
        "average",
        "generate",
        "score",
    ):
        _, result = go(save_dir=Path("short"), stage=stage)
    assert reproduces(result) is None
    assert json_of(result)["differences"] == ["train.max_epoch: 3 → 2"]
    assert (
        yaml.safe_load((tmp_path / "short" / "recipe.yaml").read_text())["reproduces"] is None
    )


def test_the_result_says_how_the_file_it_scores_was_made(go):
    go("generate.beam=1")
    values = json_of(go(stage="score")[1])
    assert values["generation"]["beam"] == 1 and values["reproduces"] is None
    go("average.epochs=3", stage="average")
    go("average.epochs=3", stage="generate")
    values = json_of(go(stage="score")[1])
    assert values["reproduces"] is None and values["checkpoints_averaged"] == 3
    assert reproduces(go()[1])["row"] == "a row"
    go("train.max_epoch=5", stage="train")  # the average is of the shorter training
    assert reproduces(go(stage="score")[1]) is None


def scored_text(monkeypatch, hyphens):
    """The hyphens that the score step finds in the references."""
    monkeypatch.setitem(SCORES, "meta", {"hyphens": {"references": hyphens, "hypotheses": ""}})


def test_the_references_hyphens_choose_the_chain_of_one_compound_split(
    go, monkeypatch, tmp_path
):
    """The tokeniser splits the hyphens of this row's text; where they are whole a chain splits them."""
    for hyphens, headline in (
        ("split", "multi_bleu"),
        ("", "multi_bleu"),
        ("whole", "compound_split_bleu"),
    ):
        scored_text(monkeypatch, hyphens)
        _, result = go(save_dir=tmp_path / f"run_{hyphens}")
        values = json_of(result)
        assert values["headline"] == headline
        assert bool(values["reproduces"]) == (hyphens != "whole")
    assert values["differences"] == ["score.headline: multi_bleu → compound_split_bleu"]
    _, result = go("score.headline=sacrebleu", save_dir=tmp_path / "run_whole")
    assert json_of(result)["headline"] == "sacrebleu", "whoever asks for a metric gets it"


def test_the_headline_of_text_without_spaces_is_sacrebleus(go, monkeypatch):
    for tokenizer, headline in (
        ("char", "sacrebleu"),
        ("ja-mecab-0.996-IPA", "sacrebleu"),
        ("13a", "multi_bleu"),
    ):
        monkeypatch.setitem(SCORES, "meta", {"without_spaces": True})
        signature = f"nrefs:1|case:mixed|tok:{tokenizer}|smooth:exp"
        monkeypatch.setitem(SCORES, "sacrebleu", {"score": 12.0, "signature": signature})
        values = json_of(go("score.flags.lowercase=false", restart=True)[1])
        assert values["headline"] == headline
        assert values["metrics"]["sacrebleu_signature"] == signature


def test_a_translation_of_a_part_is_no_result_unless_asked_for(go, tmp_path, monkeypatch):
    """As where a finished run of an earlier version meets a sentence that is longer than its model."""
    flag = "generate.flags.skip-invalid-size-inputs-valid-test=true"
    go(stage="train")
    go(stage="average")
    monkeypatch.setattr(FakeExecutor, "left_out", 3)
    FakeExecutor.programs()
    with pytest.raises(UserError, match=r"3,000 of 3,003 sentences of test"):
        go()
    values = json_of(go(flag, "generate.subsets=[test,valid]")[1])
    assert "--allow-partial" in next(
        call for call in FakeExecutor.calls if call[:2] == ["moa-fairseq", "score"]
    )
    assert "fairseq-train" not in FakeExecutor.programs()
    assert values["left_out"] == {"test": 3, "valid": 3} and values["reproduces"] is None
    assert "left out of test: 3 of its sentences" in values["differences"]


def test_translations_are_counted_against_the_data_that_is_read(go, tmp_path, make_lines):
    """Not against what an earlier prepare stage counted in that folder."""
    go(stage="train")
    shutil.rmtree(tmp_path / "bin")
    make_lines(tmp_path / "bin", {"train": 1, "valid": 3000, "test": 5}, "en-de")
    for stage in ("average", "generate", "score"):
        _, result = go(stage=stage, data=None)
    assert "left_out" not in json_of(result)


@pytest.mark.parametrize("target", ["ja", "zh_CN", "ko", "th", "km", "my", "lo", "yue", "de"])
def test_the_headline_is_sacrebleus_by_the_targets_language(small, write_config, target):
    recipe = load_recipe(write_config(small), [f"data.target={target}", "data.tokenize=true"])
    scores = {
        "sacrebleu": {"score": 1.0, "signature": "nrefs:1|tok:char|smooth:exp"},
        "meta": {},
    }
    assert headline_of(recipe, recipe, scores) == (
        "multi_bleu" if target == "de" else "sacrebleu"
    )


def test_flags_of_the_scoring_are_a_part_of_the_experiment(go):
    _, result = go("score.flags.lowercase=true")
    assert json_of(result)["differences"] == ["scoring.lowercase: not set → True"]
    assert reproduces(go("score.flags.also=moa-release")[1])


def test_recalled_data_must_be_what_the_recipe_asks_for(go):
    go(stage="prepare")
    with pytest.raises(UserError, match=r"data\.joined_dictionary: True → False"):
        go(
            "data.joined_dictionary=false",
            "model.share_all_embeddings=false",
            stage="train",
            data=None,
        )
    with pytest.raises(UserError, match="subset test1 is new"):
        go("generate.subsets=[test1]", stage="train", data=None)
    # Of no effect on a folder that was binarised elsewhere
    go("data.bpe=70", stage="train", data=None)
    assert FakeExecutor.programs() == ["fairseq-train"]


def test_what_is_wrong_with_the_data_is_said_before_training(go, small, write_config, tmp_path):
    with pytest.raises(UserError, match=r"--data .*data.recipe parallel"):
        go("data.recipe=parallel", data=None)
    (tmp_path / "text").mkdir()
    with pytest.raises(UserError, match="no subset foo"):
        go("data.recipe=parallel", "generate.subsets=[foo]", data=tmp_path / "text")
    assert FakeExecutor.programs() == []


def test_the_speed_of_a_training_is_recorded_for_plans(go, tmp_path):
    path = tmp_path / "results" / "throughput" / "small.json"
    go(stage="train", record=path, command_line="moa-fairseq recipe x")
    row = json_of(path)
    assert (row["experiment"], row["tokens_per_second"], row["precision"]) == (
        "small",
        10.0,
        "fp32",
    )
    assert row["macs_per_target_token"] > 1000 and row["command"] == "moa-fairseq recipe x"
    assert [
        (found.device, found.tokens_per_second) for found in read_speeds(tmp_path / "results")
    ]


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_a_run_folder_whose_models_fairseq_could_not_find_is_refused_first(
    small, write_config, binarised, tmp_path, mode, capsys
):
    """fairseq-generate splits --path at a colon: hours after the training began."""
    folder = tmp_path / "runs" / "12:30"
    line = [*f"recipe {write_config(small)} --data {binarised} --gpus 0".split(), *mode]
    assert main([*line, "--save-dir", str(folder)]) == 2
    assert "12:30: fairseq takes the ':'" in capsys.readouterr().err and not folder.exists()


def test_each_seed_has_its_folder_and_record_and_all_have_a_mean(
    small, write_config, binarised, tmp_path, monkeypatch, capsys
):
    def execute(self, command, log, output=None, **options):
        FakeExecutor.run(self, command, log, output, **options)
        if "score" in command:
            score = 10.0 + int(output.parent.name[-1])
            output.write_text(json.dumps({**SCORES, "multi_bleu": {"score": score}}))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Executor, "run", execute)
    line = f"recipe {write_config(small)} --data {binarised} --gpus 0".split()
    assert main([*line, "--record", "--seeds", "1,2,4"]) == 0
    assert "seeds 1,2,4: 12.33, standard deviation 1.53" in capsys.readouterr().out
    for seed in (1, 2, 4):
        run = tmp_path / "runs" / f"small_seed{seed}"
        values = json_of(run / "result.json")
        assert (values["seed"], values["metrics"]["multi_bleu"]) == (seed, 10.0 + seed)
        assert f"--seed {seed} " in (run / "commands.sh").read_text()
        record = tmp_path / "results" / "measured" / f"small_seed{seed}.json"
        assert json_of(record) == values
    assert (
        main([*line, "--dry-run", "--seeds", "5,6", "--save-dir", "x", "--set", "train.seed=9"])
        == 0
    )
    out = capsys.readouterr().out
    assert "--save-dir x_seed5/" in out and "--seed 6 " in out and "deviation" not in out
    for words in (
        ["--seeds", "1,two"],
        ["--seeds", "1", "--stage", "train"],
        ["--seeds", "1", "--plan"],
    ):
        assert main([*line, *words]) == 2 and "--seeds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "record, names",
    [
        (None, [None] * 2),
        ("", ["small_seed1", "small_seed2"]),
        ("mine", ["mine_seed1", "mine_seed2"]),
    ],
)
def test_no_two_seeds_share_a_record(record, names):
    args = argparse.Namespace(
        seeds="1,2", overrides=[], plan=False, stage="all", save_dir=None, record=record
    )
    assert [run.record for run in command._with_seeds(args, "small")] == names


def test_a_diverged_models_perplexity_is_kept_as_null(
    recipe_of, data_of, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        f"{__name__}.REPORT", REPORT.replace("4.2258", "inf").replace("18.71", "inf")
    )
    options = Options(data=data_of("causal"), save_dir=tmp_path / "run")
    result = run_recipe(recipe_of("causal"), CPU, options, FakeExecutor)
    assert json_of(result)["metrics"]["lm_ppl"] is None
    assert read_step_records(tmp_path / "run")["score-test"]["fingerprint"]


def test_a_checkpoint_that_cannot_be_read_now_is_not_replaced_by_an_older_one(
    tmp_path, monkeypatch
):
    """No right to read it, say: it may be whole."""
    for name in ("checkpoint1.pt", "checkpoint_last.pt"):
        write_checkpoint(tmp_path / name, name)
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    opened = zipfile.ZipFile

    def refused(path, *arguments):
        if Path(path).name == "checkpoint_last.pt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(zipfile, "ZipFile", refused)
    with pytest.raises(PermissionError):
        checkpoints.restore_last_checkpoint(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before


def test_the_runs_recipe_keeps_values_that_follow_from_its_data_open(go, tmp_path):
    """Other data may have a longer sentence."""
    go()
    written = yaml.safe_load((tmp_path / "runs/small/recipe.yaml").read_text())
    assert written["train"]["min_tokens"] is None
