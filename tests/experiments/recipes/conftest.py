"""A small valid recipe, as a mapping and as a file, for the tests to bend; the shipped ones."""

import copy
import functools
import random
import shlex
import struct

import pytest
import yaml

from moa_fairseq.cli import Console, reporting_to
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe

SMALL = {
    "experiment": "small",
    "summary": "a small recipe",
    "data": {"recipe": "parallel", "source": "en", "target": "de", "bpe": 50},
    "model": {
        "arch": "transformer",
        "share_all_embeddings": True,
        "flags": {
            **{f"{side}-layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}-embed-dim": 16 for side in ("encoder", "decoder")},
            **{f"{side}-ffn-embed-dim": 16 for side in ("encoder", "decoder")},
            **{f"{side}-attention-heads": 2 for side in ("encoder", "decoder")},
            "dropout": 0.0,
        },
    },
    "train": {
        "effective_batch_tokens": 400,
        "max_tokens": 400,
        "max_epoch": 3,
        "keep_last_epochs": 3,
        "log_interval": 1,
        "criterion": "label_smoothed_cross_entropy",
        "flags": {"label-smoothing": 0.1, "optimizer": "adam", "lr": 0.01, "num-workers": 0},
    },
    "average": {"epochs": 2},
    "generate": {"subsets": ["test"], "beam": 2, "max_tokens": 400},
    "score": {"headline": "multi_bleu"},
}


load_once = functools.cache(load_recipe)


@pytest.fixture
def shown():
    """shown(recipe, hardware, options) → the commands of a dry run, as lists of words."""

    def commands(recipe, hardware=None, options=None):
        lines = []
        with reporting_to(Console(lines.append)):
            run_recipe(recipe, hardware or Hardware(), options or Options(), dry_run=True)
        words = (shlex.split(line[2:]) for line in lines if line.startswith("$ "))
        return [[word for word in command if not word.startswith("CUDA_")] for command in words]

    return commands


@pytest.fixture
def small():
    """The mapping, free to be changed."""
    return copy.deepcopy(SMALL)


@pytest.fixture
def write_config(tmp_path):
    """write_config(mapping) → path of <experiment>.yaml."""

    def write(mapping, name=None):
        path = tmp_path / "configs" / f"{name or mapping['experiment']}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(mapping, sort_keys=False), encoding="utf-8")
        return path

    return write


@pytest.fixture
def shipped():
    """shipped(name, *overrides) → the recipe NAME of configs/, loaded once; treat it as read-only."""
    return lambda name, *overrides: load_once(shipped_recipes()[name], overrides)


@pytest.fixture
def write_text():
    """write_text(folder, letters, train, other): sentences whose translation spells each word backwards."""

    def write(folder, letters, train, other):
        folder.mkdir()
        generator = random.Random(7)
        words = [f"{a}{b}{c}" for a in letters for b in "aeo" for c in "rst"]
        for split, count in (("train", train), ("valid", other), ("test", other)):
            lines = [generator.choices(words, k=generator.randint(3, 8)) for _ in range(count)]
            for language, turn in (("en", 1), ("de", -1)):
                text = "".join(" ".join(word[::turn] for word in line) + "\n" for line in lines)
                (folder / f"{split}.{language}").write_text(text)
        return folder

    return write


@pytest.fixture
def binarised(tmp_path, make_lines):
    return make_lines(tmp_path / "bin", dict.fromkeys(("train", "valid", "test"), 1), "en-de")


@pytest.fixture
def make_lines():
    """make_lines(folder, {split: lines}) → a folder as fairseq-preprocess leaves it, of short sentences."""

    def make(folder, lines, pair="de-en"):
        folder.mkdir(parents=True)
        for language in pair.split("-"):
            (folder / f"dict.{language}.txt").write_text("a 1\n")
            for split, count in lines.items():
                stem = folder / f"{split}.{pair}.{language}"
                stem.with_name(stem.name + ".bin").write_bytes(struct.pack("<HH", 4, 2) * count)
                index = (
                    b"MMIDIDX\x00\x00"
                    + struct.pack("<QBQ", 1, 8, count)
                    + struct.pack("<i", 2) * count
                )
                offsets = b"".join(struct.pack("<q", 4 * number) for number in range(count))
                stem.with_name(stem.name + ".idx").write_bytes(index + offsets)
        return folder

    return make
