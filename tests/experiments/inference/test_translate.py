"""`moa-fairseq translate` beside the run's own generation; `complete` beside a literal greedy loop."""

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from fairseq.data import Dictionary
from shared_fixtures import USER_DIR

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.prepare import Preparation
from moa_fairseq.experiments.data.text_files import copy_text_files, text_files
from moa_fairseq.experiments.inference.text_codec import codec_of
from moa_fairseq.experiments.inference.text_model import answers, shown
from moa_fairseq.experiments.inference.translate import search_settings
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.text.codecs import ByteCodec, MergeCodec, TranslationCodec
from moa_fairseq.text.steps import detokenize

pytestmark = pytest.mark.usefixtures("forked_commands")

WORDS = ["Dog", "cat's", "grass", "runs", "schläft", "three", "on", "(soft)", "“green”"]
TINY = {
    f"{side}-{what}": 16
    for side in ("encoder", "decoder")
    for what in ("embed-dim", "ffn-embed-dim")
}
RECIPE = {
    "experiment": "raw",
    "summary": "raw text of another pair of languages",
    "data": {
        "recipe": "embedded",
        "source": "en",
        "target": "fr",
        "bpe": 40,
        "lowercase": True,
    },
    "model": {
        "arch": "moa_transformer_tiny",
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_dim": 8,
        "share_all_embeddings": True,
        "flags": {**TINY, "encoder-layers": 2, "decoder-layers": 2},
    },
    "train": {
        "effective_batch_tokens": 300,
        "max_tokens": 300,
        "max_epoch": 2,
        "keep_last_epochs": 1,
        "criterion": "label_smoothed_cross_entropy_with_routing",
        "log_interval": 1,
        "flags": {"optimizer": "adam", "lr": 0.02},
    },
    "generate": {
        "subsets": ["test"],
        "beam": 2,
        "lenpen": 0.6,
        "flags": {"max-len-b": 6, "no-repeat-ngram-size": 2},
    },
}


def json_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder made from raw text, and the raw text."""
    root = tmp_path_factory.mktemp("raw")
    generator = random.Random(3)
    for split, size in (("train", 60), ("valid", 8), ("test", 8)):
        lines = [
            " ".join(generator.choices(WORDS, k=generator.randint(2, 6))) + "."
            for _ in range(size)
        ]
        for language in ("en", "fr"):
            (root / f"{split}.{language}").write_text(
                "".join(f"{line}\n" for line in lines), encoding="utf-8"
            )
    (root / "raw.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    words = f"recipe {root}/raw.yaml --data {root} --save-dir {root}/run --gpus 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(words.split()) == 0
    return root / "run"


def answer(capsys, *words):
    assert main([*map(str, words), "--cpu"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def expected(run):
    """The run's translation of its test set, test.en."""
    text = (run / "generate-test.txt").read_text(encoding="utf-8")
    found = {
        int(n): line for n, line in re.findall(r"^H-(\d+)\t\S+\t(.*)$", text, re.MULTILINE)
    }
    return [detokenize(found[number], "fr") for number in sorted(found)]


def test_a_file_is_translated_as_the_run_translates_its_test_set(run, expected, capsys):
    out = run.parent / "out.fr"
    assert not answer(capsys, "translate", run, run.parent / "test.en", "--output", out)
    assert out.read_text(encoding="utf-8").splitlines() == expected


def test_an_exported_model_translates_like_its_run_and_is_found_by_its_name(
    run, expected, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("MOA_FAIRSEQ_MODELS", str(tmp_path))
    exported = tmp_path / "tiny"
    assert main(["export", str(run), str(exported)]) == 0
    capsys.readouterr()
    assert answer(capsys, "translate", "--model", "tiny", run.parent / "test.en") == expected
    state = torch.load(exported / "average.pt", weights_only=False)
    of_run = torch.load(run / "checkpoints" / "checkpoint_best.pt", weights_only=False)["model"]
    assert state["last_optimizer_state"] is None
    assert state["model"].keys() == of_run.keys()
    for name, tensor in state["model"].items():
        assert tensor.dtype == (
            torch.float16 if of_run[name].is_floating_point() else of_run[name].dtype
        )
        assert torch.equal(tensor, of_run[name].to(tensor.dtype))
    tied = [
        state["model"][f"{side}.embed_tokens.weight"].data_ptr()
        for side in ("encoder", "decoder")
    ]
    assert tied[0] == tied[1]
    card = (exported / "README.md").read_text(encoding="utf-8")
    parameters = sum(
        tensor.numel() for tensor in {t.data_ptr(): t for t in of_run.values()}.values()
    )
    assert f"| Parameters | {parameters:,} |" in card
    assert "not scored" in card
    scored = tmp_path / "scored"
    shutil.copytree(run, scored)
    metrics = {"multi_bleu": 12.345678, "sacrebleu_signature": "nrefs:1|case:mixed"}
    (scored / "result.json").write_text(
        json.dumps({"metrics": metrics, "subset": "test", "seed": 0})
    )
    trained = torch.load(scored / "checkpoints" / "checkpoint_best.pt", weights_only=False)
    trained["extra_state"]["carried_context"] = {"inputs": [torch.ones(9)]}
    torch.save(trained, scored / "checkpoints" / "checkpoint_best.pt")
    assert main(["export", str(scored), str(tmp_path / "other")]) == 0
    card = (tmp_path / "other" / "README.md").read_text(encoding="utf-8")
    assert "12.35" in card
    assert "nrefs:1|case:mixed" in card.replace("\\|", "|")
    assert "| Seed | 0 |" in card
    assert json_of(tmp_path / "other" / "result.json")["seed"] == 0
    left = torch.load(tmp_path / "other" / "average.pt", weights_only=False)["extra_state"]
    assert left.keys() == trained["extra_state"].keys() - {"carried_context"}
    assert "moa-fairseq translate other" in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "scored", "tiny"]


def test_a_folder_for_transformers_has_the_runs_weights(run, capsys, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    exported = tmp_path / "tiny"
    assert main(f"export {run} {exported} --transformers".split()) == 2
    assert "no-repeat-ngram-size" in capsys.readouterr().err
    run = shutil.copytree(run, tmp_path / "run")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    del recipe["generate"]["flags"]["no-repeat-ngram-size"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(f"export {run} {exported} --transformers".split()) == 0
    found = load_file(exported / "model.safetensors")
    state = torch.load(run / "checkpoints" / "checkpoint_best.pt", weights_only=False)["model"]
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name.removeprefix("model.")])
    config = json_of(exported / "config.json")
    assert config["decoder_stack"]["family"] == "moa"
    assert config["load_balance_coef"] == 0.01
    generation = json_of(exported / "generation_config.json")
    assert (generation["num_beams"], generation["length_penalty"]) == (2, 0.6)
    assert generation["max_new_tokens"] == 7
    assert "AutoModelForSeq2SeqLM" in (exported / "README.md").read_text()
    assert list((exported / "text").rglob("dict.*.txt"))
    assert not (exported / "average.pt").exists()


def test_what_cannot_be_exported_or_found_is_said_and_leaves_nothing(
    run, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("MOA_FAIRSEQ_MODELS", str(tmp_path))
    assert main(["export", str(run), str(run)]) == 2
    assert "exists" in capsys.readouterr().err
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints").mkdir(parents=True)
    assert main(["export", str(foreign), str(tmp_path / "new")]) == 2
    assert str(foreign) in capsys.readouterr().err
    state = torch.load(run / "checkpoints" / "checkpoint_best.pt", weights_only=False)
    huge = tmp_path / "huge"
    shutil.copytree(run, huge)
    state["model"]["encoder.layers.0.fc1.weight"][0, 0] = 1e5
    torch.save(state, huge / "checkpoints" / "checkpoint_best.pt")
    assert main(["export", str(huge), str(tmp_path / "new")]) == 2
    assert "encoder.layers.0.fc1.weight" in capsys.readouterr().err
    shutil.rmtree(huge / "text")
    assert main(["export", str(huge), str(tmp_path / "new")]) == 2
    assert str(huge / "text") in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))
    for words, named in (
        (["--model", "none"], str(tmp_path / "none")),
        (["--model", "../none"], "../none"),
        (["--model", ".."], "--model .. "),
        (["--model", ""], "--model is empty"),
        ([], "--model"),
        (f"--model none {run} text".split(), str(run)),
    ):
        assert main(["translate", *words]) == 2
        assert named in capsys.readouterr().err


def test_text_is_segmented_as_the_data_was(run):
    (data,) = Path(run.parent / "data").glob("*/binarised")
    codec = codec_of(data, "translation")
    raw = (run.parent / "test.en").read_text(encoding="utf-8").splitlines()
    assert [codec.encode(line) for line in raw] == (
        data.parent / "bpe/test.en"
    ).read_text().splitlines()


def test_whatever_divides_words_divides_them_as_in_training(run):
    (data,) = Path(run.parent / "data").glob("*/binarised")
    for codec in (
        codec_of(data, "translation"),
        codec_of(data, "translation")._replace(steps=()),
    ):
        expected = codec.encode("dog runs on")
        assert [codec.encode(f"dog{blank}runs\u202fon") for blank in "\t\u00a0\u2028"] == [
            expected
        ] * 3


def test_a_carriage_return_ends_no_line(run, capsys, tmp_path):
    (tmp_path / "text.en").write_bytes("\ufeffDog\rruns.\n\nThree cats.\r\n".encode())
    lines = answer(capsys, "translate", run, tmp_path / "text.en")
    assert len(lines) == 3 and lines[0] and not lines[1] and lines[2]


def test_a_prepared_folder_stands_for_its_binarised_data(run, expected, capsys):
    (data,) = Path(run.parent / "data").glob("*/binarised")
    text = run.parent / "test.en"
    assert answer(capsys, "translate", run, text, "--data", data.parent) == expected


def test_the_text_is_not_overwritten(run, capsys):
    text = run.parent / "test.en"
    before = text.read_bytes()
    assert main(f"translate {run} {text} --output {text}".split()) == 2
    assert "--output" in capsys.readouterr().err and text.read_bytes() == before


def test_standard_input_n_best_and_experts(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Dog runs.\n\nThree cats.\n"))
    lines = answer(capsys, "translate", run, "--n-best", 2, "--beam", 2)
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


def test_a_line_that_cannot_be_read_is_named_and_the_rest_translated(
    run, expected, capsys, tmp_path
):
    first, second = (run.parent / "test.en").read_bytes().splitlines()[:2]
    lines = [first, b"dog " * 2000, b"caf\xe9", b"", second]
    (tmp_path / "long.en").write_bytes(b"\n".join(lines) + b"\n")
    words = f"translate {run} {tmp_path}/long.en --cpu".split()
    assert main([*words, "--output", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out").read_text().splitlines() == [expected[0], "", "", "", expected[1]]
    said = capsys.readouterr()
    assert (
        "line 2 " in said.err
        and "line 3 " in said.err
        and "line 4 " not in said.err
        and not said.out
    )


def test_no_word_becomes_a_border_of_the_text(caplog):
    """As it would in text whose words are the symbols; <unk> is an unknown word."""
    names = Dictionary()
    names.add_symbol("dog")
    model = SimpleNamespace(
        src_dict=names,
        longest_source=9,
        encode=lambda line: names.encode_line(line, add_if_not_exist=False).long(),
        generate=lambda tokens, **settings: [[{"tokens": each}] for each in tokens],
    )
    lines = ["dog", "<pad> dog", "dog </s>", "<s>", "<unk> dog", "cat dog"]
    lines += ["dog " * words for words in (8, 9)]  # with their end nine symbols, and ten
    found = [answer.hypotheses for answer in answers(model, list(enumerate(lines, 1)), {})]
    assert [number for number, answer in enumerate(found, 1) if not answer] == [2, 3, 4, 8]
    assert found[4][0]["tokens"].tolist() == found[5][0]["tokens"].tolist()
    assert all(f"line {number} is skipped" in caplog.text for number in (2, 3, 4, 8))


def test_a_subword_at_the_end_of_a_sentence_loses_its_mark():
    assert (
        TranslationCodec(segmentations=(MergeCodec(None),) * 2).decode("ha@@ us@@ tür@@")
        == "haustür"
    )
    assert TranslationCodec().decode("a@@ b") == "a@@ b", "words, where there are no merges"


def test_a_byte_that_is_not_utf8_is_shown():
    assert ByteCodec().decode("104 228 105") == "h\ufffdi"


def test_only_text_that_was_tokenised_here_is_detokenised():
    for name, decoded in (("lowercase", "hello , world"), ("tokenize", "hello, world")):
        assert TranslationCodec(((name, {}),), target="en").decode("hello , world") == decoded


@pytest.mark.parametrize(
    "given, used", [((None, None), (2, 0.6)), ((7, None), (7, 0.6)), ((None, 0), (2, 0))]
)
def test_a_penalty_of_zero_is_a_penalty(tmp_path, given, used):
    """What is said counts before the recipe, whose other values stay."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"generate": RECIPE["generate"]}))
    found = search_settings(tmp_path, *given)
    assert (found["beam"], found["lenpen"], found["max_len_b"]) == (*used, 6)


@pytest.fixture
def copy(run, tmp_path):
    """The run, its data and a recipe in a folder of their own, to be damaged."""
    shutil.copytree(run, tmp_path / "run")
    (data,) = Path(run.parent / "data").glob("*/binarised")
    shutil.copytree(data.parent, tmp_path / "data")
    return SimpleNamespace(
        run=tmp_path / "run", data=tmp_path / "data", text=run.parent / "test.en"
    )


@pytest.mark.thorough
def test_text_and_names_are_utf8_in_any_locale(run, tmp_path):
    """As Python reads and writes in the locale C, where nothing turns it to UTF-8."""
    (data,) = Path(run.parent / "data").glob("*/binarised")
    checkpoint = run / "checkpoints" / "checkpoint_best.pt"

    def output(module, *words, **given):
        environment = {
            **os.environ,
            "LC_ALL": "C",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONUTF8": "0",
        }
        command = [sys.executable, "-m", module, *map(str, words)]
        return subprocess.run(
            command, env=environment, capture_output=True, check=True, **given
        ).stdout.decode()

    output("moa_fairseq.cli", "export", run, tmp_path / "größe")
    words = f"translate {tmp_path}/größe --show-experts --cpu".split()
    assert "ä" in output("moa_fairseq.cli", *words, input="Dog schläft.\n".encode())
    words = f"{data} --user-dir {USER_DIR} --path {checkpoint} --cpu --num-workers 0".split()
    assert "ä" in output("fairseq_cli.generate", *words)
    words = f"{data} --user-dir {USER_DIR} --path {checkpoint} --cpu".split()
    symbols = (data / "dict.en.txt").read_text(encoding="utf-8").split()
    known = next(symbol for symbol in symbols if "ä" in symbol)
    assert f"S-0\t{known}\n" in output(
        "fairseq_cli.interactive", *words, input=f"{known}\n".encode()
    )


def test_only_what_the_manifest_lists_is_exported(copy, expected, tmp_path, capsys):
    """Data that is not listed stays; a text file that is not is no part of the run."""
    (copy.run / "text" / "notes.txt").write_text("private")
    (copy.run / "text" / "bpe" / "more").mkdir()
    (copy.run / "text" / "link").symlink_to("/etc/passwd")
    manifest = json_of(copy.run / "text" / "manifest.json")
    assert main(["export", str(copy.run), str(tmp_path / "new")]) == 0
    listed = {"manifest.json", *manifest["outputs"]}
    found = [path for path in (tmp_path / "new" / "text").rglob("*") if not path.is_dir()]
    assert {str(path.relative_to(tmp_path / "new" / "text")) for path in found} == listed
    assert not any(path.is_symlink() for path in found)
    capsys.readouterr()
    assert answer(capsys, "translate", tmp_path / "new", copy.text) == expected
    (copy.run / "text" / "binarised" / "dict.zz.txt").write_text("a 1\n")
    assert main(["export", str(copy.run), str(tmp_path / "other")]) == 2
    assert "dict.zz.txt" in capsys.readouterr().err and not (tmp_path / "other").exists()


LINKS = "recipe.yaml result.json text text/binarised text/manifest.json text/bpe/codes"
LINKS += " text/binarised/dict.en.txt checkpoints checkpoints/checkpoint_best.pt average.pt"


@pytest.mark.parametrize("name", LINKS.split())
def test_a_link_that_leads_out_of_a_run_is_not_exported(copy, name, tmp_path, capsys):
    shutil.copytree(copy.run, tmp_path / "private")
    (tmp_path / "private" / "result.json").write_text('{"secret": 1}')
    shutil.copy(
        copy.run / "checkpoints" / "checkpoint_best.pt", tmp_path / "private" / "average.pt"
    )
    place = copy.run / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(tmp_path / "private" / name)
    assert main(["export", str(copy.run), str(tmp_path / "new")]) == 2
    assert str(tmp_path / "private") in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "private", "run"]
    place.unlink()
    place.symlink_to(os.path.relpath(copy.run / "state.json", place.parent))  # within
    main(["export", str(copy.run), str(tmp_path / "new")])
    assert "leads out" not in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[1]", '{"metrics": "high"}', '{"versions": [1]}'])
def test_an_odd_result_is_not_exported(copy, content, tmp_path, capsys):
    (copy.run / "result.json").write_text(content)
    assert main(["export", str(copy.run), str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "result.json" in said and said.count("\n") == 1 and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")]
)
@pytest.mark.parametrize("name", ["binarised/dict.en.txt", "bpe/codes"])
def test_a_text_file_that_would_never_end_is_not_read(copy, name, make):
    place = copy.run / "text" / name
    place.unlink()
    make(place)
    with pytest.raises(UserError, match=place.name):
        text_files(copy.run / "text" / "binarised")


def test_a_link_that_leads_out_of_the_data_is_not_kept_with_a_run(copy, tmp_path):
    """A run folder may be given away as it is."""
    (tmp_path / "secret").write_text("secret")
    (copy.data / "binarised" / "dict.zz.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"dict\.zz\.txt"):
        copy_text_files(copy.data / "binarised", tmp_path / "new")
    (tmp_path / "linked").symlink_to(copy.data / "binarised")
    (copy.data / "binarised" / "dict.zz.txt").unlink()
    copy_text_files(tmp_path / "linked", tmp_path / "new")
    assert (tmp_path / "new" / "binarised" / "dict.en.txt").is_file()


def _swap(folder):
    for path in folder.glob("binarised/dict.*.txt"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([lines[1], lines[0], *lines[2:]]))


def _exchange(folder):
    for path in folder.glob("binarised/dict.*.txt"):
        path.write_text("".join([*path.read_text().splitlines(keepends=True)[1:], "zzz 1\n"]))


def _mark(folder):
    for path in folder.glob("binarised/dict.*.txt"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def _cut(folder):
    codes = (folder / "bpe" / "codes").read_text().splitlines(keepends=True)
    (folder / "bpe" / "codes").write_text("".join(codes[: len(codes) // 2]))


DAMAGES = [_swap, _exchange, _mark, _cut, lambda folder: (folder / "bpe" / "codes").unlink()]


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_text_is_read_by_other_dictionaries_or_merges(copy, damage, capsys):
    damage(copy.data)
    named = f"translate {copy.run} {copy.text} --data {copy.data}/binarised --cpu".split()
    assert main(named) == 2  # others than its own
    shutil.rmtree(copy.run / "text")  # as a run of an older version
    assert main(named) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.thorough(keep="_swap")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_copy_is_refused_and_the_remedy_works(copy, damage, capsys):
    damage(copy.run / "text")
    assert main(f"translate {copy.run} {copy.text} --cpu".split()) == 2
    assert f"Delete {copy.run / 'text'}" in capsys.readouterr().err
    shutil.rmtree(copy.run / "text")
    assert answer(capsys, "translate", copy.run, copy.text)


def test_a_run_translates_without_its_data(expected, copy, capsys):
    state = json_of(copy.run / "state.json")
    state["prepare"]["facts"]["folder"] = str(copy.data / "gone")
    (copy.run / "state.json").write_text(json.dumps(state))
    assert answer(capsys, "translate", copy.run, copy.text) == expected


def test_an_old_run_refuses_data_that_was_prepared_anew(copy, capsys):
    shutil.rmtree(copy.run / "text")
    states = {place: json_of(place / "state.json") for place in (copy.run, copy.data)}
    states[copy.run]["prepare"]["facts"]["folder"] = f"{copy.data}/binarised"
    states[copy.data]["binarised"]["fingerprint"] = "0" * 16
    for place, state in states.items():
        (place / "state.json").write_text(json.dumps(state))
    words = f"translate {copy.run} {copy.text} --cpu".split()
    assert main(words) == 2
    remedy = re.search(r"--data (\S+)\.\n", capsys.readouterr().err).group(1)
    assert main([*words, "--data", remedy]) == 0
    said = capsys.readouterr()
    assert "WARNING" in said.err and "bpe/codes" in said.err and "WARNING" not in said.out


def test_a_flag_that_cannot_be_applied_is_named(tmp_path, caplog):
    flags = {"prefix-size": 2, "batch-size": 3}
    recipe = {"generate": {**RECIPE["generate"], "flags": flags}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    search_settings(tmp_path)
    assert "prefix_size" in caplog.text and "batch" not in caplog.text


def test_a_run_that_has_not_ended_is_not_exported(copy, tmp_path, capsys):
    (copy.run / "recipe.yaml").unlink()
    assert main(["export", str(copy.run), str(tmp_path / "exported")]) == 2
    assert "continues where it stopped" in capsys.readouterr().err
    shutil.rmtree(copy.run / "text")  # as in a folder of fairseq-train
    assert main(["export", str(copy.run), str(tmp_path / "exported")]) == 2
    assert "Only runs of `moa-fairseq recipe`" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("generate: {subsets: [test], beam: 2, lenpen: .nan}", "lenpen"),
        ("generate: {subsets: [test], beam: 0}", "beam"),
        ("generate: {subsets: [test], beam: [1, 2]}", "beam"),
        ("generate: 3", "generate"),
        ("- 1", "recipe.yaml"),
        ("{", "recipe.yaml"),
    ],
)
def test_an_odd_recipe_is_one_paragraph(tmp_path, text, named):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=named) as error:
        search_settings(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        "[]",
        "{",
        {"rules": [1]},
        {"rules": {"kind": "translation", "target": "fr", "steps": [["tokenize", {"odd": 1}]]}},
        {"rules": {"kind": "translation", "target": "fr", "steps": 3}},
        {"rules": {"kind": 7}},
        {"rules": None, "settings": {"recipe": []}},
        {"rules": None, "settings": 3},
        {"rules": None, "settings": {}},
    ],
)
def test_an_odd_manifest_is_one_paragraph(run, change, tmp_path, capsys):
    shutil.copytree(run / "text", tmp_path / "text")
    manifest = tmp_path / "text" / "manifest.json"
    content = json_of(manifest)
    manifest.write_text(
        change if isinstance(change, str) else json.dumps({**content, **change})
    )
    with pytest.raises(UserError, match="manifest"):
        codec_of(tmp_path / "text" / "binarised", "translation")


@pytest.mark.parametrize("content", ["{", '{"outputs": [1]}'])
def test_an_odd_manifest_of_a_run_has_a_remedy(copy, content, capsys):
    (copy.run / "text" / "manifest.json").write_text(content)
    assert main(f"translate {copy.run} {copy.text} --cpu".split()) == 2
    said = capsys.readouterr().err
    assert f"Delete {copy.run / 'text'}" in said and said.count("\n") == 1


@pytest.mark.parametrize("verb", ["translate", "complete"])
@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_named(run, verb, stream, monkeypatch, capsys):
    model = SimpleNamespace(models=[SimpleNamespace(max_positions=lambda: 99)], tgt_dict=[])
    monkeypatch.setattr(
        "moa_fairseq.experiments.inference.text_model.load", lambda args, kind: model
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("dog\n"))
    monkeypatch.setattr(sys, stream, None)
    assert main([verb, str(run)]) == 2
    assert {"stdin": "Standard input", "stdout": "Standard output"}[
        stream
    ] in capsys.readouterr().err


def test_a_terminal_gets_no_orders_of_foreign_text(capsys):
    terminal = SimpleNamespace(isatty=lambda: True)
    file = SimpleNamespace(isatty=lambda: False)
    text = "caf\u00e9 \u65e5 \x1b[31m\x9b2J\x07\ttab"
    assert shown(text, terminal) == "caf\u00e9 \u65e5 \\x1b[31m\\x9b2J\\x07\ttab"
    assert shown(text, file) == text
    assert main(["translate", "no\x1b[2Jrun"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def language_model(tmp_path_factory, preprocess, save_model):
    """(checkpoint, binarised data) of a language model of SentencePiece's pieces, which nobody trained."""
    root = tmp_path_factory.mktemp("lm")
    generator = random.Random(4)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "slept"]
    for split, size in (("train", 200), ("valid", 20), ("test", 20)):
        rows = (" ".join(generator.choices(words, k=6)) for _ in range(size))
        (root / f"{split}.txt").write_text("".join(f" {row} \n" for row in rows))
    job = Preparation(
        {"recipe": "text_sp", "bpe": 30, "flags": {}},
        ["train", "valid", "test"],
        root,
        root / "data",
        preprocess,
    )
    data = job.run().folder
    task = {"task": "language_modeling", "arch": "mae_transformer_lm_base"}
    return save_model(data, root / "lm.pt", "--tokens-per-sample", 16, **task), data


def test_a_language_model_goes_on_greedily(language_model, capsys, monkeypatch):
    checkpoint, data = language_model
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    (said,) = answer(capsys, "complete", checkpoint, "--data", data, "--tokens", 5)
    model, task = load_trained(checkpoint, data)
    codec = codec_of(data, "language_modeling")
    dictionary = task.source_dictionary
    tokens = dictionary.encode_line(
        codec.encode("the cat"), append_eos=False, add_if_not_exist=False
    ).long()
    tokens = torch.cat([tokens.new_tensor([dictionary.eos()]), tokens])
    prompt = len(tokens)
    for _ in range(5):
        scores = model.eval()(tokens[None])[0][0, -1]
        scores[dictionary.pad()] = -torch.inf
        if (best := scores.argmax()) == dictionary.eos():
            break
        tokens = torch.cat([tokens, best[None]])
    assert said == codec.decode(dictionary.string(tokens[1:])) and len(tokens) > prompt
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"the cat\n{'a ' * 9}\n"))  # in one batch
    assert answer(capsys, "complete", checkpoint, "--data", data, "--tokens", 5)[0] == said
    for flag, value in (("--tokens", "99"), ("--temperature", "0.5"), ("--seed", "3")):
        assert main(f"complete {checkpoint} --data {data} {flag} {value}".split()) == 2
        assert flag in capsys.readouterr().err
