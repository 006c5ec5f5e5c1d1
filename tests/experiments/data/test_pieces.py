"""Pairs in SentencePiece's pieces: what is decoded is the raw text, whatever letters it has."""

import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.prepare import prepared_folder
from moa_fairseq.experiments.inference.text_codec import codec_of
from moa_fairseq.text.subwords import join_subwords

WORDS = {
    "ja": ("猫は", "水を", "見ます。", "犬が", "走る？"),
    "fi": ("Kissa", "katsoo", "vettä:", "USA:n", "juoksee?"),
}
STRANGE = {"ja": "鬱は\u3000１２%…「<s> <unk>」", "fi": "Ж <pad> &amp; ﬁ ẞ  </s>"}


@pytest.fixture
def pairs(tmp_path):
    """Japanese and Finnish; the test text has letters, and words of fairseq's, that the others lack."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for language, words in WORDS.items():
        blank = "" if language == "ja" else " "
        lines = [blank.join(words[(n * k) % 5] for k in range(1, 5)) for n in range(60)]
        for split, some in (
            ("train", lines),
            ("valid", lines[:5]),
            ("test", [*lines[:5], STRANGE[language]]),
        ):
            (folder / f"{split}.{language}").write_text(
                "".join(f"{line}\n" for line in some), "utf-8"
            )
    return folder


def prepared(pairs, *words):
    out = pairs.parent / "out"
    line = f"prepare parallel {out} --from {pairs} --source ja --target fi --workers 1".split()
    assert main([*map(str, line), "--segmentation", "sentencepiece", *words]) == 0
    return out


def raw(path):
    return [" ".join(line.split()) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("words", [["--bpe", "300"], ["--bpe", "320", "--piece-model", "bpe"]])
@pytest.mark.usefixtures("forked_commands")
def test_what_is_decoded_is_the_raw_text(pairs, words):
    out = prepared(pairs, *words)
    codec = codec_of(out / "binarised", "translation")
    for split in ("train", "test"):
        for language in WORDS:
            lines = (out / "pieces" / f"{split}.{language}").read_text("utf-8").splitlines()
            assert [join_subwords(line, "sentencepiece") for line in lines] == raw(
                pairs / f"{split}.{language}"
            )
        encoded = [
            codec.encode(line)
            for line in (pairs / f"{split}.ja").read_text("utf-8").splitlines()
        ]
        assert encoded == (out / "pieces" / f"{split}.ja").read_text("utf-8").splitlines()
    known = {
        row.split()[0]
        for row in (out / "binarised/dict.fi.txt").read_text("utf-8").splitlines()
    }
    used = {
        piece
        for language in WORDS
        for piece in (out / f"pieces/test.{language}").read_text("utf-8").split()
    }
    assert used <= known and "<0xFF>" in known and not known & {"<unk>", "<s>", "</s>"}
    assert (out / "binarised/dict.ja.txt").read_bytes() == (
        out / "binarised/dict.fi.txt"
    ).read_bytes()
    stages = json.loads((out / "manifest.json").read_text("utf-8"))["stages"]
    # <unk>, <s> and </s> are fairseq's own
    assert stages["model"]["sentencepiece.model"] == len(known) + 3


@pytest.mark.usefixtures("forked_commands")
def test_without_bytes_every_letter_of_the_training_text_has_a_piece(pairs):
    out = prepared(pairs, "--bpe", "60", "--no-byte-fallback")
    assert "<unk>" not in (out / "pieces/train.ja").read_text("utf-8")
    assert "<unk>" in (out / "pieces/test.ja").read_text("utf-8")


PAIR = {
    "recipe": "parallel",
    "source": "ja",
    "target": "fi",
    "bpe": 300,
    "joined_dictionary": False,
}
PAIR.update(
    lowercase=False,
    flags={},
    segmentation="sentencepiece",
    piece_model="unigram",
    byte_fallback=True,
)


def test_each_language_may_have_a_model_of_its_own(prepare, pairs):
    made, root = prepare("parallel", pairs, **PAIR)
    codec = codec_of(made.folder, "translation")
    models = [each.processor.serialized_model_proto() for each in codec.segmentations]
    assert models == [
        (root / f"model/sentencepiece.{language}.model").read_bytes() for language in WORDS
    ]
    assert "猫" not in (made.folder / "dict.fi.txt").read_text("utf-8")
    assert (
        codec.decode((root / "pieces/test.fi").read_text("utf-8").splitlines()[5])
        == raw(pairs / "test.fi")[5]
    )
    (root / "model/sentencepiece.fi.model").unlink()
    with pytest.raises(UserError, match=r"sentencepiece\.fi\.model is missing"):
        codec_of(made.folder, "translation")


def test_a_model_that_was_learnt_elsewhere_is_used(prepare, pairs, tmp_path):
    joint = {**PAIR, "joined_dictionary": True}
    _, first = prepare("parallel", pairs, "first", **joint)
    given = first / "model/sentencepiece.model"
    _, second = prepare(
        "parallel", pairs, "second", **{**joint, "bpe": None, "codes": str(given)}
    )
    assert (first / "pieces/test.fi").read_bytes() == (second / "pieces/test.fi").read_bytes()
    (tmp_path / "codes").write_text("#version: 0.2\ne r</w>\n")
    with pytest.raises(UserError, match=r"codes .*SentencePiece"):
        prepare(
            "parallel",
            pairs,
            "third",
            **{**joint, "bpe": None, "codes": str(tmp_path / "codes")},
        )


def test_data_that_was_prepared_before_is_found_again(tmp_path):
    old = {key: PAIR[key] for key in ("recipe", "source", "target", "bpe")}
    now = {
        **old,
        "segmentation": "subword_nmt",
        "piece_model": "unigram",
        "byte_fallback": True,
    }
    assert prepared_folder(now, None, tmp_path) == prepared_folder(old, None, tmp_path)
    for key, value in (
        ("segmentation", "sentencepiece"),
        ("piece_model", "bpe"),
        ("byte_fallback", False),
    ):
        assert prepared_folder({**now, key: value}, None, tmp_path) != prepared_folder(
            now, None, tmp_path
        )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--piece-model", "bpe"], "--piece-model"),
        (["--no-byte-fallback"], "--byte-fallback"),
        (["--segmentation", "sentencepiece", "--bpe", "0"], "--bpe 0"),
    ],
)
def test_flags_that_would_not_be_read_are_refused(pairs, capsys, words, named):
    line = f"prepare parallel {pairs.parent}/out --from {pairs} --source ja".split()
    assert main([*line, "--target", "fi", *words]) == 2
    assert named in capsys.readouterr().err and not (pairs.parent / "out").exists()


def test_moses_says_what_it_has_no_rules_for(prepare, pairs, said):
    (pairs / "train.so").write_text((pairs / "train.fi").read_text("utf-8"), "utf-8")
    for split in ("valid", "test"):
        (pairs / f"{split}.so").write_text((pairs / f"{split}.fi").read_text("utf-8"), "utf-8")
    settings = {**PAIR, "segmentation": "subword_nmt", "tokenize": True, "bpe": 30}
    prepare("parallel", pairs, "first", **{**settings, "source": "fi", "target": "so"})
    assert (
        sum("abbreviations for so" in line for line in said if line.startswith("WARNING")) == 1
    )
    said.clear()
    prepare("parallel", pairs, "second", **settings)
    assert sum("segmentation=sentencepiece" in line for line in said) == 1
