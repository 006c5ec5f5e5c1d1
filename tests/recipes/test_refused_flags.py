"""A stranger's recipe is data: no flag of fairseq that runs or writes something else can be said in it."""

import argparse
import re

import pytest
import yaml
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

import moa_fairseq
from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.rules import REFUSED

SECTIONS = ("data", "model", "train", "generate", "score")
NAMES_A_FILE = re.compile(
    "path|dir|file|script|save|log|repo|dict|yaml|config|pref|suffix|from|checkpoint|model|root|vocab|json|codes|"
    "lexicon|args|detok|tokenizer|bpe|hash|stats|plasma|wandb"
)
# Flags of such a name that read files, or are no names of files; each was looked up in fairseq's source.
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
    lambda-denoising-config lambda-otf-bt-config lambda-parallel-config log-format log-keys
    model-overrides multires-hubert-args next-unit-prediction pipeline-checkpoint
    precompute-mask-config remove-bpe router-log tokenizer w2v-args wer-args wandb-project
    keep-inference-langtok
"""


def text_flags():
    """The flags of fairseq's commands, tasks, models and criterions that take text."""
    parsers = [
        options.get_preprocessing_parser(),
        options.get_training_parser(),
        options.get_generation_parser(),
        options.get_eval_lm_parser(),
    ]
    registries = [TASK_REGISTRY, MODEL_REGISTRY, CRITERION_REGISTRY]
    for registry in (*registries, *(values["registry"] for values in REGISTRIES.values())):
        for entry in registry.values():
            if hasattr(entry, "add_args"):
                parsers.append(argparse.ArgumentParser(conflict_handler="resolve"))
                entry.add_args(parsers[-1])
    actions = [action for parser in parsers for action in parser._actions]
    texts = [action for action in actions if action.nargs != 0 and action.type not in (int, float)]
    return {word[2:] for action in texts for word in action.option_strings if word.startswith("--")}


def test_every_flag_that_names_a_file_was_looked_at():
    """A fairseq with another such flag fails here: it is refused, or known to read."""
    found = {name for name in text_flags() if NAMES_A_FILE.search(name)}
    known = {*READ.split(), *PLAIN.split(), *REFUSED, "tensorboard-logdir", "destdir", "user-dir"}
    assert len(found) > 60 and found - known == set()
    assert {"post-save-script", "results-path", "save-predictions", "log-file", "aim-repo"} <= found & {
        *REFUSED
    }


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", [*REFUSED, "user-dir"])
def test_what_runs_or_writes_is_refused_in_every_section(small, write_config, section, name):
    small[section].setdefault("flags", {})[name] = "/x"
    path = write_config(small)
    with pytest.raises(UserError, match=rf"small\.yaml: {section}\.flags\.{name}: .*\.$"):
        load_recipe(path)
    del small[section]["flags"][name]
    with pytest.raises(UserError, match=rf"{section}\.flags\.{name}"):
        load_recipe(write_config(small), [f"{section}.flags.{name}=/x"])


@pytest.mark.parametrize("section", ["model", "train", "generate", "score"])
@pytest.mark.parametrize("name", ["init-method", "world-size", "rank", "no-spawn", "port"])
def test_no_section_brings_other_processes(small, write_config, section, name):
    """What fairseq's processes send each other is unpickled."""
    small[section].setdefault("flags", {})[f"distributed-{name}"] = "tcp://example.org:29500"
    with pytest.raises(UserError, match=rf"{section}\.flags\.distributed-{name}: .*--master"):
        load_recipe(write_config(small))


@pytest.mark.parametrize("folder", ["/tmp/x", "../x", "a/../../x", True])
def test_tensorboard_writes_into_the_run_folder(small, write_config, tmp_path, folder):
    from moa_fairseq.recipes.hardware import Hardware
    from moa_fairseq.recipes.runner import Options, planned_commands

    small["train"]["flags"]["tensorboard-logdir"] = folder
    with pytest.raises(UserError, match=r"train\.flags\.tensorboard-logdir: .*inside of the run folder"):
        load_recipe(write_config(small))
    recipe = load_recipe(write_config(small), ["train.flags.tensorboard-logdir=board"])
    options = Options(stage="train", save_dir=tmp_path / "run")
    (line,) = planned_commands(recipe, Hardware(), options)
    assert line[line.index("--tensorboard-logdir") + 1] == str(tmp_path / "run" / "board")


@pytest.mark.parametrize(
    "task", ["audio_finetuning", "nlu_finetuning", "hubert_pretraining", "--user-dir=x", ""]
)
def test_other_tasks_are_refused(small, write_config, task):
    small["train"]["task"] = task
    with pytest.raises(UserError, match=r"small\.yaml: train\.task: .*language_modeling"):
        load_recipe(write_config(small))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "source", "../../x"),
        ("data", "target", "/etc/x"),
        ("data", "source", "-x"),
        ("generate", "subsets", ["test", "../../x"]),
        ("generate", "subsets", ["a/b"]),
        ("score", "subsets", ["../x"]),
    ],
)
def test_names_that_files_bear_are_names(small, write_config, section, key, value):
    small[section][key] = value
    with pytest.raises(UserError, match=rf"small\.yaml: {section}\.{key}: .* is not a name"):
        load_recipe(write_config(small))


@pytest.mark.parametrize("value", ["x", "[1]", "{", "__import__('os')", 3])
def test_overrides_of_a_model_are_a_dictionary(small, write_config, value):
    small["generate"]["flags"] = {"model-overrides": value}
    with pytest.raises(UserError, match=r"generate\.flags\.model-overrides: .*dictionary"):
        load_recipe(write_config(small))


PLANTED = [
    ("generate", "user-dir", "trap"),
    ("generate", "results-path", "elsewhere"),
    ("train", "post-save-script", "touch marker"),
    ("train", "lr", [0.1, "--user-dir", "trap"]),
]


@pytest.mark.parametrize(("section", "name", "value"), PLANTED)
def test_no_reader_of_a_recipe_or_a_run_folder_takes_it(
    small, write_config, toy_data, tmp_path, monkeypatch, capsys, section, name, value
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    small["data"] = {"recipe": "binarised", "source": "en", "target": "de"}
    small[section].setdefault("flags", {})[name] = value
    recipe = str(write_config(small))
    data = ["--data", str(toy_data), "--gpus", "0", "--save-dir", "run"]
    for way in ([], ["--plan"], ["--dry-run"], ["--hydra"], ["--stage", "score"]):
        assert main(["recipe", recipe, *data, *way]) == 2, way
        assert f"{section}.flags.{name}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    # the same in a run folder of somebody else, which names the data and holds a checkpoint
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(small))
    (tmp_path / "run" / "state.json").write_text(
        f'{{"prepare": {{"folder": "{toy_data}", "sentences": {{"valid": 20}}, "fingerprint": "f"}}}}'
    )
    (tmp_path / "run" / "average.pt").write_bytes(b"no checkpoint")
    analyses = [["expert-load", "run", "--output", "x.png"], ["learning-curve", "run", "--output", "x.png"]]
    for verb in (*(["analyze", *words] for words in analyses), ["compare", "run"]):
        assert main(verb) == 2
    assert not (tmp_path / "marker").exists() and not (tmp_path / "elsewhere").exists()


def test_a_recipe_of_a_run_folder_is_one(small, write_config, tmp_path):
    """What a run writes down is accepted again, also of the shipped recipes."""
    import dataclasses
    from pathlib import Path

    from moa_fairseq.recipes.finetune import resolve

    configs = Path(moa_fairseq.__file__).parents[1] / "configs"
    for path in sorted(configs.glob("*.yaml")):
        recipe = resolve(load_recipe(path))
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False))
        assert load_recipe(tmp_path / "recipe.yaml", of_a_run=True) == recipe
