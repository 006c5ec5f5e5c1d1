"""`moa-fairseq recipe NAME --row ROW`: other rows of a file, each in a folder of its own."""

import ast
import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes import command, loading

ONE_EXPERT = "wmt14_ende_one_expert"
RANDOM = "UNI-MAE-7, one random expert"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """started(*words) → (recipe, options) of each run that `moa-fairseq recipe` starts."""
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr(
        command,
        "run_recipe",
        lambda recipe, hardware, options, dry_run=False: found.append((recipe, options)),
    )

    def start(*words):
        found.clear()
        assert main(["recipe", *words, "--gpus", "0"]) == 0
        return list(found)

    return start


@pytest.mark.thorough
def test_all_rows_are_run_one_after_the_other(started):
    """MoA's Table 7: 15 cells, of which the file's own row is one."""
    runs = started("wmt14_ende_moa_base", "--row", "all")
    assert runs[0][0].row is None and len(runs) == 15
    losses = set()
    for recipe, options in runs:
        flags = recipe.train.flags
        losses.add((recipe.model.num_experts, flags["load-balance-coef"], flags["z-loss-coef"]))
        assert (
            options.published_recipe.reproduces == recipe.reproduces
            and options.published_recipe.train == recipe.train
        )
        assert recipe.reproduces.table == ("7" if recipe.row else "1")
    each = {(0.01, 0.0), (0.0, 0.01), (0.0, 0.001), (0.01, 0.001), (0.01, 0.01)}
    assert losses == {(experts, *both) for experts in (8, 16, 32) for both in each}
    folders = [str(options.save_dir) for _, options in runs]
    assert folders[:2] == [
        "runs/wmt14_ende_moa_base",
        "runs/wmt14_ende_moa_base_8k8e128d_0_01la",
    ]
    assert len(set(folders)) == 15


def test_rows_that_differ_from_the_recipe_are_not_built(monkeypatch):
    """Each would take as long as the recipe itself."""
    builds = []
    build = loading._from_layers
    monkeypatch.setattr(
        loading, "_from_layers", lambda *args: builds.append(args) or build(*args)
    )
    path = loading.shipped_recipes()["wmt14_ende_moa_base"]
    assert len(loading.load_recipe(path).rows) == 14
    assert len(builds) == 1
    assert loading.load_recipe(path, ["model.num_experts=16"]).reproduces.row
    assert len(builds) == 3


def test_one_row_with_its_folder_and_record(started):
    ((recipe, options),) = started(
        ONE_EXPERT, "--row", "NOBCD", "--save-dir", "runs/x", "--record"
    )
    assert (recipe.row, recipe.pretrained) == ("NOBCD", "runs/wmt14_ende_nobcd")
    assert str(options.save_dir) == "runs/x_nobcd"
    assert options.record.name == "wmt14_ende_one_expert_nobcd.json"
    # A line that needs no --row
    assert "generate.flags.model-overrides=null" in options.prepare_command


def test_a_row_that_the_file_does_not_have_is_refused(started, capsys):
    assert main(f"recipe {ONE_EXPERT} --row NOBDC --dry-run".split()) == 2
    assert "did you mean NOBCD" in capsys.readouterr().err


def test_each_seed_draws_another_expert_and_stands_for_the_row(started):
    runs = started(ONE_EXPERT, "--row", RANDOM, "--seeds", "3,4")
    for seed, (recipe, options) in zip((3, 4), runs, strict=True):
        flags = recipe.generate.flags["model-overrides"]
        assert ast.literal_eval(flags) == {
            "mae_evaluate_with": "random-expert",
            "mae_evaluate_seed": seed,
        }
        assert (
            options.published_recipe.generate == recipe.generate
            and recipe.reproduces.row == RANDOM
        )
    ((recipe, _),) = started(ONE_EXPERT)
    assert recipe.generate.flags["model-overrides"] == "{'mae_evaluate_with': 'top-expert'}"


@pytest.mark.thorough(keep="True")
@pytest.mark.parametrize(("row", "told"), [(RANDOM, True), ("all", False)])
def test_seeds_of_several_rows_have_no_mean(started, monkeypatch, tmp_path, capsys, row, told):
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"headline": "multi_bleu", "metrics": {"multi_bleu": 2.0}}))
    monkeypatch.setattr(command, "run_recipe", lambda *args, **options: result)
    assert main(["recipe", ONE_EXPERT, "--row", row, "--seeds", "3,4", "--gpus", "0"]) == 0
    assert ("standard deviation" in capsys.readouterr().out) == told


@pytest.mark.parametrize("row", [(), ("--row", "NOBCD")])
def test_another_pretrained_model_stands_for_no_row(started, row):
    ((recipe, options),) = started(ONE_EXPERT, *row, "--set", "pretrained=runs/mine")
    assert recipe.pretrained == "runs/mine" and options.published_recipe is None


def test_where_rows_do_not_differ_in_it_any_pretrained_model_will_do(started):
    words = ("--set", "pretrained=runs/mine")
    ((recipe, options),) = started("iwslt14_ende_mae7_transfer", "--row", "FTG", *words)
    assert (
        options.published_recipe.pretrained == recipe.pretrained == "runs/mine"
        and recipe.row == "FTG"
    )


CELL = {"paper": "p", "table": "1", "row": "own", "column": "BLEU", "value": 1.0}


@pytest.mark.parametrize("key", ["train.max_epochs", "train.log_interval"])
def test_the_keys_of_a_row_are_checked_even_if_the_recipe_is_another_row(
    small, write_config, key
):
    """One of the keys is unknown, the other is a number."""
    rows = {"other": {"train.max_epoch": 7, key: "many"}}
    with pytest.raises(UserError, match=key):
        loading.load_recipe(write_config({**small, "reproduces": CELL, "rows": rows}))


@pytest.mark.parametrize("key", ["train..seed", ".seed", "train."])
def test_an_impossible_key_of_a_row_is_the_files(small, write_config, key):
    config = write_config({**small, "reproduces": CELL, "rows": {"other": {key: 3}}})
    with pytest.raises(UserError) as error:
        loading.load_recipe(config)
    assert str(config) in str(error.value) and "--set" not in str(error.value)


def test_all_rows_are_read_before_the_first_run(small, write_config, monkeypatch, capsys):
    """Not when it has ended: a file that is valid with --set alone has no rows to go on with."""
    small["train"]["no_such_key"] = 1
    config = write_config(small)
    monkeypatch.setattr(command, "_run_once", lambda *_: pytest.fail("a run began"))
    assert main(["recipe", str(config), "--row", "all", "--gpus", "0"]) == 2
    assert "no_such_key" in capsys.readouterr().err


def test_rows_may_contradict_each_other(small, write_config):
    rows = {"untranslated": {"generate": None, "score": None}, "wide": {"generate.beam": 7}}
    path = write_config({**small, "reproduces": CELL, "rows": rows})
    assert loading.load_recipe(path, ["generate.beam=7"]).row == "wide"


def test_a_mapping_in_a_row_is_merged_with_the_recipes(small, write_config):
    rows = {"same": {"reproduces.value": 2.0, "train.flags": {"lr": 0.01}}}
    path = write_config({**small, "reproduces": CELL, "rows": rows})
    assert loading.load_recipe(path).reproduces.value == 2.0
