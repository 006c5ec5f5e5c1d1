"""A new family is a user-dir of its own: nothing else is edited, and every command knows it."""

import json
from pathlib import Path

import pytest
import yaml

from moa_fairseq.cli import build_parser, main
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TOY = TESTS / "toy_family"
ARCH = "parity_transformer_tiny"


@pytest.fixture
def start(fairseq):
    return lambda *args: fairseq("moa", *args, check=False, env={"PYTHONPATH": str(ROOT)})


@pytest.fixture
def moa_fairseq(fairseq):
    return lambda *args: (
        fairseq("moa", "--user-dir", TOY, *args, env={"PYTHONPATH": str(ROOT)}).stdout
    )


@pytest.mark.parametrize("plugin", [[], ["--user-dir", "folder"], ["--user-dir=folder"]])
def test_the_verb_is_found_after_the_plugin(plugin):
    argv = [*plugin, "complexity", "--arch", ARCH]
    assert build_parser(argv).parse_args(argv).arch == ARCH


@pytest.mark.thorough
@pytest.mark.slow
def test_it_trains_generates_counts_and_is_analysed(
    fairseq, moa_fairseq, toy_data, tmp_path, capsys
):
    flags = ("--max-epoch", 1, "--user-dir", TOY, "--parity-scale", 1.5)
    log = fairseq.train(toy_data, tmp_path, *flags, arch=ARCH).stdout
    assert '"train_max_load"' in log  # the routers' statistics are logged as of any family
    checkpoint = tmp_path / "checkpoint_last.pt"
    generate = (
        "--path",
        checkpoint,
        "--user-dir",
        TOY,
        "--cpu",
        "--beam",
        3,
        "--max-tokens",
        400,
    )
    translations = fairseq("generate", toy_data, *generate).stdout
    assert len([line for line in translations.splitlines() if line.startswith("H-")]) == 12

    cost = json.loads(moa_fairseq("complexity", "--arch", ARCH, "--json"))
    assert (
        main(
            [
                "complexity",
                "--arch",
                "mae_transformer_tiny",
                "--json",
                "--",
                "--mae-gate",
                "uniform",
            ]
        )
        == 0
    )
    dense = json.loads(capsys.readouterr().out)
    assert cost["macs"] == dense["macs"] and cost["parameters"] == dense["parameters"]

    loads = tmp_path / "loads.json"
    model = ("expert-load", checkpoint, "--data", toy_data, "--subset", "valid", "--cpu")
    moa_fairseq("analyze", *model, "--output", tmp_path / "loads.png", "--json", loads)
    modules = json.loads(loads.read_text())["modules"]
    assert [row["name"] for row in modules] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
    ]
    for row in modules:  # even and odd positions, half of the heads each
        assert (
            abs(row["max_load"] + row["min_load"] - 2 / 8) < 1e-6 and row["dead_experts"] == 0
        )


def write_recipe(folder, **model):
    sizes = {f"{side}-layers": 1 for side in ("encoder", "decoder")}
    recipe = {
        "experiment": "parity",
        "summary": "a family of one's own",
        "data": {"recipe": "binarised", "source": "en", "target": "de"},
        "model": {
            "arch": ARCH,
            "share_all_embeddings": True,
            "flags": {**sizes, "parity-scale": 1.5},
            **model,
        },
        "train": {
            "max_tokens": 400,
            "max_epoch": 1,
            "criterion": "label_smoothed_cross_entropy_with_routing",
            "flags": {"optimizer": "adam", "lr": 0.003, "label-smoothing": 0.1},
        },
        "generate": {"subsets": ["test"], "beam": 2},
        "score": {},
    }
    path = folder / "parity.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.thorough
def test_a_recipe_trains_and_scores_it(moa_fairseq, toy_data, tmp_path):
    run = tmp_path / "run"
    line = (
        "recipe",
        write_recipe(tmp_path),
        "--data",
        toy_data,
        "--gpus",
        0,
        "--save-dir",
        run,
    )
    moa_fairseq(*line)
    assert json.loads((run / "result.json").read_text())["metrics"]["multi_bleu"] is not None
    commands = (run / "commands.sh").read_text().splitlines()
    fairseqs = [words for words in commands if words.startswith("fairseq-")]
    assert len(fairseqs) == 2 and all(f"--user-dir {TOY} " in words for words in fairseqs)


def test_a_classifier_is_scored_with_the_plugin(toy_data, tmp_path, said):
    recipe = load_recipe(shipped_recipes()["listops_switchhead_2h"])
    options = Options(stage="score", save_dir=tmp_path, user_dir=TOY)
    run_recipe(recipe, Hardware(), options, dry_run=True)
    score = next(line for line in said if line.startswith("$ "))[2:].split()
    assert score[:4] == ["moa-fairseq", "--user-dir", str(TOY), "score"]


@pytest.mark.thorough
def test_an_unknown_architecture_is_told_before_anything_is_prepared(start, toy_data, tmp_path):
    path = write_recipe(tmp_path, arch="parity_transformer_huge")
    run = tmp_path / "run"
    for where in (["--user-dir", TOY, "recipe", path], ["recipe", path, "--user-dir", TOY]):
        done = start(*where, "--data", toy_data, "--gpus", 0, "--save-dir", run)
        assert (
            done.returncode == 2
            and "'parity_transformer_huge'" in done.stderr
            and not run.exists()
        )


@pytest.mark.thorough
def test_a_plugin_without_this_package_is_refused(start, toy_data, tmp_path):
    """fairseq's commands would know neither the criterions nor what is mended in fairseq."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    line = (
        "recipe",
        write_recipe(tmp_path),
        "--data",
        toy_data,
        "--gpus",
        0,
        "--save-dir",
        tmp_path / "run",
    )
    done = start("--user-dir", tmp_path / "mine", *line)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert (
        f"--user-dir {tmp_path / 'mine'}" in done.stderr and "import moa_fairseq" in done.stderr
    )


def test_it_is_small():
    files = list(TOY.glob("*.py"))
    assert len(files) <= 4
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 120
