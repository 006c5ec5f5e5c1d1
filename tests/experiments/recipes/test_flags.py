"""The programs are asked about a recipe's flags; a stranger's recipe runs and writes nothing else."""

import argparse
import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from moa_fairseq import process
from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes import precision as module
from moa_fairseq.experiments.recipes.batch import (
    plan_batch,
    planned_updates,
    schedule_warning,
    training_set,
)
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.recipes.hardware import (
    Hardware,
    assumed_hardware,
    find_world,
)
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.recipes.precision import check_parallel_flags
from moa_fairseq.experiments.recipes.rules import PREVENTS_RESUMING, REFUSED, SET_BY_RUNNER
from moa_fairseq.experiments.recipes.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(shipped_recipes())
NAMES_A_FILE = re.compile(
    "path|dir|file|script|save|log|repo|dict|yaml|config|pref|suffix|from|checkpoint|model|root|vocab|json|codes|"
    "lexicon|args|detok|tokenizer|bpe|hash|stats|plasma|wandb"
)
# Flags of such a name that read files, or are not names of files; each was looked up in fairseq's source.
READ = """
    align-suffix alignfile baseline-model decoder-embed-path encoder-embed-path ema-seed-model
    fixed-dictionary finetune-from-model label-dir lang-dict lm-path
    load-pretrained-aux-decoder-from load-pretrained-decoder-from load-pretrained-encoder-from
    multires-hubert-path multitask-config-yaml config-yaml path pretrained-checkpoint
    pretrained-mlm-checkpoint pretrained-xlm-checkpoint quantization-config-path restore-file
    continue-once sampling-weights-from-file seq2seq-path source-dict srcdict target-dict
    target-dictionary testpref tgtdict trainpref validpref w2v-path wer-kenlm-model wer-lexicon
"""
PLAIN = """
    aim-run-hash baseline-model-langs best-checkpoint-metric bpe decoder-xformers-att-config
    duration-prediction edge-unit-prediction encoder-xformers-att-config eval-args eval-bleu-args
    eval-bleu-detok eval-bleu-detok-args eval-bleu-remove-bpe eval-wer-tokenizer
    lambda-denoising-config lambda-otf-bt-config lambda-parallel-config log-keys
    model-overrides multires-hubert-args next-unit-prediction pipeline-checkpoint
    precompute-mask-config remove-bpe router-log tokenizer w2v-args wer-args wandb-project
    keep-inference-langtok tensorboard-logdir
"""


def text_flags():
    """The flags of fairseq's commands, tasks, models and criterions that take text."""
    kinds = ("preprocessing", "training", "generation", "eval_lm")
    parsers = [getattr(options, f"get_{kind}_parser")() for kind in kinds]
    registries = [TASK_REGISTRY, MODEL_REGISTRY, CRITERION_REGISTRY]
    for registry in (*registries, *(values["registry"] for values in REGISTRIES.values())):
        for entry in registry.values():
            if hasattr(entry, "add_args"):
                parsers.append(argparse.ArgumentParser(conflict_handler="resolve"))
                entry.add_args(parsers[-1])
    actions = [action for parser in parsers for action in parser._actions]
    texts = [
        action for action in actions if action.nargs != 0 and action.type not in (int, float)
    ]
    return {
        word[2:] for action in texts for word in action.option_strings if word.startswith("--")
    }


def test_every_flag_that_names_a_file_was_looked_at():
    """A fairseq with another such flag fails here: it is refused, or known to read."""
    found = {name for name in text_flags() if NAMES_A_FILE.search(name)}
    assert (
        len(found) > 60
        and found - {*READ.split(), *PLAIN.split(), *REFUSED, *SET_BY_RUNNER} == set()
    )
    wanted = {"post-save-script", "results-path", "save-predictions", "log-file", "aim-repo"}
    assert wanted <= found & {*REFUSED}


@pytest.mark.thorough(keep="-train]")
@pytest.mark.parametrize("section", ["data", "model", "train", "generate", "score"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, "/x", "Leave it out") for name in REFUSED),
        *(
            (name, "/x", "not a free flag")
            for name in ("user-dir", "save-dir", "path", "destdir")
        ),
        *(
            (f"distributed-{name}", "tcp://x:1", "not a free flag")
            for name in ("init-method", "world-size")
        ),
        ("lr", [0.1, "--user-dir", "trap"], "'--user-dir'"),
        ("lr", [1, ">"], "'>'"),
        ("tensorboard-logdir", "../x", "run folder"),
        ("encoder_layers", 2, "encoder-layers"),
        *(
            ("model-overrides", value, "dictionary")
            for value in ("x", "[1]", "{", "__import__('os')", 3)
        ),
    ],
)
def test_no_section_takes_what_runs_or_writes(small, write_config, section, name, value, words):
    """Whoever reads the recipe, also without asking a program about the flags."""
    small[section].setdefault("flags", {})[name] = value
    with pytest.raises(
        UserError, match=rf"small\.yaml: {section}\.flags\.{name}: .*{words}"
    ) as raised:
        load_recipe(write_config(small))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500
    del small[section]["flags"][name]
    with pytest.raises(UserError, match=rf"{section}\.flags\.{name}: "):
        load_recipe(write_config(small), [f"{section}.flags.{name}={json.dumps(value)}"])


@pytest.mark.parametrize(
    ("section", "name"),
    [*(("train", name) for name in PREVENTS_RESUMING), ("model", "no-save")],
)
def test_flags_with_which_no_training_goes_on(small, write_config, section, name):
    """Each is one of fairseq-train, and named with what to say in its place."""
    assert f"--{name}" in options.get_training_parser()._option_string_actions
    small[section]["flags"][name] = True
    with pytest.raises(
        UserError, match=rf"{section}\.flags\.{name}: .*([Ss]et |[Ll]eave it out)"
    ):
        load_recipe(write_config(small))


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        *((section, "no-such-flag", "no-such-flag") for section in SECTIONS),
        ("score", "masked", "has no such flag (did you mean masked-lm"),  # an abbreviation
        ("score", "masked-lm", "not a free flag"),
        ("train", "max-tok", "max-tok"),
        ("train", "warmup-update", "did you mean --warmup-updates"),
        ("train", "update-freq", "train.effective_batch_tokens"),
        ("train", "bf16", "train.precision"),
        ("model", "arch", "say model.arch"),
        ("generate", "beam", "say generate.beam"),
        ("generate", "gen-subset", "generate.subsets"),
        ("data", "source-lang", "not a free flag"),
    ],
)
def test_unknown_flags_and_those_by_other_names(small, write_config, section, name, words):
    small[section].setdefault("flags", {})[name] = 1
    with pytest.raises(UserError) as raised:
        check_flags(load_recipe(write_config(small)))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "printed"), [((4, 8), "K = 8 .* E = 4"), ((None, 9), "K = 9 .* E = 8")]
)
def test_more_experts_per_token_than_experts(
    small, write_config, tmp_path, sizes, printed, capsys
):
    """Also where the arch, and not the recipe, says E; before anything is prepared."""
    small["model"].update(
        arch="moa_transformer_tiny", num_experts=sizes[0], experts_per_token=sizes[1]
    )
    for side in ("encoder", "decoder"):
        del small["model"]["flags"][f"{side}-attention-heads"]
    small["train"]["criterion"] = "label_smoothed_cross_entropy_with_routing"
    line = f"recipe {write_config(small)} --gpus 0 --save-dir {tmp_path}/run".split()
    for more in ([], ["--dry-run"]):
        assert main([*line, *more]) == 2
        assert re.search(rf"model\.experts_per_token: {printed}", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", [[], ["--plan"], ["--dry-run"], ["--stage", "score"]])
def test_no_way_into_a_recipe_runs_a_planted_flag(
    small, write_config, toy_data, tmp_path, capsys, way
):
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    small["data"]["recipe"] = "binarised"
    small["generate"]["flags"] = {"user-dir": str(trap)}
    line = f"recipe {write_config(small)} --data {toy_data} --gpus 0".split()
    assert main([*line, "--save-dir", str(tmp_path / "run"), *way]) == 2
    assert "generate.flags.user-dir" in capsys.readouterr().err
    assert not (tmp_path / "marker").exists() and not (tmp_path / "run").exists()


def test_values_that_look_like_flags_stay_values(small, write_config):
    small["train"]["flags"].update(
        {"lr": [-1, "-2.5", "-1e-3", "0.5"], "adam-betas": "(0.9, 0.98)"}
    )
    line = process.flags(load_recipe(write_config(small)).train.flags)
    assert line[line.index("--lr") + 1 :][:4] == ["-1", "-2.5", "-0.001", "0.5"]
    with pytest.raises(UserError, match=r"--lr.*'--user-dir'"):
        process.flags({"lr": ["--user-dir", "x"]})


# --- traps of scale -----------------------------------------------------------------------------------

V100S = assumed_hardware("V100", 8)
A100S = assumed_hardware("A100", 8)
TWO_CPUS = Hardware(world=find_world(0, 2, 0, "head", {}))


@pytest.fixture
def recipe(small, write_config):
    path = write_config(small)
    return lambda *overrides: load_recipe(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "hardware", "message"),
    [
        (["train.flags.zero-sharding=os"], V100S, "fp16-no-flatten-grads"),
        (["train.flags.zero-sharding=os"], A100S, r"zero-sharding os.*pip install fairscale"),
        (["train.flags.ddp-backend=fully_sharded"], A100S, "train.precision=fp16"),
        (["train.flags.ddp-backend=pytorch_ddp"], TWO_CPUS, "on GPUs only"),
        (["train.flags.memory-efficient-fp16=true"], A100S, "this run has bf16"),
        (["train.flags.zero-sharding=os"], A100S, None),
        (
            ["train.flags.zero-sharding=os", "train.flags.memory-efficient-fp16=true"],
            V100S,
            None,
        ),
        (["train.flags.ddp-backend=fully_sharded", "train.precision=fp16"], A100S, None),
        (["train.flags.ddp-backend=legacy_ddp"], TWO_CPUS, None),
    ],
)
def test_sharding_and_precision(recipe, monkeypatch, overrides, hardware, message):
    there = None if "fairscale" in (message or "") else object()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: there)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_parallel_flags(recipe(*overrides), hardware)


def warning(recipe, data=None, hardware=V100S):
    size = training_set(recipe, data) if recipe.train.max_epoch else None
    updates = planned_updates(recipe.train, plan_batch(recipe.train, hardware.devices), size)
    return schedule_warning(check_flags(recipe), updates)


@pytest.mark.thorough(keep="moa_b")
@pytest.mark.parametrize("name", CONFIGS)
def test_fairseq_takes_every_recipe_and_its_schedule_ends_at_its_minimum(shipped, name):
    assert warning(shipped(name)) is None


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            "wikitext103_lm_base",
            ["train.flags.warmup-updates=240000"],
            ["(286,000)", "0.93", "cosine"],
        ),
        ("quickstart_mlm", ["train.max_update=900"], ["(900)", "train.flags.total-num-update"]),
        ("quickstart_mlm", ["train.max_update=900", "train.flags.total-num-update=900"], None),
        ("wikitext103_mlm_transformer", ["train.max_epoch=35"], ["(7,840)", "49% of"]),
        (
            "quickstart_mlm",
            [
                "train.max_update=300",
                "train.flags.total-num-update=300",
                "train.flags.warmup-updates=300",
            ],
            ["(300)", "train.flags.warmup-updates"],
        ),
        (
            "wmt14_ende_moa_base",
            ["train.max_update=3000"],
            ["(3,000)", "4,000", "warmup-updates"],
        ),
    ],
)
def test_a_schedule_that_does_not_anneal_is_told(shipped, name, overrides, words):
    said = warning(shipped(name, *overrides))
    assert said is None if words is None else all(word in said for word in words)
    assert said is None or "warmup" not in said or "total-num-update" not in said


def test_updates_of_epochs_are_measured_on_data(
    toy_data, recipe, capsys, tmp_path, monkeypatch
):
    flags = ["train.flags.lr-scheduler=polynomial_decay", "train.flags.total-num-update=100"]
    small = recipe("data.recipe=binarised", *flags)  # 3 epochs of a few updates each
    assert warning(small) is None  # nobody knows how many updates an epoch has
    assert "polynomial_decay" in warning(small, toy_data)
    tri_stage = ["lr-scheduler=tri_stage", "decay-steps=80", "warmup-steps=20"]
    ends = recipe(
        "train.max_epoch=null", "train.max_update=50", *(f"train.flags.{x}" for x in tri_stage)
    )
    longer = dataclasses.replace(ends, train=dataclasses.replace(ends.train, max_update=100))
    assert "tri_stage" in warning(ends) and warning(longer) is None
    monkeypatch.chdir(tmp_path)
    line = ["recipe", "quickstart_mlm", "--dry-run", "--gpus", "0"]
    assert main([*line, "--set", "train.max_update=900"]) == 0
    assert "WARNING: the learning rate of the last update (900)" in capsys.readouterr().out


@pytest.mark.parametrize("updates, told", [(90, True), (91, False), (100, False)])
def test_the_rate_of_the_last_update_counts(recipe, updates, told):
    """A straight line that reaches zero behind update 100: 11 % are left of the 90th, 10 % of the 91st."""
    schedule = ["lr-scheduler=polynomial_decay", "total-num-update=100", "lr=1.0"]
    values = [
        "train.max_epoch=null",
        f"train.max_update={updates}",
        *(f"train.flags.{x}" for x in schedule),
    ]
    assert bool(warning(recipe(*values))) == told


def test_machines_without_a_gpu_have_a_process_each_and_numbers_follow_on():
    assert [find_world(0, 3, rank, "head", {}).rank for rank in range(3)] == [0, 1, 2]
    assert find_world(0, 3, 1, "head", {}).size == 3
    assert [find_world(4, 3, rank, "head", {}).rank for rank in range(3)] == [0, 4, 8]
