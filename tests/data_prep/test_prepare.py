"""The whole preparation on made-up sentences, with fairseq's own preprocess called in this process."""

import random

import pytest

from moa_fairseq.data_prep.inputs import require_source
from moa_fairseq.data_prep.prepare import Preparation, prepared_folder
from moa_fairseq.errors import UserError

SETTINGS = {
    "recipe": "multi30k",
    "source": "en",
    "target": "de",
    "bpe": 30,
    "joined_dictionary": True,
    "lowercase": True,
    "flags": {},
}
SIZES = {"train": 60, "val": 5, "test_2016_flickr": 6}


@pytest.fixture
def raw(tmp_path):
    folder, generator = tmp_path / "raw", random.Random(1)
    folder.mkdir()
    words = ["Der", "Hund", "läuft", "schnell", "über", "die", "große", "Straße", "am", "Abend"]
    for name, count in SIZES.items():
        for language in ("en", "de"):
            lines = [
                " ".join(generator.choices(words, k=generator.randint(3, 9))) + "." for _ in range(count)
            ]
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def run(preprocess):
    def prepare(raw, tmp_path, said=None, **settings):
        if said is not None:
            said.clear()
        folders = (raw, tmp_path / "out", preprocess)
        return Preparation({**SETTINGS, **settings}, ["train", "valid", "test"], *folders, workers=1).run()

    return prepare


def test_raw_to_binarised(run, raw, tmp_path):
    prepared = run(raw, tmp_path)
    assert prepared.sentences == {"train": 60, "valid": 5, "test": 6}
    tokens = (tmp_path / "out" / "tokens" / "test.de").read_text(encoding="utf-8")
    assert tokens == tokens.lower() and " .\n" in tokens
    segmented = (tmp_path / "out" / "bpe" / "test.de").read_text(encoding="utf-8")
    assert segmented.replace("@@ ", "") == tokens and "@@ " in segmented
    dictionaries = [(prepared.folder / f"dict.{language}.txt").read_bytes() for language in ("en", "de")]
    assert dictionaries[0] == dictionaries[1]


def test_a_second_time_is_a_no_op_and_other_merges_keep_the_tokens(run, raw, tmp_path, said):
    first = run(raw, tmp_path)
    assert run(raw, tmp_path, said) == first
    assert len(said) == 4 and all("done before" in line for line in said)
    assert run(raw, tmp_path, said, bpe=10).fingerprint != first.fingerprint
    assert [line.partition(":")[0] for line in said if "done before" in line] == ["tokens"]


def test_without_bpe_the_tokens_are_binarised(run, raw, tmp_path):
    run(raw, tmp_path, bpe=None)
    assert not (tmp_path / "out" / "bpe").exists()


def test_a_finished_folder_can_be_given_as_data(run, raw, tmp_path, preprocess):
    prepared = run(raw, tmp_path)
    again = Preparation(SETTINGS, ["train", "valid"], prepared.folder, tmp_path / "other", preprocess).run()
    assert again.folder == prepared.folder
    assert again.sentences == {"train": 60, "valid": 5}
    (prepared.folder / "train.en-de.de.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.en-de\.de\.bin"):
        Preparation(SETTINGS, ["train", "valid"], prepared.folder, tmp_path / "other", preprocess).run()


def test_pairs_with_an_empty_side_leave_the_training_text_only(run, raw, tmp_path, said):
    for name in ("train", "val"):
        path = raw / f"{name}.de"
        path.write_text("\n" + path.read_text(encoding="utf-8").split("\n", 1)[1], encoding="utf-8")
    assert run(raw, tmp_path, said).sentences == {"train": 59, "valid": 5, "test": 6}
    assert any(line.endswith("1 dropped: empty side") for line in said)
    assert any("en: " in line and " | de: " in line for line in said)  # sample pairs, for people


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: (raw / "train.de").write_text("nur eine\n"), ["train.en has 60", "has 1:"]),
        (lambda raw: (raw / "val.en").write_bytes(b"ok\nna\xefve\n\n\n\n"), ["val.en, line 2", "UTF-8"]),
        (lambda raw: (raw / "val.en").unlink(), ["val.en[.gz]", "multi30k/dataset"]),
        (lambda raw: [(raw / f"train.{x}").write_text("\n\n") for x in ("en", "de")], ["no pair with text"]),
    ],
)
def test_bad_data_is_refused_before_anything_is_kept(run, raw, tmp_path, damage, words):
    damage(raw)
    with pytest.raises(UserError) as error:
        run(raw, tmp_path)
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "out" / "tokens").exists()


def test_long_text_goes_through_several_processes(raw, tmp_path, preprocess):
    """More than two batches: the pool path, with the order of lines kept."""
    lines = [f"satz {number} ." for number in range(6500)]
    for language in ("en", "de"):
        (raw / f"train.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = (["train", "valid", "test"], raw, tmp_path / "out", preprocess)
    Preparation({**SETTINGS, "bpe": None}, *arguments, workers=2).run()
    assert (tmp_path / "out" / "tokens" / "train.de").read_text(encoding="utf-8").splitlines() == lines


def test_folders_are_told_apart(tmp_path):
    same = prepared_folder(SETTINGS, tmp_path / "a", tmp_path)
    assert same == prepared_folder(dict(SETTINGS), tmp_path / "a", tmp_path)
    assert same.name.startswith("multi30k_en_de-")
    assert same != prepared_folder(SETTINGS, tmp_path / "b", tmp_path)
    assert same != prepared_folder({**SETTINGS, "bpe": 31}, tmp_path / "a", tmp_path)


def test_missing_source_says_what_to_bring():
    with pytest.raises(UserError, match=r"tokenised text.*fairseq-preprocess"):
        require_source({**SETTINGS, "recipe": "parallel"}, None)


@pytest.mark.parametrize(
    ("recipe", "right", "words"),
    [
        ("multi30k", "train.de.gz", ["train.en.gz, train.de.gz", "leave --data away"]),
        ("wmt14_en_de", "dev.tgz", ["training-parallel-europarl-v7.tgz", "europarl-v7.de-en.en"]),
        ("wmt14_en_de", "dev/newstest2013.en", ["newstest2013-ref.de.sgm", "own tokenised text: train.en"]),
        ("wmt14_en_de_vaswani", "train.en.gz", ["wmt16_en_de.tar.gz"]),
        ("wikitext103_word", "wiki.test.tokens", ["wikitext-103-v1.zip", "wiki.train.tokens"]),
        ("wikitext103_gpt2bpe", "wikitext-103-raw-v1.zip", ["wikitext-103-raw-v1.zip", "wiki.train.raw"]),
        ("wikitext103_gpt2bpe", "wiki.valid.tokens.gz", ["wiki.train.raw"]),
        ("enwik8", "enwik8", ["enwik8.zip"]),
    ],
)
def test_data_without_a_known_file_is_no_reason_to_download(tmp_path, recipe, right, words):
    settings = {**SETTINGS, "recipe": recipe}
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"--data .* holds no file of .*Looked for") as error:
        require_source(settings, tmp_path)
    for word in words:
        assert word in str(error.value)
    with pytest.raises(UserError, match="is not a folder"):
        require_source(settings, tmp_path / "nowhere")
    assert require_source(settings, None) is None
    (tmp_path / right).parent.mkdir(exist_ok=True)
    (tmp_path / right).write_bytes(b"x")
    assert require_source(settings, tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_paths_that_fairseq_would_split_are_refused(run, raw, tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}\S* cannot be used.*{name[1]!r} in its path.*another name"):
        run(raw, tmp_path / name)
    assert not (tmp_path / name / "out" / "tokens").exists()
    (tmp_path / name).mkdir()
    (tmp_path / name / "dict.en.txt").write_text("x 1\n")
    with pytest.raises(UserError, match="cannot be used"):
        run(tmp_path / name, tmp_path)


def test_text_that_is_segmented_already_is_recognised(run, raw, tmp_path):
    segmented = (raw / "train.de").read_text(encoding="utf-8").replace("lä", "l@@ ä")
    (raw / "train.de").write_text(segmented, encoding="utf-8")
    with pytest.raises(UserError, match=r"train\.de is segmented already.*@@ .*data\.bpe=null"):
        run(raw, tmp_path)
    assert run(raw, tmp_path, bpe=None).sentences["train"] == 60
