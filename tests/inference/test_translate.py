"""`moa-fairseq translate` beside the run's own generation; `complete` beside a literal greedy loop."""

import io
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from moa_fairseq.cli import main
from moa_fairseq.data_prep.prepare import Preparation
from moa_fairseq.evaluation.trained_model import load_trained
from moa_fairseq.inference.text_codec import codec_of
from moa_fairseq.text import detokenize

pytestmark = pytest.mark.usefixtures("forked_commands")

WORDS = ["Dog", "cat's", "grass", "runs", "sleeps", "three", "on", "(soft)", "“green”"]
TINY = {f"{side}-{what}": 16 for side in ("encoder", "decoder") for what in ("embed-dim", "ffn-embed-dim")}
RECIPE = {
    "experiment": "raw",
    "summary": "raw text of another pair of languages",
    "data": {"recipe": "embedded", "source": "en", "target": "fr", "bpe": 40, "lowercase": True},
    "model": {
        **{"arch": "moa_transformer_tiny", "num_experts": 4, "experts_per_token": 2, "expert_dim": 8},
        **{"share_all_embeddings": True, "flags": {**TINY, "encoder-layers": 2, "decoder-layers": 2}},
    },
    "train": {
        **{"effective_batch_tokens": 300, "max_tokens": 300, "max_epoch": 2, "keep_last_epochs": 1},
        **{"criterion": "label_smoothed_cross_entropy_with_routing", "log_interval": 1},
        "flags": {"optimizer": "adam", "lr": 0.02},
    },
    "generate": {"subsets": ["test"], "beam": 2, "lenpen": 0.6},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder made from raw text, and the raw text."""
    root, generator = tmp_path_factory.mktemp("raw"), random.Random(3)
    for split, size in (("train", 60), ("valid", 8), ("test", 8)):
        lines = [" ".join(generator.choices(WORDS, k=generator.randint(2, 6))) + "." for _ in range(size)]
        for language in ("en", "fr"):
            (root / f"{split}.{language}").write_text(
                "".join(f"{line}\n" for line in lines), encoding="utf-8"
            )
    (root / "raw.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    words = ["recipe", root / "raw.yaml", "--data", root, "--save-dir", root / "run", "--gpus", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main([*map(str, words)]) == 0
    return root / "run"


def answer(capsys, *words):
    assert main([*map(str, words), "--cpu"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_file_is_translated_as_the_run_translates_its_test_set(run, capsys):
    text = (run / "generate-test.txt").read_text(encoding="utf-8")
    found = {int(n): line for n, line in re.findall(r"^H-(\d+)\t\S+\t(.*)$", text, re.MULTILINE)}
    expected = [detokenize(found[number], "fr") for number in sorted(found)]
    assert answer(capsys, "translate", run, run.parent / "test.en") == expected
    out = run.parent / "out.fr"
    answer(capsys, "translate", run, run.parent / "test.en", "--output", out)
    assert out.read_text(encoding="utf-8").splitlines() == expected


def test_text_is_segmented_as_the_data_was(run):
    (data,) = Path(run.parent / "data").glob("*/binarised")
    codec = codec_of(data, "translation")
    raw = (run.parent / "test.en").read_text(encoding="utf-8").splitlines()
    assert [codec.encode(line) for line in raw] == (data.parent / "bpe/test.en").read_text().splitlines()


def test_whatever_divides_words_divides_them_as_in_training(run):
    (data,) = Path(run.parent / "data").glob("*/binarised")
    for codec in (codec_of(data, "translation"), codec_of(data, "translation")._replace(steps=())):
        expected = codec.encode("dog runs on")
        assert [codec.encode(f"dog{blank}runs\u202fon") for blank in "\t\u00a0\u2028"] == [expected] * 3


def test_a_carriage_return_ends_no_line(run, capsys, tmp_path):
    (tmp_path / "text.en").write_bytes("\ufeffDog\rruns.\n\nThree cats.\r\n".encode())
    lines = answer(capsys, "translate", run, tmp_path / "text.en")
    assert len(lines) == 3 and lines[0] and not lines[1] and lines[2]


def test_a_prepared_folder_stands_for_its_binarised_data(run, capsys):
    (data,) = Path(run.parent / "data").glob("*/binarised")
    text = run.parent / "test.en"
    assert answer(capsys, "translate", run, text, "--data", data.parent) == answer(
        capsys, "translate", run, text
    )


def test_the_text_is_not_overwritten(run, capsys):
    text = run.parent / "test.en"
    before = text.read_bytes()
    assert main(["translate", str(run), str(text), "--output", str(text)]) == 2
    assert "--output" in capsys.readouterr().err and text.read_bytes() == before


def test_standard_input_n_best_and_experts(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Dog runs.\n\nThree cats.\n"))
    lines = answer(capsys, "translate", run, "--n-best", 2, "--beam", 3)
    assert len(lines) == 6 and lines[2:4] == ["", ""]  # as many for each sentence
    scores = [float(line.split("\t")[0]) for line in lines if line]
    assert scores[0] >= scores[1] and scores[2] >= scores[3]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Dog runs.\n"))
    _, *routers = answer(capsys, "translate", run, "--show-experts")
    assert [line.split(":")[0].strip() for line in routers] == [
        "encoder.layers.1.self_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.encoder_attn",
    ]
    for line in routers:
        chosen = re.findall(r"\[(\d),(\d)\]", line)
        assert chosen and all(a != b and {a, b} <= set("0123") for a, b in chosen)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--n-best", "9"], "--n-best 9"),
        (["missing.txt"], "missing.txt"),
        (["."], ". is a folder"),
        (["--layer", "1"], "--show-experts"),
        (["--data", "nowhere"], "--data nowhere"),
    ],
)
def test_what_is_refused(run, capsys, words, named):
    assert main(["translate", str(run), *words]) == 2
    assert named in capsys.readouterr().err


def test_too_long_a_line_is_named(run, capsys, tmp_path):
    (tmp_path / "long.en").write_text("short\n" + "dog " * 2000 + "\n", encoding="utf-8")
    assert main(["translate", str(run), str(tmp_path / "long.en"), "--cpu"]) == 2
    assert "Line 2" in capsys.readouterr().err


@pytest.fixture(scope="module")
def language_model(tmp_path_factory, fairseq):
    """(checkpoint, binarised data) of a language model of SentencePiece's pieces, after a few updates."""
    root, generator = tmp_path_factory.mktemp("lm"), random.Random(4)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "slept"]
    for split, size in (("train", 200), ("valid", 20), ("test", 20)):
        rows = (" ".join(generator.choices(words, k=6)) for _ in range(size))
        (root / f"wikitext-2.{split}.txt").write_text("".join(f" {row} \n" for row in rows))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        from moa_fairseq.data_prep.catalogue import datasets

        small = {**datasets(), "wikitext2_sp512": _with_pieces(datasets()["wikitext2_sp512"], 30)}
        patch.setattr("moa_fairseq.data_prep.prepare.datasets", lambda: small)
        settings = {"recipe": "wikitext2_sp512", "flags": {}}
        data = Preparation(settings, ["train", "valid", "test"], root, root / "data").run().folder
    fairseq(
        "train",
        data,
        *(
            "--user-dir",
            Path(sys.modules["moa_fairseq"].__file__).parent,
            "--cpu",
            "--task",
            "language_modeling",
        ),
        *("--arch", "moa_lm_tiny", "--decoder-layers", 1, "--decoder-embed-dim", 16, "--num-experts", 4),
        *("--decoder-ffn-embed-dim", 16, "--criterion", "cross_entropy_with_routing", "--max-update", 20),
        *("--tokens-per-sample", 16, "--max-tokens", 160, "--optimizer", "adam", "--lr", 0.02),
        *("--save-dir", root / "run", "--num-workers", 0),
    )
    return root / "run" / "checkpoint_last.pt", data


def _with_pieces(dataset, count):
    import dataclasses

    return dataclasses.replace(dataset, pieces=count)


def test_a_language_model_goes_on_greedily(language_model, capsys, monkeypatch):
    checkpoint, data = language_model
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    (said,) = answer(capsys, "complete", checkpoint, "--data", data, "--tokens", 5)
    model, task = load_trained(checkpoint, data)
    codec, dictionary = codec_of(data, "language_modeling"), task.source_dictionary
    tokens = dictionary.encode_line(codec.encode("the cat"), append_eos=False, add_if_not_exist=False).long()
    tokens = torch.cat([tokens.new_tensor([dictionary.eos()]), tokens])
    prompt = len(tokens)
    for _ in range(5):
        scores = model.eval()(tokens[None])[0][0, -1]
        scores[dictionary.pad()] = -torch.inf
        if (best := scores.argmax()) == dictionary.eos():
            break
        tokens = torch.cat([tokens, best[None]])
    assert said == codec.decode(dictionary.string(tokens[1:])) and len(tokens) > prompt
    for flag, value in (("--tokens", "99"), ("--temperature", "0.5"), ("--seed", "3")):
        assert main(["complete", str(checkpoint), "--data", str(data), flag, value]) == 2
        assert flag in capsys.readouterr().err
