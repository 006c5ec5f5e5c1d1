"""AutoTokenizer of an exported folder gives the ids and the text that the run's own commands give."""

import json
import subprocess

import integrations.tiny_models  # noqa: F401  (skips where there is no transformers)
import pytest
from integrations.conftest import PYTHON, ROOT
from transformers import AutoTokenizer

import moa_fairseq.integrations.mixture_transformer  # noqa: F401  (AutoTokenizer knows the folders by it)
from moa_fairseq.errors import UserError
from moa_fairseq.integrations.mixture_tokenizer import MixtureTokenizer

pytest.importorskip("sacremoses")
LINES = {
    "en": [
        "Click the “Save” button: it's re-used by U.S. users, isn't it?",
        "The file wasn't saved . . . <unk> a@@ b | [c] & d",
        "<pad> and </s> are words;  two  spaces, a\u00a0no-break space, a\x85next line, a\ttab",
        "日本語 and emoji 🎉 1,000.5 don't",
        "Click the “Save” button: a rare ſign",
        "",
    ],
    "de": [
        "Klicken Sie auf „Speichern“: z. B. wird's nicht wieder-verwendet.",
        "Die Datei wurde nicht gespeichert ... <unk> a@@ b | [c] & d",
        "Zwei  Leerzeichen und ein\u00a0festes",
        "日本語 und 🎉 1.000,5 geht's",
        "Klicken Sie auf „Speichern“: selten ſo",
        "",
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    if not PYTHON.exists() or subprocess.call([PYTHON, "-c", "import fairseq"]):
        pytest.skip(f"{PYTHON} has no fairseq, which writes the references")
    place = tmp_path_factory.mktemp("text")
    for language, lines in LINES.items():
        text = "".join(f"{line}\n" for line in [*lines * 3, "☃ ſ"])  # the last is unknown
        (place / f"text.{language}").write_text(text, encoding="utf-8")
    words = [PYTHON, ROOT / "tests/integrations/reference_text.py", place / "out"]
    files = [place / f"text.{language}" for language in LINES]
    done = subprocess.run([*words, *files, *LINES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return place / "out"


@pytest.mark.parametrize("name", ("merges", "pieces", "words", "bytes", "gpt2"))
def test_ids_and_text_are_the_runs(folders, tmp_path, name):
    tokenizer = AutoTokenizer.from_pretrained(folders / name)
    assert isinstance(tokenizer, MixtureTokenizer)
    reference = json.loads((folders / name / "reference.json").read_text(encoding="utf-8"))
    tokenizer.save_pretrained(tmp_path)
    for found in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        source = found(reference["source"])["input_ids"]
        target = found(text_target=reference["target"])["input_ids"]
        if (
            name == "bytes"
        ):  # the end of what came before is the first that a causal model reads
            source = [[*ids[1:], ids[0]] for ids in source]
        if name == "gpt2":  # fairseq's binarize adds the end alone
            assert all(ids.pop(0) == tokenizer.bos_token_id for ids in source)
        assert [source, target] == reference["ids"]
        assert found.batch_decode(target, skip_special_tokens=True) == reference["back"]
    assert any(tokenizer.unk_token_id in row for row in target) or name in ("bytes", "gpt2")
    assert any(tokenizer.mask_token_id in row for row in target) == (name == "gpt2")


def test_a_tokenizer_replaces_the_one_that_stands_in_its_folder(folders, tmp_path):
    for name in ("pieces", "merges"):
        tokenizer = AutoTokenizer.from_pretrained(folders / name)
        tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path)  # onto its own files
    line = LINES["en"][0]
    assert again(line)["input_ids"] == tokenizer(line)["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path)(line) == tokenizer(line)


def test_a_batch_is_padded_and_a_pair_is_refused(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders / "merges")
    batch = tokenizer(["Save", "Click the button"], padding=True, return_tensors="pt")
    assert batch["input_ids"][0, -1] == tokenizer.pad_token_id == 1
    assert batch["attention_mask"][0, -1] == 0
    with pytest.raises(UserError, match="text_target"):
        tokenizer("one", "two")
