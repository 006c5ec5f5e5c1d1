"""`moa-fairseq prepare` and data-prep/*.sh, as a user types them."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.data_prep import command
from moa_fairseq.data_prep.catalogue import public_files

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "data-prep").glob("*.sh") if not path.name.startswith("_"))


@pytest.fixture
def prepare(tables, in_process, tmp_path, capsys):
    tables()

    def run(*words):
        status = main(["prepare", *map(str, words), "--offline", "--workers", "1"])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_summary_and_second_run(prepare, miniature, tmp_path):
    words = ["multi30k", tmp_path / "out", "--from", miniature("multi30k"), "--target", "fr"]
    status, said, _ = prepare(*words)
    assert status == 0 and "train: 60 pairs" in said and re.search(r"train +60  29,000!", said)
    assert "$ fairseq-preprocess --source-lang en --target-lang fr" in said and ".partial" not in said
    assert f"{tmp_path / 'out'}/manifest.json" in said
    status, said, _ = prepare(*words)
    assert status == 0 and said.count("done before") == 4


def test_json_is_the_manifest(prepare, miniature, tmp_path):
    words = [
        "iwslt14_de_en",
        tmp_path / "out",
        "--from",
        miniature("iwslt14_de_en"),
        "--source",
        "en",
        "--json",
    ]
    status, said, _ = prepare(*words)
    manifest = json.loads(said)
    assert status == 0 and manifest["settings"]["source"] == "en" and manifest["settings"]["target"] == "de"
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))


def test_flavour(prepare, miniature, tmp_path):
    archives = miniature("wmt14_en_de_vaswani")
    status, said, _ = prepare("wmt14_en_de", tmp_path / "out", "--flavour", "vaswani", "--from", archives)
    assert status == 0 and "--nwordssrc 32768 --nwordstgt 32768" in said


def test_downloads_lie_beside_the_output(prepare, miniature, tmp_path):
    assert prepare("enwik8", tmp_path / "data" / "x", "--from", miniature("enwik8"))[0] == 0
    assert (tmp_path / "data" / "downloads" / "extracted").is_dir()


@pytest.mark.parametrize(
    ("words", "story"),
    [
        (["wmt14_en_de", "--flavour", "bohemian"], "no such flavour; it has vaswani_rebuilt, vaswani"),
        (["iwslt14_de_en", "--flavour", "vaswani"], "it has cased"),
        (["multi30k", "--flavour", "vaswani"], "it has none"),
        (["iwslt14_de_en", "--source", "de", "--target", "de"], "are both 'de'"),
        (["multi30k", "--target", "cs"], "no language cs"),
        (["enwik8", "--source", "en"], "has one language"),
        (["enwik8", "--from", "/nowhere/at/all"], "is not a folder"),
        (["wmt14_en_fr"], "training-parallel-europarl-v7.tgz is not in"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(prepare, tmp_path, monkeypatch, words, story):
    monkeypatch.chdir(tmp_path)
    status, _, complaint = prepare(*words)
    assert status == 2 and story in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "target", "pair"),
    [
        (None, None, ("de", "en")),
        ("en", None, ("en", "de")),
        (None, "de", ("en", "de")),
        ("de", "en", ("de", "en")),
    ],
)
def test_a_pair_can_be_turned_round(source, target, pair):
    import argparse

    settings = command._settings(
        command.names()["iwslt14_de_en"], argparse.Namespace(source=source, target=target)
    )
    assert (settings["source"], settings["target"]) == pair


def test_each_data_set_has_its_script():
    names = {path.stem for path in SCRIPTS}
    flavours = {"wmt14_en_de_vaswani", "wmt14_en_de_vaswani_rebuilt", "iwslt14_de_en_cased", "listops_depth3"}
    own = {"text_gpt2bpe", "embedded_gpt2bpe"}
    assert names | flavours | own | {"wikitext103_raw", "wikitext2_raw"} == set(command.names())
    for path in SCRIPTS:
        assert os.access(path, os.X_OK) and path.readlink() == Path("_prepare.sh")
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_a_script_from_extracted_files_to_binarised(miniature, tmp_path):
    """The real processes: shell, command line, fairseq-preprocess."""
    for archive in miniature("iwslt14_de_en").glob("*.tgz"):
        with tarfile.open(archive) as package:
            package.extractall(tmp_path / "at hand")
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONWARNINGS": "ignore"}
    words = ["--from", str(tmp_path / "at hand"), "--offline", "--workers", "1", str(tmp_path / "out")]
    done = subprocess.run(
        ["bash", str(ROOT / "data-prep" / "iwslt14_de_en.sh"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "6,750!" in done.stdout and (tmp_path / "out" / "binarised" / "train.de-en.de.idx").is_file()


def test_a_recipe_needs_no_data_of_its_users(tables, miniature, tmp_path, said, preprocess):
    """`moa-fairseq recipe` without --data: the archives are looked for in data/downloads, else fetched."""
    from moa_fairseq.recipes.command import Options, run_recipe
    from moa_fairseq.recipes.hardware import Hardware
    from moa_fairseq.recipes.loading import load_recipe

    tables()
    for archive in miniature("wmt14_en_de").iterdir():
        kept = next(name for name in public_files() if name.endswith("/" + archive.name))
        (tmp_path / "data" / "downloads" / kept).parent.mkdir(parents=True, exist_ok=True)
        archive.rename(tmp_path / "data" / "downloads" / kept)
    recipe = load_recipe(ROOT / "configs" / "wmt14_ende_moa_base.yaml", ["data.bpe=20"])
    options = Options("prepare", save_dir=tmp_path / "run", data_root=tmp_path / "data")
    run_recipe(recipe, Hardware(), options, lambda environment: preprocess)
    state = json.loads((tmp_path / "run" / "state.json").read_text("utf-8"))["prepare"]["facts"]
    assert state["sentences"] == {"train": 110, "valid": 5, "test": 5} and state["source"] is None
    known = [line for line in said if line.startswith("$ ")]
    said.clear()
    run_recipe(recipe, Hardware(), options, dry_run=True)
    assert known == [line for line in said if line.startswith("$ ")]  # what a dry run shows is what was run
    said.clear()
    run_recipe(recipe, Hardware(), options, lambda environment: preprocess)
    assert sum("done before" in line for line in said) == 5 + 4
