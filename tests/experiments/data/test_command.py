"""`moa-fairseq prepare` and data-prep/*.sh, as a user types them and as their documents print them."""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from moa_fairseq.cli import build_parser, main
from moa_fairseq.experiments.data import command, language_model_steps
from moa_fairseq.experiments.data.parallel_text import SPLIT, WHOLE, hyphens, is_raw

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "data-prep" / "README.md").read_text("utf-8")
SCRIPTS = sorted(
    path for path in (ROOT / "data-prep").glob("*.sh") if not path.name.startswith("_")
)
SCRIPT = re.compile(
    r"bash data-prep/(\w+)\.sh((?: \[[^\]]*\]| --?[\w-]+(?: [\w/~.]+)?| [A-Z]+)*)"
)
HELP = re.compile(r"^  moa-fairseq prepare (.*?)(?:  +#.*)?$", re.MULTILINE)


@pytest.fixture
def prepare(tables, in_process, toy_gpt2, tmp_path, capsys, monkeypatch):
    """prepare(*words) → (status, output, complaint)."""
    tables()
    monkeypatch.setattr(
        language_model_steps, "obtain_gpt2_files", lambda folders, offline: toy_gpt2
    )
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = main(["prepare", *map(str, words), "--offline", "--workers", "1"])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_summary_and_second_run(prepare, miniature, tmp_path):
    words = ["multi30k", tmp_path / "out", "--from", miniature("multi30k"), "--target", "fr"]
    status, said, _ = prepare(*words)
    assert status == 0 and "train: 60 pairs" in said and re.search(r"train +60  29,000!", said)
    assert (
        "$ fairseq-preprocess --source-lang en --target-lang fr" in said
        and ".partial" not in said
    )
    assert f"{tmp_path / 'out'}/manifest.json" in said
    status, said, _ = prepare(*words)
    assert status == 0 and said.count("done before") == 4
    status, said, _ = prepare(*words, "--json")
    manifest = json.loads(said)
    assert (
        status == 0
        and manifest["settings"]["source"] == "en"
        and manifest["settings"]["target"] == "fr"
    )
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))


def test_running_text_in_gpt2s_encoding(prepare, miniature, toy_wiki, tmp_path):
    archives = miniature("wikitext103_raw")
    status, said, _ = prepare("wikitext103_gpt2bpe", "out", "--from", archives)
    assert (
        status == 0
        and "out/binarised is ready" in said
        and "$ fairseq-preprocess --only-source" in said
    )
    assert (tmp_path / "downloads" / "extracted").is_dir()  # beside OUT
    (tmp_path / "own").mkdir()
    for path in toy_wiki.iterdir():
        (tmp_path / "own" / path.name.replace("wiki.", "")).write_bytes(path.read_bytes())
    status, said, _ = prepare("text_gpt2bpe", "out2", "--from", "own", "--json")
    report = json.loads(said)
    assert (
        status == 0
        and report["recipe"] == "text_gpt2bpe"
        and report["splits"]["test"]["lines"] == 40
    )


def test_raw_pairs_of_ones_own(prepare, own_text, tmp_path):
    words = f"parallel out --from {own_text} --source de --target en --bpe 30".split()
    status, said, complaint = prepare(*words)
    assert status == 2 and "--tokenize" in complaint and "data.tokenize=true" in complaint
    assert (
        said.count("  de: ") == 3 and " | en: " in said
    )  # pairs, for who has swapped the files
    status, said, _ = prepare(*words, "--tokenize")
    assert status == 0 and " --source-lang de --target-lang en " in said
    tokens = (tmp_path / "out" / "tokens" / "train.de").read_text("utf-8").splitlines()
    raw = (own_text / "train.de").read_text("utf-8").splitlines()
    assert len(tokens) == 30 and tokens[0].endswith(" Haus .") and raw[0].endswith(" Haus.")
    assert len((tmp_path / "out" / "bpe" / "codes").read_text("utf-8").splitlines()) == 31
    facts = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    assert (
        facts["dataset"] == "parallel"
        and facts["steps"]["test"] == "normalize_punctuation, tokenize"
    )
    status, *_ = prepare(*words, "--no-tokenize")
    assert (
        status == 0
        and (tmp_path / "out" / "tokens" / "train.de").read_text("utf-8").splitlines() == raw
    )


@pytest.mark.parametrize(
    ("name", "remedy", "tokens", "steps"),
    [
        ("wmt14_en_de", ["--tokenize"], "E @-@ Mail", "tokenize (aggressive_hyphens=True)"),
        ("iwslt14_de_en", ["--tokenize"], "e-mail", "tokenize, lowercase"),
        (
            "wmt14_en_de_vaswani",
            [
                "prepare wmt14_en_de_vaswani_rebuilt",
                "data.recipe=wmt14_en_de_vaswani_rebuilt",
                "data.bpe=32000",
            ],
            "E-Mail",
            "tokenize (edition=2017-12)",
        ),
    ],
)
def test_raw_text_gets_the_tokeniser_of_its_data_set(
    prepare, own_text, tmp_path, name, remedy, tokens, steps
):
    for path in own_text.iterdir():
        path.write_text(path.read_text("utf-8").replace("Haus.", "E-Mail."), "utf-8")
    words = f"out --from {own_text} --bpe 30".split()
    status, _, complaint = prepare(name, *(words if "--tokenize" in remedy else words[:-2]))
    assert status == 2 and all(word in complaint for word in remedy)
    other = name if "--tokenize" in remedy else f"{name}_rebuilt"
    status, said, _ = prepare(other, *words, "--tokenize")
    assert status == 0 and "of one's own" not in said
    facts = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    assert facts["dataset"] == "parallel" and steps in facts["steps"]["test"]
    for split in ("train", "valid", "test"):
        assert f" {tokens} ." in (tmp_path / "out" / "tokens" / f"{split}.de").read_text(
            "utf-8"
        )


def test_whole_hyphens_where_the_data_set_splits_them_are_said(prepare, own_text):
    for path in own_text.iterdir():
        path.write_text(
            re.sub(r"([.,])", r" \1", path.read_text("utf-8")).replace("Haus", "E-Mail"),
            "utf-8",
        )
    words = f"out --from {own_text} --bpe 30".split()
    _, said, complaint = prepare("wmt14_en_de", *words)
    assert "wmt14_en_de" in said + complaint and "(a @-@ b)" in said + complaint
    _, said, complaint = prepare("iwslt14_de_en", "out2", *words[1:])
    assert "(a @-@ b)" not in said + complaint


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["ein E @-@ Mail @-@ Server", "a-b"], SPLIT),
        (["E-Mail-Server", "-5 - x-", "@-@"], WHOLE),
        (["a -- b", "7 -"], ""),
        ([], ""),
    ],
)
def test_hyphens_are_split_or_whole(lines, kind):
    assert hyphens(lines) == kind


@pytest.mark.parametrize(
    ("lines", "raw"),
    [
        (["A dog runs .", "It is 5 p.m.", "Yes !"], False),
        (["A dog runs.", "“Yes!”", "no end"], True),
        (["他走了。", "是吗？"], True),
        (["Hundehaus", "zum Beispiel"] * 9 + ["usw."], False),
        ([], False),
    ],
)
def test_raw_text_is_told_from_tokenised(lines, raw):
    assert is_raw(lines) == raw


@pytest.mark.parametrize(
    ("words", "story"),
    [
        (["wmt14_en_de", "--flavour", "bohemian"], "one of vaswani_rebuilt, vaswani"),
        (["iwslt14_de_en", "--flavour", "vaswani"], "one of cased"),
        (["multi30k", "--flavour", "vaswani"], "--flavour vaswani"),
        (["iwslt14_de_en", "--source", "de", "--target", "de"], "are both 'de'"),
        (["multi30k", "--target", "cs"], "no language cs"),
        (["enwik8", "--source", "en"], "has one language"),
        (["enwik8", "--from", "/nowhere/at/all"], "is not a folder"),
        (["enwik8", "--seed", "2"], "leave --sizes and --seed out"),
        (["listops", "--sizes", 0, 5, 5], "each must be at least 1"),
        (["listops", "--from", "."], "leave --from out"),
        (["text_gpt2bpe"], "folder with --from"),
        (["parallel", "--from", ".", "--source", "fr"], "needs --source and --target"),
        (["parallel", "--source", "fr", "--target", "en"], "folder with --from"),
        (["multi30k", "--tokenize"], "leave --tokenize out"),
        (["multi30k", "--bpe", -1], "--bpe -1"),
        (["enwik8", "--bpe", 100], "leave --bpe out"),
        (["wmt14_en_de", "--flavour", "vaswani", "--bpe", 100], "leave --bpe out"),
        (["wmt14_en_fr"], "training-parallel-europarl-v7.tgz is not in"),
        (["wikitext103_gpt2bpe", "--from", "."], "wikitext-103-raw-v1.zip is not in"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(prepare, words, story):
    status, _, complaint = prepare(*words)
    assert status == 2 and story in complaint and complaint.count("\n") == 1


SEGMENTED = {"segmentation": "subword_nmt", "piece_model": None, "byte_fallback": None}
SEGMENTED.update(character_coverage=None, allow_unknown=False)


@pytest.mark.parametrize(
    ("source", "target", "pair"),
    [
        (None, None, "de en"),
        ("en", None, "en de"),
        (None, "de", "en de"),
        ("de", "en", "de en"),
    ],
)
def test_a_pair_can_be_turned_round(source, target, pair):
    named = argparse.Namespace(
        source=source, target=target, bpe=None, tokenize=None, **SEGMENTED
    )
    settings = command._settings(command.preparable()["iwslt14_de_en"], named)
    assert f"{settings['source']} {settings['target']}" == pair


@pytest.mark.parametrize("said, merges", [(None, 10000), (0, None), (30, 30)])
def test_no_merges_are_a_number_of_merges(said, merges):
    named = argparse.Namespace(source=None, target=None, bpe=said, tokenize=None, **SEGMENTED)
    assert command._settings(command.preparable()["iwslt14_de_en"], named)["bpe"] == merges


@pytest.mark.parametrize("said", [None, 0, 3])
def test_listops_is_drawn_by_the_seed_zero_too(said):
    drawn = command.preparable()["listops"].generated
    named = argparse.Namespace(name="listops", flavour=None, seed=said, sizes=None)
    assert command._dataset(named).generated == {
        **drawn,
        **({} if said is None else {"seed": said}),
    }


def test_each_data_set_has_its_script_and_its_row():
    names = {path.stem for path in SCRIPTS}
    flavours = {
        "wmt14_en_de_vaswani",
        "wmt14_en_de_vaswani_rebuilt",
        "iwslt14_de_en_cased",
        "listops_depth3",
    }
    own = {"text_gpt2bpe", "embedded_gpt2bpe", "text_sp", "parallel", "embedded", "tatoeba"}
    assert names | flavours | own | {"wikitext103_raw", "wikitext2_raw"} == set(
        command.preparable()
    )
    assert set(re.findall(r"^\| `data-prep/(\w+)\.sh` \|", README, re.MULTILINE)) == names
    for path in SCRIPTS:
        assert os.access(path, os.X_OK) and path.readlink() == Path("_prepare.sh")
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


@pytest.mark.thorough
def test_a_script_from_extracted_files_to_binarised(miniature, tmp_path):
    """The real processes: shell, command line, fairseq-preprocess."""
    for archive in miniature("iwslt14_de_en").glob("*.tgz"):
        with tarfile.open(archive) as package:
            package.extractall(tmp_path / "at hand", filter="data")
    line = [
        "bash",
        ROOT / "data-prep" / "iwslt14_de_en.sh",
        "--from",
        tmp_path / "at hand",
        "--offline",
    ]
    line += f"--workers 1 {tmp_path}/out".split()
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*map(str, line)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        "6,750!" in done.stdout
        and (tmp_path / "out" / "binarised" / "train.de-en.de.idx").is_file()
    )


def documented():
    """Every line of README, scripts and --help in words: optional parts there, metavariables as they are."""
    found = SCRIPT.findall(README)
    ((_, own),) = SCRIPT.findall((ROOT / "data-prep" / "_prepare.sh").read_text("utf-8"))
    found += [(script.stem, own) for script in SCRIPTS]
    shell = [[name, *re.sub(r"[\[\]]", "", rest).split()] for name, rest in found]
    return shell + [line.split() for line in HELP.findall(command.__doc__)]


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_a_documented_line_is_understood(words):
    words = ["2" if word == "N" else word for word in words]
    args = build_parser(["prepare"]).parse_args(["prepare", *words])
    assert args.name == words[0]
    assert args.output == (Path("OUT") if "OUT" in words else None)
    assert args.at_hand == (
        Path(words[words.index("--from") + 1]) if "--from" in words else None
    )
    assert args.offline == ("--offline" in words) and args.workers
    command._dataset(args)


def test_out_may_stand_anywhere():
    assert any(
        line[1:4] == ["--from", "DIR", "--offline"] and line[-1] == "OUT"
        for line in documented()
    )
    for place in (0, 2, 3, 4):
        words = ["--from", "archives", "--offline", "--workers=3"]
        words.insert(place, "out")
        args = build_parser(["prepare"]).parse_args(["prepare", "enwik8", *words])
        assert args.output == Path("out") and args.workers == 3 and args.offline
