"""Recipe files: what is accepted, what is refused, and that the message names file and key."""

import contextlib
import dataclasses
import functools
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.recipes.loading import (
    find_recipe,
    load_recipe,
    row_overrides,
    shipped_recipes,
)
from moa_fairseq.experiments.recipes.schema import Data, Generate, Model, Recipe, Train
from moa_fairseq.files import shipped


def test_a_valid_recipe_keeps_its_values(small, write_config):
    small["model"]["arch"] = "moa_transformer_tiny"  # an arch says its sizes itself
    recipe = load_recipe(write_config(small))
    assert (recipe.data.bpe, recipe.data.joined_dictionary, recipe.train.flags["lr"]) == (
        50,
        True,
        0.01,
    )
    assert recipe.reproduces is None and recipe.model.num_experts is None


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        (
            "train",
            "max_epochs",
            3,
            ["train.max_epochs", "max_epoch"],
        ),  # unknown key, near name suggested
        ("train", "max_tokens", "many", ["train.max_tokens", "whole number"]),
        (
            "train",
            "max_tokens",
            True,
            ["train.max_tokens", "whole number"],
        ),  # bool is an int in Python
        ("train", "max_tokens", 0, ["train.max_tokens", "at least 1"]),
        ("train", "precision", "fp8", ["train.precision", "bf16"]),
        ("train", "criterion", None, ["train.criterion", "text"]),
        (
            "model",
            "flags",
            {"encoder_layers": 2},
            ["model.flags.encoder_layers", "encoder-layers"],
        ),
        ("train", "flags", {"lr": {"a": 1}}, ["train.flags.lr"]),
        ("data", "recipe", "wmt99", ["data.recipe", "multi30k"]),
        (
            "data",
            "joined_dictionary",
            False,
            ["model.share_all_embeddings", "joined_dictionary"],
        ),
        ("data", "target", "en", ["data.target", "'en'"]),
        ("data", "source", False, ["data.source", "text"]),  # `source: no` in YAML
        ("average", "epochs", 1, ["average.epochs", "one checkpoint"]),
        ("average", "epochs", 5, ["average.epochs", "keep_last_epochs"]),
        ("average", "updates", 2, ["average.epochs", "average.updates"]),
        ("generate", "subsets", [], ["generate.subsets", "empty"]),
        ("generate", "subsets", "test", ["generate.subsets", "list"]),
        ("score", "headline", "meteor", ["score.headline", "multi_bleu"]),
        ("train", "max_epoch", None, ["train.max_epoch", "max_update"]),
        ("train", "task", "audio_finetuning", ["train.task", "is not a task"]),
        ("train", "task", "--user-dir=x", ["train.task", "is not a task"]),
        *(
            ("data", "source", name, ["data.source", "is not a valid name"])
            for name in ("../../x", "-x")
        ),
        (
            "generate",
            "subsets",
            ["test", "../../x"],
            ["generate.subsets", "is not a valid name"],
        ),
        ("score", "subsets", ["../x"], ["score.subsets", "is not a valid name"]),
    ],
)
def test_bad_values_are_refused_by_name(small, write_config, section, key, value, words):
    small[section][key] = value
    path = write_config(small)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"finetune": "ftg"}, "pretrained: is missing"),
        ({"pretrained": "x.pt"}, "finetune: is missing"),
        (
            {"pretrained": "x.pt", "finetune": "half"},
            "finetune: 'half' is not one of noft, ftg, ftg_plus",
        ),
        ({"pretrained": "x.pt", "finetune": "ftg"}, "needs train.task translation_bcd"),
    ],
)
def test_fine_tuning_needs_a_model_and_a_method(small, write_config, said, message):
    with pytest.raises(UserError, match=message):
        load_recipe(write_config({**small, **said}))


def test_averaging_updates_needs_update_checkpoints(small, write_config):
    small["average"] = {"updates": 2}
    with pytest.raises(UserError, match="save-interval-updates"):
        load_recipe(write_config(small))
    small["train"]["flags"]["save-interval-updates"] = 5
    path = write_config(small)
    for kept in ("null", "2", "-1"):  # fairseq's -1: all
        assert (
            load_recipe(path, [f"train.flags.keep-interval-updates={kept}"]).average.count == 2
        )
    with pytest.raises(UserError, match="keep-interval-updates"):
        load_recipe(path, ["train.flags.keep-interval-updates=1"])


def test_a_file_need_not_repeat_its_name(small, write_config):
    """Nor that of its base is taken."""
    del small["experiment"]
    assert load_recipe(write_config(small, "plain")).experiment == "plain"
    assert load_recipe(write_config({"base": "plain.yaml"}, "child")).experiment == "child"
    with pytest.raises(UserError, match=r"experiment: .*names folders"):
        load_recipe(write_config(small, "Not-a-name"))


def test_the_experiment_is_the_file_name(small, write_config):
    with pytest.raises(UserError, match="other"):
        load_recipe(write_config(small, name="other"))


VALUES = [
    ("average", None),
    ("average", {"epochs": 3}),
    ("average.epochs", None),
    ("average.updates", 2),
    ("generate.subsets", ["test", "test1"]),
    ("generate.subsets", ["test2"]),
    ("train.flags.lr", 0.5),
    ("train.flags", {"lr": 0.2, "clip-norm": None}),
]


def placed(mapping, key, value):
    """The mapping with a value at a dotted key: a mapping is merged, all else replaces what is there."""
    section, _, rest = key.partition(".")
    old = mapping.get(section) or {}
    if rest:
        value = placed(old, rest, value)
    elif isinstance(value, dict):
        value = {**old, **value}
    return {**mapping, section: value}


@settings(max_examples=settings.default.max_examples // 12)
@given(st.lists(st.sampled_from(VALUES), max_size=4), st.integers(0, 4))
@example([("average", None), ("average.updates", 2)], 1)
def test_values_of_bases_and_of_set_lie_over_each_other_in_their_order(
    small, write_config, values, split
):
    """However bases are nested."""
    small["train"]["flags"]["save-interval-updates"] = 5
    own = write_config(small)
    for number, value in enumerate(values):
        write_config(placed({}, *value), f"part{number}")
    parts = [f"part{number}.yaml" for number in range(len(values))]
    write_config({"base": parts[:split]}, "first")
    write_config({"base": parts[split:]}, "second")
    texts = [f"{key}={json.dumps(value)}" for key, value in values]

    def outcome(path, overrides=()):
        with contextlib.suppress(UserError):  # both kinds of checkpoints to average
            return dataclasses.replace(load_recipe(path, overrides), experiment="", summary="")

    whole = functools.reduce(lambda mapping, value: placed(mapping, *value), values, small)
    expected = outcome(write_config({**whole, "experiment": "whole"}))
    assert outcome(own, texts) == expected
    child = {"base": ["small.yaml", "first.yaml", "second.yaml"]}
    assert outcome(write_config(child, "child")) == expected


def test_a_base_that_is_not_there_is_named(write_config):
    with pytest.raises(UserError, match=r"base: \S+/parts/lost\.yaml is not a file"):
        load_recipe(write_config({"base": ["parts/lost.yaml"]}, "child"))


def test_a_base_may_have_a_base_and_lie_anywhere(small, write_config, tmp_path):
    write_config(small)
    child = write_config({"base": "small.yaml", "experiment": "child", "train": {"seed": 7}})
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "mine.yaml"
    own.write_text("base: ../configs/child.yaml\nexperiment: mine\ntrain: {max_update: 9}\n")
    recipe = load_recipe(own)
    assert (recipe.train.seed, recipe.train.max_update) == (7, 9)
    assert recipe.data == load_recipe(child).data
    own.write_text("base: quickstart_moa.yaml\nexperiment: mine\n")
    assert load_recipe(own).model.arch == "moa_transformer_base"
    (tmp_path / "own" / "quickstart_moa.yaml").write_text(
        child.with_name("small.yaml").read_text()
    )
    assert load_recipe(own).model == load_recipe(child).model, "what lies beside it comes first"
    own.write_text("base: mine.yaml\nexperiment: mine\n")
    with pytest.raises(UserError, match="base"):
        load_recipe(own)


def test_a_file_comes_before_the_shipped_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path("quickstart_moa.yaml")
    assert find_recipe(name) == shipped_recipes()["quickstart_moa"]
    name.touch()
    assert find_recipe(name) == name


@pytest.mark.parametrize(
    "place",
    [
        "",
        "configs",
        "configs/quickstart",
        shipped("configs"),
        shipped("configs") / "studies" / "..",
    ],
)
@pytest.mark.parametrize("name", ["quickstart_moa", "quickstart_moa.yaml"])
def test_a_shipped_recipe_has_its_name_wherever_it_lies(tmp_path, monkeypatch, place, name):
    monkeypatch.chdir(tmp_path)
    found = find_recipe(Path(place, name))
    assert found.samefile(shipped_recipes()["quickstart_moa"])
    assert load_recipe(found).experiment == "quickstart_moa"


@pytest.mark.parametrize("place", ["elsewhere", "configs/multi30k", "../configs", "parts"])
def test_another_path_is_not_taken_for_a_shipped_recipe(place):
    path = Path(place, "quickstart_moa.yaml")
    assert find_recipe(path) == path


def test_what_is_built_on_another_file_has_a_summary_of_its_own(small, write_config):
    write_config(small)
    child = write_config({"base": "small.yaml", "experiment": "a_wider_one"})
    assert load_recipe(child).summary == "a wider one"
    assert (
        load_recipe(
            write_config({"base": "small.yaml", "experiment": "b", "summary": "mine"})
        ).summary
        == "mine"
    )
    assert "(binarised)" in load_recipe(child, ["data.recipe=binarised"]).summary


def test_the_reference_is_a_recipe_that_says_every_key():
    reference = Path(__file__).parents[3] / "docs" / "recipe.yaml"
    check_flags(load_recipe(reference))
    said = yaml.safe_load(reference.read_text(encoding="utf-8"))
    assert {*said, "reproduces"} == set(Recipe.__dataclass_fields__)
    for section, cls in (
        ("data", Data),
        ("model", Model),
        ("train", Train),
        ("generate", Generate),
    ):
        assert set(said[section]) == set(cls.__dataclass_fields__), section


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("train.max_epch=7", "max_epoch"),
        ("trian.max_epoch=7", "train"),
        ("train.max_epoch", "section.key=value"),
        ("train.max_epoch.x=1", "must be a whole number"),
        ("train.max_epoch=[", "YAML"),
        ("experiment=other", "experiment"),
        ("train.max_epoch=many", "whole number"),
    ],
)
def test_bad_overrides_are_refused(small, write_config, override, word):
    with pytest.raises(UserError) as error:
        load_recipe(write_config(small), [override])
    assert word in str(error.value)
    assert "--set" in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"), [("a: [", "YAML"), ("- a", "mapping"), ("a: 1\na: 2", "duplicate key a")]
)
def test_broken_yaml(tmp_path, text, word):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        load_recipe(path)


def test_a_base_named_twice_at_every_step_is_not_read_for_ever(small, write_config):
    path = write_config(small)
    for n in range(16):
        name = {"experiment": f"step{n}", "base": [path.name, path.name]}
        path = write_config(name)
    with pytest.raises(UserError, match=r"base: .*files"):
        load_recipe(path)
    assert load_recipe(path.with_name("step3.yaml")).experiment == "step3"


@pytest.mark.parametrize("place", ["pipe.yaml", "/dev/zero", "/proc/self/maps", "."])
def test_what_is_no_file_is_refused(tmp_path, place):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match="ordinary file"):
        load_recipe(tmp_path / place)


def test_an_absent_file_suggests_its_neighbours(small, write_config):
    path = write_config(small)
    with pytest.raises(UserError, match="small"):
        load_recipe(path.with_name("smal.yaml"))


@pytest.mark.parametrize(("text", "value"), [("1e-1", 0.1), ("2", 2.0), ("'0.5'", 0.5)])
def test_numbers_that_yaml_takes_for_text(small, write_config, text, value):
    assert (
        load_recipe(write_config(small), [f"generate.lenpen={text}"]).generate.lenpen == value
    )


@pytest.mark.parametrize(
    "text, value", [("1e-3", 1e-3), ("-1e-3", -1e-3), ("+2.5E1", 25.0), ("1e", "1e")]
)
def test_numbers_of_a_file_are_those_of_yaml_1_2(small, write_config, text, value):
    write_config(small)
    path = write_config({"base": "small.yaml", "experiment": "child"})
    path.write_text(f"{path.read_text()}train: {{flags: {{lr: {text}}}}}\n")
    assert load_recipe(path).train.flags["lr"] == value


@pytest.mark.parametrize(
    "fraction, allowed", [(1, True), (1.0, True), (0.001, True), (0, False), (1.001, False)]
)
def test_the_whole_training_text_is_a_fraction_of_it(small, write_config, fraction, allowed):
    small["data"]["train_fraction"] = fraction
    path = write_config(small)
    with (
        contextlib.nullcontext()
        if allowed
        else pytest.raises(UserError, match="train_fraction")
    ):
        load_recipe(path)


@pytest.mark.parametrize("kept, allowed", [(2, True), (1, False)])
def test_as_many_epochs_as_are_kept_can_be_averaged(small, write_config, kept, allowed):
    small["train"]["keep_last_epochs"] = kept
    path = write_config(small)
    with (
        contextlib.nullcontext()
        if allowed
        else pytest.raises(UserError, match="keep_last_epochs")
    ):
        load_recipe(path)


def test_a_training_may_stop_at_the_learning_rate_zero(small, write_config):
    """fairseq's own value is -1: never."""
    path = write_config(small)
    goals = [
        load_recipe(path, [f"train.flags.stop-min-lr={rate}"]).goal for rate in ("null", "0")
    ]
    assert "stop-min-lr" not in goals[0] and goals[1]["stop-min-lr"] == 0


CELL = {"paper": "p", "table": "1", "row": "own", "column": "BLEU", "value": 1.0}
ROWS = {
    "seven": {"reproduces.value": 7.0, "train.max_epoch": 7},
    "seven, clipped": {
        "reproduces.table": "2",
        "train.max_epoch": 7,
        "train.flags.clip-norm": 0.5,
    },
}


@pytest.fixture
def rows(small, write_config):
    """The small recipe with two other rows."""
    return write_config({**small, "reproduces": CELL, "rows": ROWS})


@pytest.mark.parametrize(
    ("overrides", "row", "table", "value"),
    [
        ([], None, "1", 1.0),
        (["train.seed=5"], None, "1", 1.0),
        (["train.max_epoch=7"], "seven", "1", 7.0),
        (["train.max_epoch=7", "train.seed=5"], "seven", "1", 7.0),
        (["train.max_epoch=7", "train.flags.clip-norm=0.5"], "seven, clipped", "2", None),
        (["train.flags.clip-norm=0.5"], None, "1", 1.0),
        (["train.max_epoch=8"], None, "1", 1.0),
    ],
)
def test_a_recipe_is_the_row_whose_values_it_has(rows, overrides, row, table, value):
    recipe = load_recipe(rows, overrides)
    assert recipe.row == row and recipe.reproduces.row == (row or "own")
    assert (recipe.reproduces.table, recipe.reproduces.value) == (table, value)


def test_the_rows_of_a_base_are_its_own(rows, write_config):
    child = write_config({"base": "small.yaml", "experiment": "b", "train": {"max_epoch": 7}})
    recipe = load_recipe(child)
    assert not recipe.rows and recipe.reproduces.row == "own"


def test_a_row_is_made_of_what_it_says(rows):
    recipe = load_recipe(rows)
    assert row_overrides(recipe, "seven") == ["train.max_epoch=7"]
    for name in ROWS:
        assert load_recipe(rows, row_overrides(recipe, name)).row == name
    with pytest.raises(UserError, match=r"--row: sevn: .*did you mean seven"):
        row_overrides(recipe, "sevn")


@pytest.mark.parametrize("said", [7, {}, {"reproduces.value": 7.0}, None, ["train.max_epoch"]])
def test_a_row_that_says_nothing_is_refused(small, write_config, said):
    path = write_config({**small, "reproduces": CELL, "rows": {"seven": said}})
    with pytest.raises(UserError, match=r"rows\.seven: must be a mapping"):
        load_recipe(path)


@pytest.mark.parametrize("key", ["train.max_epochs", "nothing", "train.flags"])
def test_a_row_of_a_key_that_there_is_not_is_refused(small, write_config, key):
    path = write_config({**small, "reproduces": CELL, "rows": {"seven": {key: 7}}})
    with pytest.raises(UserError, match=key.rpartition(".")[2]):
        load_recipe(path)
