"""What a recipe needs at its end is asked for before it trains, and each remedy leads out."""

import re

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.batch import plan_batch
from moa_fairseq.experiments.recipes.ending import check_ending, missing_checkpoints
from moa_fairseq.experiments.recipes.loading import load_recipe

EVERY_SECOND = ["train.max_epoch=null", "train.flags.save-interval=2"]
UPDATES = [
    "average.epochs=null",
    "train.max_epoch=null",
    "train.max_update=150",
    "average.updates=3",
]


def every(number):
    return f"train.flags.save-interval-updates={number}"


@pytest.mark.parametrize(
    ("overrides", "per_epoch", "key"),
    [
        ([*UPDATES, every(200)], None, "average.updates"),
        ([*UPDATES, every(50)], None, None),
        (
            [*UPDATES, every(50)],
            100,
            "average.updates",
        ),  # update 100 ends an epoch: it leaves checkpoint1.pt
        ([*UPDATES, every(50)], 1, "average.updates"),
        (
            [*UPDATES, every(50), "train.flags.validate-after-updates=51"],
            None,
            "average.updates",
        ),
        (["average.epochs=2", "train.max_update=19"], 10, "average.epochs"),
        (["average.epochs=2", "train.max_update=20"], 10, None),
        ([*EVERY_SECOND, "train.max_update=39"], 10, "average.epochs"),
        ([*EVERY_SECOND, "train.max_update=40"], 10, None),
        (["train.flags.save-interval=2"], None, "train.flags.save-interval"),
        (["train.flags.save-interval=3"], None, "average.epochs"),
        (["train.flags.no-epoch-checkpoints=true"], None, "train.flags.no-epoch-checkpoints"),
        (["average=null", "train.flags.no-epoch-checkpoints=true"], None, None),
        (
            ["average=null", "train.flags.disable-validation=true"],
            None,
            "train.flags.disable-validation",
        ),
        (
            ["average=null", "train.flags.validate-interval=4"],
            None,
            "train.flags.validate-interval",
        ),
        (["average=null", "train.flags.validate-interval=4", "train.max_update=9"], None, None),
        (
            ["average=null", "train.max_update=9", "train.flags.validate-after-updates=10"],
            None,
            "train.flags.validate-after-updates",
        ),
        (
            ["average=null", "train.max_update=9", "train.flags.validate-after-updates=9"],
            None,
            None,
        ),
        (
            ["average=null", "train.flags.validate-interval=what"],
            None,
            None,
        ),  # fairseq's parser says it
    ],
)
def test_checkpoints_that_would_be_missing(small, write_config, overrides, per_epoch, key):
    path = write_config(small)
    problems = []
    try:
        problems = list(missing_checkpoints(load_recipe(path, overrides), per_epoch=per_epoch))
    except UserError as error:  # known without the data
        assert f" {key}: " in str(error)
        problems = [(key, str(error))]
    assert [found for found, _ in problems] == ([key] if key else [])
    for _, why in problems:
        for remedy in re.findall(r"--set (\S+=\w+)(?= |\.)", why.partition("Train longer")[2]):
            mended = load_recipe(path, [*overrides, remedy])
            assert not list(missing_checkpoints(mended, per_epoch=per_epoch)), remedy


def test_the_data_says_how_long_an_epoch_is(small, write_config, toy_data):
    """120 sentences, in epochs of a few updates: the last checkpoint is of fewer epochs than are averaged."""
    small["train"].update(max_epoch=None, max_update=4)
    recipe = load_recipe(write_config(small), ["data.recipe=binarised"])
    with pytest.raises(UserError, match=r"average\.epochs: .* 2 checkpoints.*in an epoch"):
        check_ending(recipe, plan_batch(recipe.train, 1), toy_data)
    longer = load_recipe(write_config(small), ["train.max_update=40"])
    check_ending(longer, plan_batch(longer.train, 1), toy_data)


def test_words_that_nobody_counted(small, write_config, tmp_path, shipped):
    recipe = shipped("quickstart_mlm", "score.headline=masked_lm_word_ppl")
    with pytest.raises(UserError, match=r"score\.headline: .*no manifest\.json"):
        check_ending(recipe, plan_batch(recipe.train, 1), tmp_path)
