"""Files that others write are read soon, or refused in one paragraph that names them.

The worst so far are listed, odd ones are made by the hundred:

FUZZ_CASES=20000 FUZZ_SEED=7 python -m pytest tests/test_hostile_input.py -k "in_time and german"
"""

import contextlib
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import signal
import tarfile
import tempfile
import time
import tracemalloc
from pathlib import Path

import hostile_input
import pytest
from hostile_input import (
    LOG,
    PARSERS,
    RECIPE,
    RECORD,
    RESULT,
    STUDY,
    WANTED,
    Parser,
    dump_yaml,
    zip_of,
)

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.archives import DamagedArchive, contents, extract
from moa_fairseq.experiments.data.parallel_text import BAD, BAD_LINES, read_lines
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.scores import flat_metrics, read_scores
from moa_fairseq.experiments.recipes.train_log import TrainLog, summarise
from moa_fairseq.text.steps import normalize_punctuation

CASES = int(os.environ.get("FUZZ_CASES", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MEGABYTE = 1_000_000


class TooSlow(BaseException):
    """An input took more than its time; no `except Exception` of a parser catches it."""


@contextlib.contextmanager
def processor_time(seconds):
    """The block takes at most so much."""

    def ring(number, frame):
        raise TooSlow

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(scope="module")
def folder():
    """In memory where the system has such a place: every case writes a file."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


def refusal(parser, data, folder, seconds=2.0):
    """Why a parser refuses an input, the file's name left as it is; None where it takes it."""
    place = folder / "case"
    place.mkdir()
    try:
        (place / "input").write_bytes(data)
        with processor_time(seconds + parser.seconds_per_byte * len(data)):
            parser.parse(place)
    except UserError as error:
        return str(error)
    finally:
        shutil.rmtree(place)
    return None


# --- planted: (parser, input, what the refusal says; None: it is taken) -----------------------------

SENTENCE = b"T-0\ta\nH-0\t-1\tb\n"
UNITS = (
    b"| Generate ",
    b"Generate x",
    b"| Generate x with beam=",
    b"[a",
    b"[a] dictionary: 1",
    b"S-9",
)
LONG_LINES = (
    b"1,",
    b"9",
    b"Loaded checkpoint ",
    b"Loaded checkpoint x (epoch 1 @ ",
    b"1 of ",
    b"| {",
)
SIGNS = (".", '.".', '" ', "'", " ", ",", '."<', '..".')
NINES = "9" * 5000
ZEROS = "0" * 400
IN_RECIPES = (
    ("summary: a recipe", "summary: !!set {a, b}", "of the kind .*set"),
    ("summary: a recipe", "summary: !!bool maybe", "not valid YAML"),
    ("summary: a recipe", "summary: !!int ''", "not valid YAML"),
    ("summary: a recipe", "summary: !!timestamp x", "not valid YAML"),
    ("summary: a recipe", "summary: " + "[" * 5000, "not valid YAML"),
    ("summary: a recipe", "summary: &a [*a]", "holds itself"),
    ("summary: a recipe", f"summary: {NINES}", "not valid YAML"),
    ("summary: a recipe", "? [a]\n: b", "not valid YAML"),
    ("summary: a recipe", "summary: s\nfinetune: [ftg]", "finetune: must be text"),
    ("summary: a recipe", "summary: s\nbase: [x]", "base: "),
    ("summary: a recipe", 'summary: s\nbase: "a\\0b"', "base: must be the path"),
    ("source: en", "source: [en]", "data.source: must be text"),
    ("source: en", "source: no", "data.source: must be text"),
    ("max_tokens: 400", f"max_tokens: 1{ZEROS}", "train.max_tokens: must not be above"),
    ("max_tokens: 400", "max_tokens: .inf", "train.max_tokens: must be a whole number"),
    ("max_tokens: 400", "max_tokens: 0x" + "f" * 5000, "not valid YAML"),
    ("dropout: 0.1", "lr: !!set {a}", "of the kind .*set"),
    ("dropout: 0.1", "lr: !!binary aGFsbG8=", "of the kind .*binary"),
    ("dropout: 0.1", "lr: [1, {a: 1}]", "model.flags.lr: .* text"),
    ("dropout: 0.1", "lr: 0x" + "f" * 4000, "must not be above|unusable|not valid"),
    ("dropout: 0.1", "lr: '${oc.env:HOME}'", "model: .*`"),
    ("dropout: 0.1", "lr: .nan", "model.flags.lr: must be a number"),
    ("dropout: 0.1", 'lr: "\\ud800"', "not valid YAML: .*surrogates"),
    ("dropout: 0.1", "lr: 1\n    lr: 2", "duplicate key lr"),
    ("lenpen: 0.6", "lenpen: .nan", "generate.lenpen: must be a number"),
    ("max_tokens: 400", "max_tokens: 400\n  seed: -1", "train.seed: must be between"),
    ("lenpen: 0.6", f"lenpen: 1{ZEROS}", "generate"),
)
# values that hold each other, and so would grow without end
NESTED = ["experiment: input", "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
NESTED += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
IN_CODES = (
    (b"#version: x\na b\n", "line 1"),
    (b"#version: 0.3\na b\n", "line 1"),
    (b"#version:\n", "line 1"),
    (b"#version: " + b".0" * 500_000 + b"x\na b\n", "line 1"),
    (b"#version: 0.2\na b\na b c\n", "line 3: 'a b c' is not a merge"),
    (b"a b\n\nc d\n", "line 2: '' is not a merge"),
    (b"#version: 0.2\n", "no merges.*learn-bpe"),
    (b"", "no merges.*learn-bpe"),
    (b"\xff\xfe\n", "line 1"),
)


def zip_with(field, value):
    """A zip whose member of interest has other flags (6) or another method (8), in both of its headers."""
    data = bytearray(zip_of())
    local = data.find(b"PK\x03\x04", 4)
    central = data.rfind(b"PK\x01\x02")
    data[local + field : local + field + 2] = value.to_bytes(2, "little")
    data[central + field + 2 : central + field + 4] = value.to_bytes(2, "little")
    return bytes(data)


def tar_with(pax=(), kind=tarfile.REGTYPE):
    """A tar whose only member is of another kind, or has such pax records."""
    data = io.BytesIO()
    with tarfile.open(
        fileobj=data, mode="w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    ) as tar:
        info = tarfile.TarInfo(WANTED)
        info.size, info.pax_headers, info.type = 300, dict(pax), kind
        tar.addfile(info, io.BytesIO(b"z" * 300))
    return data.getvalue()


ENCRYPTED = zip_with(6, 1)
ENDLESS = tar_with({"size": "9" * 20})
OF_GNU = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": WANTED}
TARS = (
    tar_with(kind=tarfile.GNUTYPE_SPARSE),
    tar_with(OF_GNU),
    tar_with({"GNU.sparse.size": "9" * 20, "GNU.sparse.map": "0,300"}),
    ENDLESS,
    tar_with({"size": "-1"}),
)


def log_with(key, number):
    """A training log whose second line has something that is not a number."""
    record = {"epoch": "1", "valid_num_updates": "3", key: number, "valid_loss": '"1"'}
    if key == "num_updates":
        del record["valid_num_updates"]
    line = ", ".join(f'"{name}": {value}' for name, value in record.items())
    return f"{json.dumps(LOG[0])}\n{{{line}}}\n".encode()


IN_SCORES = (
    *(
        "",
        "[]",
        "[" * 100_000,
        '{"multi_bleu": 3}',
        '{"multi_bleu": {}}',
        '{"meta": {"evaluation": 3}}',
    ),
    *('{"multi_bleu": {"score": "12"}}', '{"multi_bleu": {"score": true}}', '{"meta": []}'),
    '{"multi_bleu": {"score": 1' + ZEROS + "}}",
    '{"sacrebleu": {"score": 1.0, "signature": []}}',
)
IN_STUDIES = (
    *(
        ({key: value}, key)
        for key, value in (("stage", "x"), ("threads", -5), ("levels", -1), ("seeds", 10**9))
    ),
    *(
        ({"study": name}, "study: must start")
        for name in ("/abs", "../../x", ".", "x" * 300, "a b")
    ),
    *(({"margin": value}, "margin") for value in (float("nan"), -1)),
    ({"systems": {}}, "systems"),
    ({"set": {"train.flags.lr": "${oc.env:HOME}"}}, "set: .*`"),
    (
        {"tuning": {"grid": {f"train.flags.k{n}": list(range(1000)) for n in range(3)}}},
        "tuning.grid: .*runs",
    ),
    ({"tuning": {"grid": {"train.flags.lr": [1, 1]}}}, "tuning.grid: has lr=1 twice"),
    ({"tuning": {"grid": {"train.flags.lr": []}}}, "tuning.grid: has no point"),
    ({"tuning": {}}, "tuning.grid: is missing"),
)
SYSTEM = "{label: a, recipe: r.yaml"
STUDY_TEXTS = (
    (
        f"study: s\nquestion: q\nseeds: 1\nsystems:\n  A: {SYSTEM}}}\n  A: {SYSTEM}}}\n",
        "duplicate key A",
    ),
    (  # each `<<` doubles what is below it
        f"study: s\nquestion: q\nseeds: 1\nsystems:\n  A0: {SYSTEM}, set: &b0 {{x: 1}}}}\n"
        + "".join(
            f"  A{n}: {SYSTEM}, set: &b{n} {{<<: [*b{n - 1}, *b{n - 1}]}}}}\n"
            for n in range(1, 28)
        ),
        "more than 100,000 values",
    ),
)
IN_RECORDS = (
    ({"curve": []}, None),
    ({"curve": [{"valid": None}]}, None),
    ({"curve": {}}, "curve must be a list"),
    ({"curve": [3]}, "curve must be a mapping"),
    ({"curve": [{"valid": "x"}]}, "valid must be a number"),
    ({"seed": "1"}, "seed must be a number"),
    ({"settings": []}, "settings must be a mapping"),
)
LINE = json.dumps(RECORD) + "\n"
IN_RESULTS = (
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
)
OF_NONE = ("1e999", '"1e999"', "NaN", '"x"', "null", "[]", '"inf"', "1" + ZEROS)
PLANTED = [
    *(
        ("generation-log", SENTENCE + unit * (MEGABYTE // len(unit)), "has no closing line")
        for unit in UNITS
    ),
    *(
        (
            "generation-log",
            SENTENCE + unit * (MEGABYTE // len(unit)) + b"| Generate test with beam=5: ",
            None,
        )
        for unit in UNITS
    ),
    (
        "generation-log",
        SENTENCE + b"S-" + NINES.encode() + b"\tx\nGenerate test with beam=5: \n",
        None,
    ),
    *(
        ("german", f'Er sagt: ."x {sign * (125_000 // len(sign))}'.encode(), None)
        for sign in SIGNS
    ),
    ("train-log", b"\n".join(unit * (MEGABYTE // len(unit)) for unit in LONG_LINES), None),
    *(
        (parser, log_with(key, number), rf"line 2: {key} is .*Delete")
        for parser in ("train-log", "learning-curve")
        for key in ("epoch", "num_updates", "valid_num_updates")
        for number in OF_NONE
    ),
    *(
        ("recipe-yaml", dump_yaml(RECIPE).replace(old, new, 1).encode(), says)
        for old, new, says in IN_RECIPES
    ),
    (
        "recipe-yaml",
        "\n".join([*NESTED, "summary: *a11\n"]).encode(),
        "more than 100,000 values",
    ),
    ("recipe-yaml", b"a: b\n" * 100_000, "more than 262,144 bytes"),
    *(
        ("study-yaml", json.dumps({**STUDY, **change}).encode(), says)
        for change, says in IN_STUDIES
    ),
    *(("study-yaml", text.encode(), says) for text, says in STUDY_TEXTS),
    *(
        ("record", json.dumps({**RECORD, **change}).encode(), says)
        for change, says in IN_RECORDS
    ),
    *(
        ("record", data.encode(), "")
        for data in ("", "[]", "{}", '{"seed": 1, "seed": 2}', '["\\ud800"]')
    ),
    *(
        (
            "records",
            f"{LINE}{json.dumps({**RECORD, **change})}\n".encode(),
            says and f"line 2.*{says}",
        )
        for change, says in IN_RECORDS
    ),
    *(
        ("records", f"{LINE}{data}\n{LINE}".encode(), "line 2")
        for data in (LINE[:40], "[]", "{}", "3", "[" * 100_000, '{"seed": 1, "seed": 2}', NINES)
    ),
    *(("records", data.encode(), None) for data in ("", "\n", LINE, f"{LINE}\n{LINE}")),
    *(
        ("records", (LINE + LINE)[:-end].encode(), None) for end in (1, 2, 40)
    ),  # cut off by a kill
    *(("translations", lzma.compress(tar), "sparse|damaged") for tar in TARS),
    (
        "translations",
        lzma.compress(hostile_input.tar_of().replace(b"z", b"\xff")),
        "line 1: .*not UTF-8",
    ),
    *(
        ("translations", data, "damaged")
        for data in (b"", lzma.compress(zip_of()), lzma.compress(hostile_input.tar_of())[:-9])
    ),
    *(("bpe-codes", data, says) for data, says in IN_CODES),
    ("archives", ENCRYPTED, "encrypted.*--data"),
    *(("archives", zip_with(8, method), "compression.*--data") for method in (9, 97)),
    # zipfile unpacks these, whatever comes out of a block
    *(("archives", zip_with(8, method), "compression.*--data") for method in (12, 14)),
    *(
        ("archives", pack(tar), "sparse|damaged")
        for tar in TARS
        for pack in (bytes, gzip.compress)
    ),
    *(("scores", data.encode(), "run --stage score again") for data in IN_SCORES),
    ("scores", b'{"lm_ppl": {"score": Infinity}, "multi_bleu": {"score": 1e999}}', None),
    *(
        ("result", json.dumps({**RESULT, **change}).encode(), says)
        for change, says in IN_RESULTS
    ),
    *(("result", data.encode(), "") for data in ("", "[" * 100_000, "3", "\ufeff{}")),
]


def test_what_was_planted_ends_soon_and_is_named(folder):
    wrong = []
    for number, (name, data, says) in enumerate(PLANTED):
        try:
            said = refusal(
                PARSERS[name], data, folder, seconds=10.0 if name.endswith("-yaml") else 2.0
            )
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        if says is None:
            fits = said is None
        else:
            named = said and re.search(
                r"\binput\b|\bx\.(zip|tar|tgz)|train\.jsonl|A-seed1\.json|records\.jsonl|outputs\.tar\.xz",
                said,
            )
            fits = named and re.search(says, said) and len(said) <= 2000
        if not fits:
            wrong.append(f"{number}, {name}: {data[:80]!r}: {said!s:.200}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "override", ["data=3", "average=[]", "reproduces=x", "finetune=[a]", "train.seed=!!int ''"]
)
def test_odd_overrides_are_named(tmp_path, override):
    (tmp_path / "input.yaml").write_text(dump_yaml(RECIPE))
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_recipe(tmp_path / "input.yaml", [override, "train.max_epoch=5"])


@pytest.mark.thorough
def test_many_keys_are_read_soon(tmp_path):
    recipe = {
        **RECIPE,
        "model": {"arch": "transformer", "flags": {f"k{n}": 1 for n in range(8000)}},
    }
    (tmp_path / "input.yaml").write_text(dump_yaml(recipe))
    with processor_time(15.0):
        load_recipe(tmp_path / "input.yaml")


@pytest.mark.parametrize(
    "line",
    [
        'Ja."',
        '"Ja..." Nein',
        'a.".."b',
        'a."." ."b',
        'a." <b',
        'a."<b',
        '..."<',
        "...",
        '.".".".',
    ],
)
def test_the_rule_for_dots_and_quotes_is_still_moses(line):
    """normalize-punctuation.perl: s/(\\.+)"(\\s*[^<])/"$1$2/g, the line end being one of the last signs."""
    expected = re.sub(r'(\.+)"(\s*[^<])', r'"\1\2', line + "\n")[:-1]
    assert normalize_punctuation(line, "de") == expected


def test_what_is_damaged_may_be_fetched_again(tmp_path):
    """Another mirror may have a whole archive, but not a less encrypted one."""
    for name, data in (("x.tar", ENDLESS), ("x.zip", ENCRYPTED)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError) as raised:
            extract(tmp_path / name, [WANTED], tmp_path / "out")
        assert isinstance(raised.value, DamagedArchive) == (name == "x.tar")


def large(stream, begin, size):
    """Write a line, name or file of zeros."""
    stream.write(begin)
    for _ in range(size // MEGABYTE):
        stream.write(bytes(MEGABYTE))
    stream.write(b"\nlast\n")


@pytest.mark.parametrize("mark_bad", [False, True])
def test_a_packed_line_of_any_length_does_not_fill_the_memory(tmp_path, mark_bad):
    with gzip.open(tmp_path / "x.gz", "wb", compresslevel=1) as stream:
        large(stream, b"first\n", 50 * MEGABYTE)
    found = []
    tracemalloc.start()
    try:
        found.extend(read_lines(tmp_path / "x.gz", mark_bad))
    except UserError as error:
        found.append(str(error))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * MEGABYTE
    if mark_bad:
        assert found == ["first", BAD + BAD_LINES[0], "last"]
    else:
        assert "line 2" in found[1]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (tarfile.GNUTYPE_LONGNAME, contents),
        (tarfile.GNUTYPE_LONGLINK, lambda archive: extract(archive, ["x"], archive.parent)),
        (tarfile.XHDTYPE, contents),
    ],
)
def test_a_name_of_any_length_does_not_fill_the_memory(tmp_path, kind, read):
    header = tarfile.TarInfo("././@LongLink")
    header.type = kind
    header.size = 50 * MEGABYTE
    with lzma.open(tmp_path / "x.tar.xz", "wb", preset=0) as stream:
        large(stream, header.tobuf(tarfile.GNU_FORMAT), header.size)
    tracemalloc.start()
    with pytest.raises(DamagedArchive, match=r"x\.tar\.xz"):
        read(tmp_path / "x.tar.xz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * MEGABYTE


def test_losses_and_speeds_that_are_no_numbers(tmp_path, capsys):
    rows = [
        {
            "epoch": 1,
            "train_loss": "nan",
            "train_wps": "inf",
            "train_num_updates": "4",
            "train_wpb": "1e999",
        },
        {
            "epoch": 2,
            "train_loss": [],
            "train_wps": {},
            "train_num_updates": "6",
            "train_wpb": None,
        },
        {"epoch": 2, "valid_loss": "nan", "valid_ppl": "inf", "valid_num_updates": "6"},
    ]
    log = TrainLog(tmp_path / "train.jsonl", 3, None)
    for row in rows:
        log(json.dumps(row))
    assert "valid ppl inf" in capsys.readouterr().out
    summary = summarise(tmp_path / "train.jsonl")
    assert (summary["updates"], summary["epochs"], summary["valid_ppl"]) == (6, 2, None)
    json.dumps(summary, allow_nan=False)
    scores = '{"lm_ppl": {"score": Infinity, "sd": NaN}, "multi_bleu": {"score": 1e999}}'
    (tmp_path / "scores.json").write_text(scores)
    assert flat_metrics(read_scores(tmp_path / "scores.json")) == {
        "lm_ppl": None,
        "multi_bleu": None,
    }


# --- odd inputs -------------------------------------------------------------------------------------


def odd_input(parser, number, seed=SEED):
    return parser.make(random.Random(f"{seed} {parser.name} {number}"))


def fuzz(parser, cases, folder):
    """Try the valid input, then odd ones; the first that ends otherwise is an AssertionError."""
    assert (
        refusal(parser, parser.valid, folder, seconds=60.0) is None
    )  # imports what it needs, too
    for number in range(cases):
        data = odd_input(parser, number)
        try:
            said = refusal(parser, data, folder)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        else:
            if said is None or 0 < len(said.strip()) <= 2000:
                continue
        raise AssertionError(
            f"FUZZ_SEED={SEED}, case {number}: {said!r:.300} ({len(data)} bytes): {data[:300]!r}"
        )


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_nothing_but_user_errors_comes_out_in_time(name, folder):
    fuzz(PARSERS[name], CASES or PARSERS[name].cases, folder)


def spin():
    while time.process_time() > 0:
        pass


def refuse(words):
    raise UserError(words)


@pytest.mark.parametrize(
    "fault, problem",
    [
        (lambda: int("x"), "ValueError: invalid literal"),
        (lambda: exit(1), "SystemExit: 1"),
        (spin, "TooSlow"),
        (lambda: refuse(""), "case"),
        (lambda: refuse("x" * 3000), "xxx"),
    ],
)
def test_a_fault_is_found_and_named(folder, fault, problem):
    def parse(place):
        if b"!" in (place / "input").read_bytes():
            try:
                fault()
            except Exception as error:  # what a parser itself may swallow
                raise error

    parser = Parser("any", b"valid", lambda rng: rng.choice((b"fine", b"odd!")), parse)
    with pytest.raises(AssertionError, match=f"FUZZ_SEED=.*{problem}.*odd!"):
        fuzz(parser, 50, folder)
    with pytest.raises(AssertionError):  # one that refuses everything
        fuzz(parser._replace(parse=lambda place: refuse("no")), 1, folder)


def test_cases_are_different_and_repeatable():
    """A value is put into a tree that a further exchange may reach into: a shared one would hold itself."""
    values = repr(hostile_input.VALUES)
    for parser in PARSERS.values():
        cases = [odd_input(parser, number, 5) for number in range(200)]
        assert cases == [odd_input(parser, number, 5) for number in range(200)]
        assert len(set(cases)) > 130 and cases != [
            odd_input(parser, number, 6) for number in range(200)
        ]
    assert repr(hostile_input.VALUES) == values
