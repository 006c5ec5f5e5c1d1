"""The stages of every kind of data recipe: made once, made again after a change, interrupted, refused."""

import errno
import importlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments import make
from moa_fairseq.experiments.data import archives, monolingual, obtain, pieces, text_stages
from moa_fairseq.experiments.data.binarised import is_binarised
from moa_fairseq.experiments.data.obtain import require_source
from moa_fairseq.experiments.data.prepare import content_digest, prepared_folder, size_digest
from moa_fairseq.process import locked

# Of each kind: recipe → training sentences, steps (archives' extraction counted), the first step's output.
KINDS = {
    "wmt14_en_de": (110, 5 + 4, "tokens/train.de"),
    "parallel": (30, 4, "tokens/train.de"),
    "wikitext103_word": (160, 1 + 3, "text/train"),
    "wikitext103_sp8k": (1, 1 + 4, "model/sentencepiece.model"),
    "enwik8": (64, 1 + 3, "text/train"),
    "wikitext103_gpt2bpe": (160, 1 + 2, "bpe/train"),
    "listops": (100, 5, "text/input0/train"),
}
MULTI30K = {
    "source": "en",
    "target": "de",
    "bpe": 30,
    "joined_dictionary": True,
    "lowercase": True,
    "flags": {},
}


@pytest.fixture
def source(miniature, own_text):
    """source(recipe) → what it is prepared from."""
    own = {"parallel": own_text, "listops": None}
    return lambda name: own[name] if name in own else miniature(name)


@pytest.fixture
def raw(made, tmp_path):
    """Multi30k's training, validation and first test text, unpacked."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name, count in {"train": 60, "val": 5, "test_2016_flickr": 6}.items():
        for language in ("en", "de"):
            (folder / f"{name}.{language}").write_text(
                made.text(made.sentences(count, language)), "utf-8"
            )
    return folder


def manifest_of(prepared):
    folder = (
        prepared.folder
        if (prepared.folder / "manifest.json").exists()
        else prepared.folder.parent
    )
    return json.loads((folder / "manifest.json").read_text("utf-8"))


@pytest.mark.thorough(keep=("parallel", "enwik8"))
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_made_once_and_can_be_given_as_data(prepare, source, made, said, name):
    sentences, steps, output = KINDS[name]
    given = source(name)
    first, root = prepare(name, given)
    assert first.folder == root / "binarised" and first.sentences["train"] == sentences
    before = made.tree(root)
    manifest = manifest_of(first)
    assert output in before and all(
        len(row["sha256"]) == 64 for row in manifest.get("outputs", {}).values()
    )
    again, _ = prepare(name, given)
    assert again == first and made.tree(root) == before and manifest_of(again) == manifest
    assert sum("done before" in line for line in said) == steps
    # a lost output is made again, with what follows from it
    (root / output).unlink()
    assert prepare(name, given)[0] == first and made.tree(root) == before
    taken, _ = prepare(name, first.folder, "other", ("train", "test"))
    assert taken.folder == first.folder and taken.sentences["train"] == sentences
    assert str(first.folder) in said[0] and not (root.parent / "other").exists()
    for path in first.folder.rglob("test*.bin"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"test\S*\.bin"):
        prepare(name, first.folder)
    with pytest.raises(UserError, match=r"no subset test9.*train, valid, test"):
        prepare(name, given, subsets=("test9",))
    other = "wikitext103_word" if name == "listops" else "listops"
    with pytest.raises(UserError, match=f"--data {first.folder} .*data.recipe {other}"):
        prepare(other, first.folder)
    assert not is_binarised(root)


def test_other_merges_keep_the_tokens_and_lower_case_does_not(prepare, raw, said):
    first, root = prepare("multi30k", raw, **MULTI30K)
    tokens, segmented = (
        (root / stage / "test.de").read_text("utf-8") for stage in ("tokens", "bpe")
    )
    assert (
        tokens == tokens.lower()
        and segmented.replace("@@ ", "") == tokens
        and "@@ " in segmented
    )
    other, _ = prepare("multi30k", raw, **{**MULTI30K, "bpe": 10})
    assert [line.partition(":")[0] for line in said if "done before" in line] == ["tokens"]
    assert other.fingerprint != first.fingerprint
    prepare("multi30k", raw, "plain", **{**MULTI30K, "bpe": None})
    assert not (root.parent / "plain" / "bpe").exists()


def test_merges_that_were_changed_under_their_name_are_used(prepare, raw, tmp_path, said):
    codes = tmp_path / "given"
    found = []
    for merge in ("e r</w>", "e n</w>"):
        codes.write_text(f"#version: 0.2\n{merge}\n", encoding="utf-8")
        _, root = prepare("multi30k", raw, **{**MULTI30K, "bpe": None, "codes": str(codes)})
        found.append((root / "bpe" / "train.de").read_text("utf-8"))
    assert found[0] != found[1] and found[0].replace("@@ ", "") == found[1].replace("@@ ", "")
    assert [line.partition(":")[0] for line in said if "done before" in line] == ["tokens"]


def test_pairs_with_an_empty_side_leave_the_training_text_only(prepare, raw, said):
    for name in ("train", "val"):
        lines = (raw / f"{name}.de").read_text("utf-8").split("\n", 1)[1]
        (raw / f"{name}.de").write_text("\n" + lines, "utf-8")
    prepared, _ = prepare("multi30k", raw)
    assert prepared.sentences == {"train": 59, "valid": 5, "test": 6}
    assert any(line.endswith("1 dropped: empty side") for line in said)
    # Sample pairs, for people
    assert sum("en: " in line and " | de: " in line for line in said) == 3


def test_a_sample_shows_text_alone(prepare, raw, said):
    lines = (raw / "train.de").read_bytes().split(b"\n", 1)[1]
    (raw / "train.de").write_bytes(b"\xff\n" + lines)
    with pytest.raises(UserError, match="not UTF-8"):
        prepare("multi30k", raw)
    assert sum(" | de: " in line for line in said) == 3 and "\0" not in "".join(said)


def test_long_text_goes_through_several_processes(prepare, raw, monkeypatch):
    """More than two batches: the pool path, with the order of lines kept."""
    monkeypatch.setattr(text_stages, "CHUNK", 20)
    lines = [f"satz {number} ." for number in range(65)]
    for language in ("en", "de"):
        (raw / f"train.{language}").write_text("\n".join(lines) + "\n", "utf-8")
    _, root = prepare("multi30k", raw, workers=2, **{**MULTI30K, "bpe": None})
    assert (root / "tokens" / "train.de").read_text("utf-8").splitlines() == lines


@pytest.mark.parametrize(
    ("recipe", "damage", "words"),
    [
        ("multi30k", {"val.en": b"ok\nna\xefve\n\n\n\n"}, ["val.en, line 2", "UTF-8"]),
        (
            "multi30k",
            {"val.en": None, "val.de": None},
            ["has train.en, train.de, but lacks val.en.gz", "data.recipe=parallel"],
        ),
        (
            "parallel",
            {},
            ["lacks valid.en[.gz], valid.de[.gz], test.en", "segmentation=sentencepiece"],
        ),
        ("text_gpt2bpe", {}, ["raw lacks train.txt[.gz], valid.txt[.gz], test.txt[.gz]"]),
        (
            "wikitext103_gpt2bpe",
            {"wiki.train.raw": b"x"},
            ["wikitext-103-raw-v1.zip is not in", "--offline"],
        ),
        ("enwik8", {"enwik8": b"x" * 1999}, ["enwik8 has 1,999 bytes instead of 2,000"]),
    ],
)
def test_bad_data_is_refused_before_anything_is_kept(prepare, raw, recipe, damage, words):
    for name, content in damage.items():
        (raw / name).unlink() if content is None else (raw / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare(recipe, raw)
    for word in words:
        assert word in str(error.value)
    root = raw.parent / "out"
    assert not any((root / stage).exists() for stage in ("tokens", "text", "bpe"))


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_paths_that_fairseq_would_split_are_refused(prepare, raw, tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}\S* .*{name[1]!r} in its path"):
        prepare("multi30k", raw, f"{name}/out")
    assert not (tmp_path / name).exists()
    (tmp_path / name).mkdir()
    (tmp_path / name / "dict.en.txt").write_text("x 1\n")
    with pytest.raises(UserError, match="data folder"):
        prepare("multi30k", tmp_path / name)


def test_folders_are_told_apart(tmp_path):
    settings = {**MULTI30K, "recipe": "multi30k"}
    same = prepared_folder(settings, tmp_path / "a", tmp_path)
    assert same == prepared_folder(dict(settings), tmp_path / "a", tmp_path)
    assert same.name.startswith("multi30k_en_de-")
    assert same != prepared_folder(settings, tmp_path / "b", tmp_path)
    assert same != prepared_folder({**settings, "bpe": 31}, tmp_path / "a", tmp_path)


def test_data_that_are_given_are_known_by_the_content_of_their_files(tmp_path):
    names = ("train.en-de.en.bin", "train.en-de.en.idx", "dict.en.txt", "README.md")
    for name in names:
        (tmp_path / name).write_text("x 1\n")
    before = content_digest(tmp_path), size_digest(tmp_path)
    for name in names:
        for other in ("y 1\n", "x 1\ny 1\n"):
            (tmp_path / name).write_text(other)
            same = content_digest(tmp_path) == before[0], size_digest(tmp_path) == before[1]
            assert same == (name == "README.md", name == "README.md" or len(other) == 4)
        (tmp_path / name).write_text("x 1\n")


@pytest.mark.parametrize(
    ("recipe", "right", "words"),
    [
        ("multi30k", "train.de.gz", ["train.en.gz, train.de.gz", "leave --data out"]),
        (
            "wmt14_en_de",
            "dev.tgz",
            ["training-parallel-europarl-v7.tgz", "europarl-v7.de-en.en"],
        ),
        ("wmt14_en_de", "dev/newstest2013.en", ["newstest2013-ref.de.sgm", "train.en"]),
        ("wmt14_en_de_vaswani", "train.en.gz", ["wmt16_en_de.tar.gz"]),
        ("wikitext103_word", "wiki.test.tokens", ["wikitext-103-v1.zip", "wiki.train.tokens"]),
        (
            "wikitext103_gpt2bpe",
            "wikitext-103-raw-v1.zip",
            ["wikitext-103-raw-v1.zip", "wiki.train.raw"],
        ),
        ("wikitext103_gpt2bpe", "wiki.valid.tokens.gz", ["wiki.train.raw"]),
        ("enwik8", "enwik8", ["enwik8.zip"]),
    ],
)
def test_data_without_a_known_file_is_no_reason_to_download(tmp_path, recipe, right, words):
    settings = {**MULTI30K, "recipe": recipe}
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=rf"--data .*{recipe}.*looked for") as error:
        require_source(settings, tmp_path)
    for word in words:
        assert word in str(error.value)
    with pytest.raises(UserError, match="is not a folder"):
        require_source(settings, tmp_path / "nowhere")
    assert require_source(settings, None) is None
    (tmp_path / right).parent.mkdir(exist_ok=True)
    (tmp_path / right).write_bytes(b"x")
    assert require_source(settings, tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"tokenised text.*fairseq-preprocess"):
        require_source({**settings, "recipe": "parallel"}, None)


# --- killed at any moment of any stage: the next run goes on, and ends with the very same files ------------

# (recipe, what is interrupted, its name, at which calls)
POINTS = [
    ("wmt14_en_de", archives, "atomic_write", (1, 2)),
    ("wmt14_en_de", text_stages, "_preprocess", (1, 77, 120, 232)),
    ("wmt14_en_de", text_stages, "get_vocabulary", (1,)),
    ("wmt14_en_de", text_stages, "learn_bpe", (1,)),
    ("wmt14_en_de", make, "replace", (1, 4, 6, 7, 8)),
    ("wmt14_en_de", make, "write_step_record", (1, 5, 12, 16)),
    ("wikitext103_sp8k", pieces, "atomic_write", (1,)),
    ("wikitext103_sp8k", monolingual, "atomic_write", (2,)),
    ("wikitext103_sp8k", make, "replace", (1, 2)),
    ("wikitext103_word", monolingual, "_write", (1, 2)),
    ("wikitext103_gpt2bpe", make, "replace", (1, 2, 3)),
    ("enwik8", make, "replace", (1, 2)),
]


@pytest.mark.thorough(keep="enwik8-ctrl-c")
@pytest.mark.parametrize(
    "problem",
    [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))],
    ids=["ctrl-c", "full"],
)
@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in POINTS))
def test_an_interrupted_preparation_goes_on(
    prepare, source, made, monkeypatch, tmp_path, name, problem
):
    given = source(name)
    prepare(name, given, "calm")
    for place, function, moments in (point[1:] for point in POINTS if point[0] == name):
        for when in moments:
            real = getattr(place, function)
            calls = []
            folder = f"{function}{when}"

            def bomb(*arguments, real=real, calls=calls, when=when, **options):
                calls.append(1)
                if len(calls) == when:
                    raise problem
                return real(*arguments, **options)

            with (
                monkeypatch.context() as patch,
                pytest.raises((KeyboardInterrupt, UserError)) as raised,
            ):
                patch.setattr(place, function, bomb)
                prepare(name, given, folder, lowercase=when == 77)
            assert len(calls) >= when
            assert isinstance(raised.value, KeyboardInterrupt) or "disk is full" in str(
                raised.value
            )
            prepare(name, given, folder)
            assert made.tree(tmp_path / folder) == made.tree(tmp_path / "calm"), (
                function,
                when,
            )


@pytest.mark.thorough
@pytest.mark.slow
def test_the_real_processes_killed_at_random(made, tmp_path):
    """listops: its sentences are drawn by several processes and binarised by fairseq's own program."""
    chance = random.Random(3)
    line = [sys.executable, "-m", "moa_fairseq.cli", "prepare", "listops"]
    line += ["--sizes", "1000", "50", "50", "--workers", "2"]
    subprocess.run([*line, str(tmp_path / "calm")], check=True, capture_output=True)
    for number in (signal.SIGTERM, signal.SIGKILL) * 2:
        running = subprocess.Popen([*line, str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(1, 8))
        running.send_signal(number)
        running.wait()
    subprocess.run([*line, str(tmp_path / "killed")], check=True, capture_output=True)
    assert made.tree(tmp_path / "killed") == made.tree(tmp_path / "calm")


def test_a_second_preparation_waits_until_the_first_has_ended(prepare, raw, monkeypatch):
    """For its stages and for the downloads, which data sets share; test_make.py shows the waiting."""
    waits = {}

    def recorded(folder, *patience):
        waits[folder.name] = patience
        return locked(folder, *patience)

    for module in (make, obtain):
        monkeypatch.setattr(module, "locked", recorded)
    prepare("multi30k", raw)
    assert waits == {"out": (math.inf,), "downloads": (math.inf,)}


def test_the_manifest_names_the_tools_that_made_each_stage(prepare, source, monkeypatch):
    """Not those that are installed when it is written anew."""
    module = importlib.import_module("moa_fairseq.experiments.data.prepare")
    monkeypatch.setattr(module, "tool_versions", lambda: {"subword-nmt": "1", "torch": "7"})
    prepared, root = prepare("parallel", source("parallel"))
    before = (root / "manifest.json").read_bytes()
    monkeypatch.setattr(module, "tool_versions", lambda: {"subword-nmt": "2", "torch": "7"})
    (root / "manifest.json").unlink()
    prepare("parallel", source("parallel"))
    assert manifest_of(prepared)["tools"] == {"subword-nmt": "1", "torch": "7"}
    assert (root / "manifest.json").read_bytes() == before
    for path in (root / "bpe").iterdir():
        path.unlink()
    (root / "manifest.json").unlink()
    prepare("parallel", source("parallel"))
    assert manifest_of(prepared)["tools"] == {"subword-nmt": "1, 2", "torch": "7"}
