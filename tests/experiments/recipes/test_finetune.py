"""A pretrained mixture of attentive experts is fine-tuned on other text; each method moves what it should."""

import copy
import json
import shutil

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.checkpoints import (
    check_pretrained,
    finetuned,
    prepared_data,
)
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe

pytestmark = pytest.mark.usefixtures("forked_commands")

TRANSFER = "iwslt14_ende_mae7_transfer"


@pytest.fixture
def mixture(small):
    """A recipe of two heads of width 8, one dropped; small enough to be trained in a second."""
    small["model"].update(arch="mae_transformer_tiny")
    small["model"]["flags"].update({"gate-hidden-dim": 8})
    small["train"].update(task="translation_bcd", max_epoch=2)
    small["train"]["flags"].update({"bcd-g-every": 1, "adam-betas": "(0.9, 0.98)"})
    del small["average"]
    return small


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """A dictionary for `pretrained`: one training serves all tests."""
    return {"folder": tmp_path_factory.mktemp("pretrained")}


@pytest.fixture
def pretrained(trained_once, mixture, write_config, write_text):
    folder = trained_once["folder"]
    run_folder = folder / "run"
    if not run_folder.exists():
        config = write_config({**copy.deepcopy(mixture), "generate": None, "score": None})
        options = Options(
            data=write_text(folder / "text", "klm", 60, 8),
            save_dir=run_folder,
            data_root=folder / "data",
        )
        run_recipe(load_recipe(config), Hardware(), options)
    return run_folder


@pytest.fixture
def tuning_of(mixture, write_config):
    """tuning_of(run or checkpoint) → the recipe that trains its gates further."""
    return lambda place: load_recipe(
        write_config({**mixture, "pretrained": str(place), "finetune": "ftg"})
    )


@pytest.fixture
def transfer(mixture, pretrained, write_config, write_text, tmp_path):
    """transfer(method, **options) → the run folder of a fine-tuning on other text."""
    new = write_text(tmp_path / "new", "kln", 40, 8)
    del mixture["data"]["bpe"]
    mixture["data"]["train_fraction"] = 0.25
    config = write_config({**mixture, "pretrained": str(pretrained), "finetune": "ftall"})

    def run(method, **options):
        recipe = finetuned(load_recipe(config, [f"finetune={method}"]))
        folder = tmp_path / method
        places = {"data": new, "save_dir": folder, "data_root": tmp_path / "data"}
        run_recipe(recipe, Hardware(), Options(**places, **options))
        return folder

    return run


def weights(checkpoint):
    return torch.load(checkpoint, weights_only=False)["model"]


def moved(pretrained, folder):
    before, after = (
        weights(run / "checkpoints" / name)
        for run, name in ((pretrained, "checkpoint_best.pt"), (folder, "checkpoint_last.pt"))
    )
    return {name for name in before if not torch.equal(before[name], after[name])}


def is_gate(name):
    return ".gate." in name


@pytest.mark.thorough
def test_each_method_moves_what_it_says(pretrained, transfer, tmp_path):
    assert all(map(is_gate, moved(pretrained, transfer("ftg", stage="train"))))
    # prepared once, by the first of them
    (prepared,) = (tmp_path / "data").glob("*-*/sample")
    (original,) = (pretrained.parent / "data").glob("*-*")
    assert len((prepared / "train.en").read_text().splitlines()) == 10
    assert (prepared.parent / "bpe" / "codes").read_bytes() == (
        original / "bpe" / "codes"
    ).read_bytes()
    for name in ("dict.en.txt", "dict.de.txt"):
        there, here = (root / "binarised" / name for root in (original, prepared.parent))
        assert there.read_bytes() == here.read_bytes()

    folder = transfer("ftg_plus")
    names = moved(pretrained, folder)
    assert any(map(is_gate, names))
    rest = {name for name in names if not is_gate(name)}
    assert len(rest) == 3 and all(name.endswith("attn.out_proj.weight") for name in rest)
    model = weights(folder / "checkpoints" / "checkpoint_last.pt")
    expected = sum(model[name].numel() for name in rest)
    gates = [name for name in model if is_gate(name) and name.endswith(("weight", "bias"))]
    expected += sum(model[name].numel() for name in gates)
    assert json.loads((folder / "result.json").read_text())["updated_parameters"] == expected


@pytest.mark.thorough
def test_no_fine_tuning_evaluates_the_pretrained_model(pretrained, transfer):
    folder = transfer("noft")
    result = json.loads((folder / "result.json").read_text())
    assert result["updated_parameters"] == 0 and result["metrics"]["multi_bleu"] >= 0
    assert not (folder / "checkpoints").exists()
    assert (
        f"--path {pretrained}/checkpoints/checkpoint_best.pt"
        in (folder / "commands.sh").read_text()
    )


@pytest.mark.thorough
def test_other_dictionaries_and_a_missing_model_are_refused(tuning_of, pretrained, binarised):
    missing = binarised / "nowhere"
    for place, words in (
        (pretrained, r"dict\.en\.txt differs from the pretrained"),
        (missing, rf"pretrained: {missing}/average\.pt is missing"),
    ):
        recipe = tuning_of(place)
        with pytest.raises(UserError, match=words):
            check_pretrained(recipe, binarised)


@pytest.mark.parametrize("language", ["en", "de"])
def test_a_dictionary_of_either_side_that_differs_is_refused(
    tuning_of, pretrained, tmp_path, language
):
    recipe = tuning_of(pretrained)
    data = shutil.copytree(prepared_data(pretrained), tmp_path / "data")
    check_pretrained(recipe, data)
    dictionary = data / f"dict.{language}.txt"
    dictionary.write_text(dictionary.read_text() + "more 1\n")
    with pytest.raises(
        UserError, match=rf"data/dict\.{language}\.txt differs from the pretrained"
    ):
        check_pretrained(recipe, data)


def test_data_that_changed_since_the_pretraining_is_refused(tuning_of, pretrained, tmp_path):
    recipe = tuning_of(pretrained)
    dictionary = prepared_data(pretrained) / "dict.en.txt"
    original = dictionary.read_text()
    dictionary.write_text(original + "more 1\n")
    data = shutil.copytree(dictionary.parent, tmp_path / "data")
    try:
        with pytest.raises(UserError, match=rf"{dictionary} was changed"):
            check_pretrained(recipe, data)
    finally:
        dictionary.write_text(original)


def test_a_recipes_own_dictionary_comes_before_the_pretrained_models(
    mixture, tuning_of, pretrained
):
    mixture["data"]["flags"] = {"srcdict": "own.txt"}
    recipe = tuning_of(pretrained)
    assert finetuned(recipe).data.flags["srcdict"] == "own.txt"


def test_what_cannot_be_checked_is_said(tuning_of, pretrained, binarised, said):
    checkpoint = pretrained / "checkpoints" / "checkpoint_best.pt"
    recipe = tuning_of(checkpoint)
    check_pretrained(finetuned(recipe), binarised)
    assert len(said) == 1 and str(checkpoint) in said[0] and str(binarised) in said[0]


@pytest.mark.parametrize(
    ("method", "row", "value"),
    [
        ("noft", "NOFT", 29.3),
        ("ftg", "FTG", 30.1),
        ("ftg_plus", "FTG+", 31.6),
        ("ftall", "FTALL", 31.8),
    ],
)
def test_the_rows_of_the_paper(shipped, method, row, value):
    cell = shipped(TRANSFER, f"finetune={method}").reproduces
    assert (cell.row, cell.value) == (row, value)


def test_gates_alone_are_updated_by_plain_sgd(shown, shipped):
    recipe = finetuned(shipped(TRANSFER, "finetune=ftg", "train.flags.warmup-updates=100"))
    train = next(c for c in shown(recipe, Hardware(), Options()) if c[0] == "fairseq-train")
    line = " ".join(train)
    assert "--optimizer sgd --lr 1.0 --lr-scheduler fixed" in line and "--finetune ftg" in line
    assert "adam" not in line and "warmup" not in line
