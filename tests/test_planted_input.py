"""The worst inputs that were planted so far: each ends soon, in one paragraph that names the file."""

import gzip
import io
import json
import re
import tarfile
import time
import zipfile

import pytest
import yaml

from moa_fairseq.analysis.learning_curve import read_learning_curve
from moa_fairseq.cli import main
from moa_fairseq.data_prep.archives import DamagedArchive, extract
from moa_fairseq.data_prep.bpe import load_codes
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.generate_log import read_generate_log
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.scores import flat_metrics, read_scores
from moa_fairseq.recipes.train_log import TrainLog, summarise
from moa_fairseq.text import normalize_punctuation

MEGABYTE = 1_000_000


class soon:
    """The block takes at most `seconds` of processor time."""

    def __init__(self, seconds=2.0):
        self.seconds = seconds

    def __enter__(self):
        self.start = time.process_time()

    def __exit__(self, *error):
        assert time.process_time() - self.start < self.seconds


# --- long lines -------------------------------------------------------------------------------------

SENTENCE = "T-0\ta\nH-0\t-1\tb\n"


@pytest.mark.parametrize(
    "unit", ["| Generate ", "Generate x", "| Generate x with beam=", "[a", "[a] dictionary: 1", "S-9"]
)
def test_a_generation_log_with_a_last_line_of_a_megabyte(tmp_path, unit):
    path = tmp_path / "log"
    path.write_text(SENTENCE + unit * (MEGABYTE // len(unit)))
    with soon(), pytest.raises(UserError, match="has no closing line"):
        read_generate_log(path)
    path.write_text(SENTENCE + unit * (MEGABYTE // len(unit)) + "| Generate test with beam=5: BLEU")
    with soon():
        assert read_generate_log(path).complete


def test_a_sentence_number_without_end_is_no_sentence(tmp_path):
    (tmp_path / "log").write_text(SENTENCE + "S-" + "9" * 5000 + "\tx\nGenerate test with beam=5: \n")
    assert read_generate_log(tmp_path / "log").ids == [0]


@pytest.mark.parametrize("lang", ["de", "en", "fr", "cs"])
@pytest.mark.parametrize("unit", [".", '.".', '" ', "'", " ", ",", '."<', '..".'])
def test_a_line_of_125000_signs_is_normalised_soon(lang, unit):
    with soon(1.0):
        normalize_punctuation(f'Er sagt: ."x {unit * (125_000 // len(unit))}', lang)


@pytest.mark.parametrize(
    "line", ['Ja."', '"Ja..." Nein', 'a.".."b', 'a."." ."b', 'a." <b', 'a."<b', '..."<', "...", '.".".".']
)
def test_the_rule_for_dots_and_quotes_is_still_moses(line):
    """normalize-punctuation.perl: s/(\\.+)"(\\s*[^<])/"$1$2/g, the line end being one of the last signs."""
    expected = re.sub(r'(\.+)"(\s*[^<])', r'"\1\2', line + "\n")[:-1]
    assert normalize_punctuation(line, "de") == expected


def test_a_training_log_with_lines_of_a_megabyte(tmp_path):
    log = TrainLog(tmp_path / "train.jsonl", 1, None)
    with soon():
        for unit in ("1,", "9", "Loaded checkpoint ", "Loaded checkpoint x (epoch 1 @ ", "1 of ", "| {"):
            log(unit * (MEGABYTE // len(unit)))
    assert log.parameters == [] and log.updated is None


# --- recipes ----------------------------------------------------------------------------------------

RECIPE = {
    "experiment": "x",
    "summary": "s",
    "data": {"recipe": "binarised", "source": "en", "target": "de"},
    "model": {"arch": "transformer", "flags": {}},
    "train": {"max_tokens": 10, "max_epoch": 1, "criterion": "c", "flags": {}},
}


@pytest.mark.parametrize(
    "old, new, key",
    [
        ("summary: s", "summary: !!set {a, b}", "summary"),
        ("summary: s", "summary: !!bool maybe", "not valid YAML"),
        ("summary: s", "summary: !!int ''", "not valid YAML"),
        ("summary: s", "summary: !!timestamp x", "not valid YAML"),
        ("summary: s", "summary: " + "[" * 5000, "not valid YAML"),
        ("summary: s", "summary: &a [*a]", "write out what they stand for"),
        ("summary: s", "summary: " + "9" * 5000, "not valid YAML"),
        ("summary: s", "? [a]\n: b", "not valid YAML"),
        ("source: en", "source: [en]", "data.source: must be text"),
        ("max_tokens: 10", "max_tokens: 1" + "0" * 400, "train.max_tokens: must not be above"),
        ("max_tokens: 10", "max_tokens: .inf", "train.max_tokens: must be a whole number"),
        ("flags: {}", "flags: {lr: !!set {a}}", "flags"),
        ("flags: {}", "flags: {lr: !!binary aGFsbG8=}", "model.flags.lr: .* text"),
        ("flags: {}", "flags: {lr: [1, {a: 1}]}", "model.flags.lr: .* text"),
        ("flags: {}", "flags: {lr: 0x" + "f" * 5000 + "}", "model.flags.lr: must not be above"),
        ("max_tokens: 10", "max_tokens: 0x" + "f" * 5000, "train.max_tokens"),
        ("source: en", "source: no", "data.source: must be text"),
        ("summary: s", "summary: s\nreproduces: null\nfinetune: [ftg]", "finetune: must be text"),
        ("summary: s", "summary: s\nbase: [x]", "base: there is no file"),
        ("summary: s", 'summary: s\nbase: "a\\0b"', "base: there is no file"),
        (
            "summary: s",
            "summary: s\ngenerate: {subsets: [a], beam: 1, lenpen: 1" + "0" * 400 + "}",
            "generate",
        ),
    ],
)
def test_odd_values_of_a_recipe_are_named(tmp_path, old, new, key):
    text = yaml.safe_dump(RECIPE, sort_keys=False)
    assert old in text
    (tmp_path / "x.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=key) as raised:
        load_recipe(tmp_path / "x.yaml")
    assert str(tmp_path / "x.yaml") in str(raised.value) and len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "override", ["data=3", "average=[]", "reproduces=x", "finetune=[a]", "train.seed=!!int ''"]
)
def test_odd_overrides_are_named(tmp_path, override):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({**RECIPE, "average": {"epochs": 2}}))
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_recipe(tmp_path / "x.yaml", [override, "train.max_epoch=5"])


def test_values_that_hold_each_other_do_not_grow(tmp_path):
    lines = ["experiment: x", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "x.yaml").write_text("\n".join(lines) + "\nsummary: *a11\n")
    with soon(), pytest.raises(UserError):
        load_recipe(tmp_path / "x.yaml")


def test_many_keys_are_read_soon(tmp_path):
    flags = "".join(f"    k{number}: 1\n" for number in range(8000))
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(RECIPE).replace("  flags: {}\n", f"  flags:\n{flags}", 1))
    with soon(15.0):
        load_recipe(tmp_path / "x.yaml")


# --- codes and archives -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codes, says",
    [
        (b"#version: x\na b\n", "line 1"),
        (b"#version: 0.3\na b\n", "line 1"),
        (b"#version:\n", "line 1"),
        (b"#version: " + b".0" * 500_000 + b"x\na b\n", "line 1"),
        (b"#version: 0.2\na b\na b c\n", "line 3: 'a b c' is no merge"),
        (b"a b\n\nc d\n", "line 2: '' is no merge"),
        (b"#version: 0.2\n", "holds no merges"),
        (b"", "holds no merges"),
        (b"\xff\xfe\n", "line 1"),
    ],
)
def test_damaged_codes_do_not_end_the_program(tmp_path, codes, says):
    (tmp_path / "codes").write_bytes(codes)
    with soon(), pytest.raises(UserError, match=says) as raised:
        load_codes(str(tmp_path / "codes"))
    assert str(tmp_path / "codes") in str(raised.value)


def zip_with(path, **fields):
    """A zip with one member whose headers' `flags` or `method` are replaced."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("train.txt"), "text " * 50)
    content = bytearray(data.getvalue())
    central = content.find(b"PK\x01\x02")
    for field, (local, value) in {"flags": (6, None), "method": (8, None)}.items():
        value = fields.get(field)
        if value is not None:
            content[local : local + 2] = content[central + local + 2 : central + local + 4] = value.to_bytes(
                2, "little"
            )
    path.write_bytes(bytes(content))
    return path


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"flags": 1}, "cannot be unpacked here .*encrypted"),
        ({"method": 9}, "cannot be unpacked here .*compression"),
        ({"method": 97}, "cannot be unpacked here .*compression"),
        ({"method": 12}, "damaged"),
        ({"method": 14}, "damaged|cannot be unpacked"),
    ],
)
def test_zip_members_that_cannot_be_read(tmp_path, fields, says):
    path = zip_with(tmp_path / "x.zip", **fields)
    with pytest.raises(UserError, match=says) as raised:
        extract(path, ["train.txt"], tmp_path / "out")
    assert str(path) in str(raised.value) and not list((tmp_path / "out").rglob("*.txt"))


def tar_with(path, **changes):
    """A tar with one member `wanted` whose header, or pax records, say something else."""
    pax = changes.pop("pax", {})
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("wanted")
        info.size, info.pax_headers = 300, pax
        for name, value in changes.items():
            setattr(info, name, value)
        archive.addfile(info, io.BytesIO(b"z" * 300))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"type": tarfile.GNUTYPE_SPARSE},
        {"pax": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "wanted"}},
        {"pax": {"GNU.sparse.size": "9" * 20, "GNU.sparse.map": "0,300"}},
        {"pax": {"size": "9" * 20}},
        {"pax": {"size": "-1"}},
    ],
)
def test_sparse_and_impossible_tars(tmp_path, changes):
    path = tar_with(tmp_path / "x.tar", **changes)
    (tmp_path / "x.tgz").write_bytes(gzip.compress(path.read_bytes()))
    for archive in (path, tmp_path / "x.tgz"):
        with soon(), pytest.raises(UserError, match=r"sparse|damaged"):
            extract(archive, ["wanted"], tmp_path / "out")
    assert not (tmp_path / "out" / "wanted").exists()


def test_what_is_damaged_may_be_fetched_again(tmp_path):
    """Another mirror may have a whole archive, but not a less encrypted one."""
    with pytest.raises(DamagedArchive):
        extract(tar_with(tmp_path / "x.tar", pax={"size": "9" * 20}), ["wanted"], tmp_path / "out")
    with pytest.raises(UserError) as raised:
        extract(zip_with(tmp_path / "x.zip", flags=1), ["train.txt"], tmp_path / "out")
    assert not isinstance(raised.value, DamagedArchive)


# --- what a run leaves ------------------------------------------------------------------------------

GOOD = '{"epoch": 1, "loss": "9", "num_updates": "2"}\n'


@pytest.mark.parametrize("number", ["1e999", '"1e999"', "NaN", '"x"', "null", "[]", '"inf"', "1" + "0" * 400])
@pytest.mark.parametrize("key", ["epoch", "num_updates", "valid_num_updates"])
def test_numbers_of_a_training_log_that_are_none(tmp_path, key, number):
    record = {"epoch": "1", "valid_num_updates": "3", key: number}
    if key == "num_updates":
        record.pop("valid_num_updates")
    line = "{" + ", ".join(f'"{name}": {value}' for name, value in record.items()) + ', "valid_loss": "1"}\n'
    (tmp_path / "train.jsonl").write_text(GOOD + line)
    for read in (summarise, read_learning_curve):
        with pytest.raises(UserError, match=rf"train\.jsonl, line 2: {key} is .*Delete it"):
            read(tmp_path / "train.jsonl")
    log = TrainLog(tmp_path / "new.jsonl", 1, None)
    log(line)  # a training does not end for it
    assert not (tmp_path / "new.jsonl").exists()


def test_losses_and_speeds_that_are_no_numbers(tmp_path, capsys):
    rows = [
        {"epoch": 1, "train_loss": "nan", "train_wps": "inf", "train_num_updates": "4", "train_wpb": "1e999"},
        {"epoch": 2, "train_loss": [], "train_wps": {}, "train_num_updates": "6", "train_wpb": None},
        {"epoch": 2, "valid_loss": "nan", "valid_ppl": "inf", "valid_num_updates": "6"},
    ]
    log = TrainLog(tmp_path / "train.jsonl", 3, None)
    for row in rows:
        log(json.dumps(row))
    assert "valid ppl inf" in capsys.readouterr().out
    summary = summarise(tmp_path / "train.jsonl")
    assert (summary["updates"], summary["epochs"], summary["valid_ppl"]) == (6, 2, None)
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"multi_bleu": 3}',
        '{"multi_bleu": {}}',
        '{"multi_bleu": {"score": "12"}}',
        '{"multi_bleu": {"score": true}}',
        '{"multi_bleu": {"score": 1' + "0" * 400 + "}}",
        '{"sacrebleu": {"score": 1.0, "signature": []}}',
        '{"meta": []}',
        '{"meta": {"evaluation": 3}}',
    ],
)
def test_damaged_scores_are_named_with_a_remedy(tmp_path, content):
    (tmp_path / "score-test.json").write_text(content)
    with pytest.raises(UserError, match=r"score-test\.json.*run --stage score again"):
        read_scores(tmp_path / "score-test.json")


def test_a_diverged_models_score_is_kept_out_of_json(tmp_path):
    path = tmp_path / "score-test.json"
    path.write_text('{"lm_ppl": {"score": Infinity}, "multi_bleu": {"score": 1e999}}')
    assert flat_metrics(read_scores(path)) == {"lm_ppl": None, "multi_bleu": None}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"metrics": []}, "metrics must be a mapping"),
        ({"metrics": {"multi_bleu": "20"}}, "multi_bleu must be a number"),
        ({"metrics": {"multi_bleu": 1e999}}, "multi_bleu must be a number"),
        ({"metrics": {"sacrebleu_signature": 3}}, "sacrebleu_signature must be text"),
        ({"experiment": 3}, "experiment must be text"),
        ({"reproduces": "x"}, "reproduces must be a mapping"),
        ({"status": {}}, "status must be text"),
        ({"updates": "many"}, "updates must be a number"),
        ({"generation": [1]}, "generation must be a mapping"),
        ({"commit": 7}, "commit must be text"),
        ({"parameters": 10**400}, "parameters must be a number"),
        ({"train_seconds": "1"}, "train_seconds must be a number"),
    ],
)
def test_damaged_results_are_named(tmp_path, change, says, capsys):
    (tmp_path / "result.json").write_text(
        json.dumps({"experiment": "a", "metrics": {"multi_bleu": 1.0}, **change})
    )
    assert main(["compare", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "result.json" in shown and says in shown


@pytest.mark.parametrize("content", ["", "[" * 100_000, "3", "\ufeff{}"])
def test_results_that_are_no_json_are_named(tmp_path, content, capsys):
    (tmp_path / "result.json").write_text(content, encoding="utf-8")
    assert main(["compare", str(tmp_path)]) == 2
    assert "result.json" in capsys.readouterr().err
