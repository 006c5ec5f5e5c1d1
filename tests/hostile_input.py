"""The parsers of files that others write: an input that each accepts, and how odd ones are made."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.learning_curve import read_learning_curve
from moa_fairseq.experiments.data.archives import extract
from moa_fairseq.experiments.data.text_stages import load_codes
from moa_fairseq.experiments.recipes import claim
from moa_fairseq.experiments.recipes.checkpoints import prepared_data
from moa_fairseq.experiments.recipes.headline import headline_of
from moa_fairseq.experiments.recipes.loading import build, load_recipe
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.recipes.scores import (
    describe,
    flat_metrics,
    read_report,
    read_scores,
)
from moa_fairseq.experiments.recipes.train_log import TrainLog, prune, summarise
from moa_fairseq.experiments.scoring.compare import render
from moa_fairseq.experiments.scoring.comparison import load_comparison
from moa_fairseq.experiments.scoring.generate_log import lines_of, read_generate_log
from moa_fairseq.experiments.study.design import (
    Study,
    System,
    fitting_records,
    runs_of,
)
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.experiments.study.losses import losses_of
from moa_fairseq.experiments.study.records import outputs_of
from moa_fairseq.text.steps import normalize_punctuation

LONG_INPUT = 60_000  # bytes; what a quadratic pattern shows itself with


class Parser(NamedTuple):
    """valid: an input to be accepted. make: an odd one. parse: reads the file `input` in an empty folder.

    cases: how many odd inputs the tests make, unless FUZZ_CASES says it. seconds_per_byte: processor time,
    beside two seconds.
    """

    name: str
    valid: bytes
    make: Callable[[random.Random], bytes]
    parse: Callable[[Path], None]
    cases: int = 1000
    seconds_per_byte: float = 4e-6


def mutated(rng: random.Random, data: bytes, fragments: Sequence[bytes]) -> bytes:
    """`data` with a few ranges cut, doubled, overwritten or filled with fragments; now and then at length."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        start = rng.randint(0, len(data))
        end = min(len(data), start + int(rng.expovariate(1 / 8)))
        noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        repeated = data[start:end] * rng.randint(2, 5)
        piece = rng.choice((b"", repeated, noise, rng.choice(fragments), rng.choice(fragments)))
        if rng.random() < 0.02:
            piece = rng.choice((*fragments, data[start:end] or b"x"))
            piece *= LONG_INPUT // len(piece)
        if rng.random() < 0.05:
            end = len(data)
        data = data[:start] + piece + data[end:]
    return data


NUMBERS = (
    b"1e999",
    b"-1e999",
    b"9" * 5000,
    b"NaN",
    b"Infinity",
    b"-1",
    b"0x",
    b"1_0",
    "²".encode(),
    b"true",
)
JSON_ODD = (
    *NUMBERS,
    b"null",
    b"[",
    b"[" * 5000,
    b'{"a":',
    b'{"epoch": ',
    b'"',
    b"\\ud800",
    b"\x00",
    b"\xff",
)
VALUES = (
    None,
    True,
    "",
    "x",
    [],
    {},
    -1,
    0,
    10**400,
    1e308,
    float("inf"),
    float("nan"),
    [1],
    {"a": 1},
)


def of_bytes(data: bytes, fragments: Sequence[bytes]) -> Callable[[random.Random], bytes]:
    """Inputs made of one valid input."""
    return lambda rng: mutated(rng, data, fragments)


def of_mapping(
    mapping: Any, dump: Callable[[Any], str], values: Sequence[Any], fragments: Sequence[bytes]
) -> Callable[[random.Random], bytes]:
    """Inputs made of a mapping: some values are exchanged; the text of a third of them is mutated, too."""

    def make(rng: random.Random) -> bytes:
        tree = json.loads(json.dumps(mapping))
        for _ in range(rng.randint(1, 3)):
            exchange(rng, tree, values)
        text = dump(tree).encode("utf-8")
        return mutated(rng, text, fragments) if rng.random() < 0.3 else text

    return make


def exchange(rng: random.Random, tree: Any, values: Sequence[Any]) -> None:
    """Put one of `values` somewhere into a tree of mappings and lists, or take something away."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = tree[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            tree = inner
        elif rng.random() < 0.2:
            del tree[key]
            return
        else:
            tree[key] = copy.deepcopy(rng.choice(values))
            return


# --- generation logs, the normaliser, codes ---------------------------------------------------------

GENERATION = (
    b"2024-05-01 10:00:00 | INFO | fairseq.tasks.translation | [en] dictionary: 480 types\n"
    b"S-0\tthe target\nT-0\tla cible\nH-0\t-0.5\tle but\nD-0\t-0.5\tle but\nP-0\t-0.1 -0.2\n"
    b"S-1\ta\nT-1\tb\nH-1\t-1.5\tc\nGenerate test with beam=5: BLEU4 = 0.00\n"
)
GENERATION_ODD = (
    *(
        b"| Generate ",
        b"Generate x",
        b" with beam=",
        b"with beam=5",
        b"[",
        b"[a] dictionary: 4",
        b"\t",
    ),
    *(b"\n", b"H-", b"T-0\t", b"H-0\t-1\tx\n", b"S-" + b"9" * 5000, b"\xff", "H-²\t".encode()),
)


def parse_generation(place: Path) -> None:
    for allow_partial in (False, True):
        read_generate_log(place / "input", allow_partial)


GERMAN = 'Er sagte: „Ja ...“ und „so“. Das ist 5 %, nº 3 ( gut ) ."Ende". '.encode()
GERMAN_ODD = (
    *(
        b".",
        b'."',
        b'.".',
        b'"',
        b" ",
        b"\t",
        b"<",
        b'.."<',
        b"'",
        b"''",
        b"``",
        b"(",
        b")",
        b" %",
        b"1",
    ),
    *(
        c.encode()
        for c in ("…", "\u00a0", "«\u00a0", "\u00a0»", "’", "‚", "„", "–", "1\u00a01", ",")
    ),
)


def parse_german(place: Path) -> None:
    text = (place / "input").read_bytes().decode("utf-8", "replace")
    for lang in ("de", "en", "fr", "cs"):
        normalize_punctuation(text, lang)


CODES = b"#version: 0.2\nt h\nth e</w>\na n\nan d</w>\n"
CODES_ODD = (
    b"#version: ",
    b"#version: x",
    b".0",
    b" ",
    b"\n",
    b"\r",
    b"a b c",
    b"\xff",
    b"\x00",
    *NUMBERS,
)


def parse_codes(place: Path) -> None:
    load_codes(str(place / "input")).segment("the and then thethe")


# --- archives ---------------------------------------------------------------------------------------

WANTED = "wanted/file"


def zip_of(content: bytes = b"text " * 40) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("other", b"x" * 100), (WANTED, content)):  # without today's date
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def tar_of(kind: bytes = tarfile.REGTYPE, form: int = tarfile.GNU_FORMAT, **pax: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=form) as archive:
        for name in ("other", "a" * 90, WANTED):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 300, dict(pax)
            info.type = kind if name == WANTED else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(b"z" * 300))
    return data.getvalue()


def tars(rng: random.Random) -> bytes:
    kind = rng.choice((b"0", b"S", b"1", b"2", b"6", b"7", b"x", b"g", b"L", b"K", b"Z"))
    records = {
        "GNU.sparse.size": "9" * rng.randint(1, 30),
        "GNU.sparse.map": "0,1,2,x",
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": WANTED,
        "size": rng.choice(("-1", "x", "1e999", "9" * 20, "9" * 5000)),
        "path": rng.choice((WANTED, "../evil", "\x00")),
    }
    chosen = {key: records[key] for key in rng.sample(sorted(records), rng.randint(0, 3))}
    form = (
        tarfile.PAX_FORMAT if chosen else rng.choice((tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
    )
    data = tar_of(kind, form if kind == b"0" or chosen else tarfile.GNU_FORMAT, **chosen)
    if rng.random() < 0.5:
        data = mutated(
            rng,
            data,
            (b"\x00" * 512, b"\xff" * 8, b"\x80" + b"\x00" * 11, b"77777777777", b"-1"),
        )
    if rng.random() < 0.5:
        data = with_checksums(data)
    return gzip.compress(data, 1, mtime=0) if rng.random() < 0.5 else data


def with_checksums(data: bytes) -> bytes:
    """A tar whose headers are damaged, but for their checksums."""
    blocks = [data[start : start + 512] for start in range(0, len(data), 512)]
    for number, block in enumerate(blocks):
        if len(block) == 512 and block[257:262] == b"ustar":
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            blocks[number] = block[:148] + b"%06o\x00 " % total + block[156:]
    return b"".join(blocks)


def zips(rng: random.Random) -> bytes:
    data = bytearray(zip_of(b"text " * rng.choice((1, 40, 4000))))
    central = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 4)
    local = data.find(b"PK\x03\x04", 4)
    for _ in range(rng.randint(0, 2)):
        # flags (encrypted, ...), method, sizes, lengths of name and extra field: in both headers alike
        field, width = rng.choice(((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)))
        value = rng.choice((1, 9, 12, 14, 93, 97, 0x0800, 0x0041, rng.randrange(1 << 16)))
        packed = struct.pack("<I", value)[:width]
        data[local + field : local + field + width] = packed
        data[central + field + 2 : central + field + 2 + width] = packed
    odd = (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"\xff" * 4, b"\x00" * 8)
    return mutated(rng, bytes(data), odd) if rng.random() < 0.6 else bytes(data)


def packed_tars(rng: random.Random) -> bytes:
    """.tar.xz: damaged as such, or well packed with a damaged tar inside."""
    if rng.random() < 0.3:
        return mutated(rng, lzma.compress(tar_of()), (b"\xfd7zXZ", b"\0" * 512))
    return lzma.compress(tars(rng), preset=0)


def archives(rng: random.Random) -> bytes:
    return zips(rng) if rng.random() < 0.5 else tars(rng)


def parse_archive(place: Path) -> None:
    data = (place / "input").read_bytes()
    name = "x.zip" if b"PK\x05\x06" in data else "x.tgz" if data[:2] == b"\x1f\x8b" else "x.tar"
    archive = (place / "input").rename(place / name)
    try:
        extract(archive, [WANTED], place / "out")
    finally:
        left = [
            path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()
        ]
        assert set(left) <= {name, f"out/{WANTED}"}, left


# --- recipes ----------------------------------------------------------------------------------------

RECIPE = {
    "experiment": "input",
    "summary": "a recipe",
    "reproduces": {"paper": "moa", "table": "1", "row": "a", "column": "BLEU", "value": 1.5},
    "data": {"recipe": "binarised", "source": "en", "target": "de", "flags": {"workers": 1}},
    "model": {"arch": "transformer", "flags": {"dropout": 0.1, "betas": ["0.9", "0.98"]}},
    "train": {
        "max_tokens": 400,
        "max_epoch": 3,
        "criterion": "cross_entropy",
        "flags": {"lr": 0.1},
    },
    "average": {"epochs": 2},
    "generate": {"subsets": ["test"], "beam": 2, "lenpen": 0.6},
    "score": {"headline": "multi_bleu"},
}
YAML_ODD = (
    *(
        b"2020-01-01",
        b"2020-99-99",
        b"!!set {a, b}",
        b"!!binary ////",
        b"!!python/name:os.system",
    ),
    *(
        b"!!bool x",
        b"!!int ''",
        b"!!timestamp x",
        b"&a [*a]",
        b"&a",
        b"*a",
        b"<<: ",
        b"? [a]\n: b\n",
    ),
    *(
        b"? {a: b}\n",
        b"- ",
        b"[",
        b"{",
        b"a: ",
        b"  ",
        b"\t",
        b"\n",
        b"|",
        b">",
        b"'",
        b'"',
        b"#",
    ),
    *(
        b"%YAML 9\n",
        b"---\n",
        b"none",
        b".inf",
        b".nan",
        b"1:60:60",
        b"base: input\n",
        b"\xff",
        b"\x07",
    ),
    *(b'base: "a\\0b"\n', *NUMBERS),
)
YAML_TEXTS = [part.decode("latin-1").strip() for part in YAML_ODD[:22]]
OVERRIDES = (
    "train.max_epoch",
    "data.recipe",
    "data.bpe",
    "average",
    "finetune",
    "reproduces",
    "train.seed",
)


def parse_recipe(place: Path) -> None:
    data = (place / "input").read_bytes()
    path = (place / "input").rename(place / "input.yaml")
    choice = sum(data)
    dataclasses.asdict(load_recipe(path))
    key = OVERRIDES[choice % len(OVERRIDES)]
    with contextlib.suppress(UserError):
        load_recipe(path, [f"{key}={YAML_TEXTS[choice % len(YAML_TEXTS)]}"])


def dump_yaml(tree: Any) -> str:
    return yaml.dump(
        tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False
    )


# --- studies ----------------------------------------------------------------------------------------

STUDY = {
    **{"study": "input", "question": "?", "seeds": 2, "margin": 0.01},
    "systems": {
        name: {"label": name, "recipe": "recipe.yaml", "set": {"train.seed": 1}}
        for name in "AB"
    },
    "contrasts": {"gain": {"first": "B", "second": "A", "question": "?"}},
    "tuning": {"grid": {"train.flags.lr": [1, 2]}, "seeds": 1},
}
RECORD = {
    **{
        "study": "record",
        "system": "A",
        "seed": 1,
        "end": "finished",
        "tokens_per_second": 9.5,
    },
    "parameters": 9,
    **{"curve": [{"updates": 2, "valid": 5.5, "train": 6.0}], "settings": {"stage": "train"}},
}


def parse_study(place: Path) -> None:
    study = load_study((place / "input").rename(place / "input.yaml"), place, tune=True)
    for run in runs_of(study, place, place):
        assert run.records.parent == place


def dump_records(tree: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in tree)


def parse_records(place: Path, name: str = "records.jsonl") -> None:
    """A record of other settings is left out."""
    study = build(Study, {**STUDY, "study": "record", "tuning": None}, "fuzz")
    study = dataclasses.replace(study, systems={"A": System("a", "input.yaml")})
    (place / "input.yaml").write_text(dump_yaml(RECIPE))
    runs = runs_of(study, place, place)[:1]
    runs[0].records.mkdir()
    (place / "input").rename(runs[0].records / name)
    losses_of(study, runs, fitting_records(study, runs))


def parse_single_record(place: Path) -> None:
    parse_records(place, "A-seed1.json")


def parse_translations(place: Path) -> None:
    """The archive of a study's outputs, one of which is scored."""
    (place / "input").rename(place / "outputs.tar.xz")
    for text in outputs_of(place).values():
        lines_of(text, "outputs.tar.xz")


# --- what a run leaves ------------------------------------------------------------------------------

LOG = [
    {"epoch": 1, "update": 0.5, "loss": "9.0", "wps": "100", "wall": "3", "num_updates": "2"},
    {
        "epoch": 1,
        "train_loss": "8",
        "train_wps": "100",
        "train_num_updates": "4",
        "train_wpb": "250",
    },
    {"epoch": 1, "valid_loss": "7", "valid_ppl": "128", "valid_num_updates": "4"},
]
LINES = b"num. shared model params: 1,234 (num. trained: 1,234)\nLoaded checkpoint x (epoch 1 @ 2 updates)\n"
LOG_ODD = (
    *(
        b"num. shared model params: ",
        b"Loaded checkpoint ",
        b" (epoch 1 @ 2 updates)",
        b"1,",
        b"9" * 5000,
    ),
    *(
        b" of ",
        b"1 of 2 parameters are updated",
        b"| {",
        b'"epoch": ',
        b'"num_updates": ',
        b"\n",
        *JSON_ODD,
    ),
)


def dump_log(tree: Any) -> str:
    return LINES.decode() + "".join(json.dumps(record) + "\n" for record in tree)


def parse_log(place: Path) -> None:
    path = place / "input"
    log = TrainLog(place / "train.jsonl", 3, 10)
    with contextlib.redirect_stdout(io.StringIO()):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            log(line)
    json.dumps(summarise(place / "train.jsonl"), allow_nan=False)
    summary = summarise(path)
    prune(path, summary["updates"] // 2)


PERPLEXITY = b"""INFO:fairseq_cli.eval_lm:Evaluated 245,569 tokens in 12.5s (19645.5 tokens/s)
INFO:fairseq_cli.eval_lm:Loss (base 2): 4.2258, Perplexity: 18.71
"""
PERPLEXITY_ODD = (
    *(
        b"Loss (base 2): ",
        b", Perplexity: ",
        b"Evaluated ",
        b" tokens",
        b".",
        b",",
        b"1.2.3",
        b"inf",
        b"nan",
    ),
    *(b"\n", *NUMBERS),
)


def parse_perplexity(place: Path) -> None:
    text = (place / "input").read_text(encoding="utf-8", errors="replace")
    scores = read_report(text, place / "input", build(Recipe, RECIPE, "fuzz", ""))
    json.dumps(flat_metrics(scores), allow_nan=False)


SCORES = {
    "multi_bleu": {"score": 12.5, "line": "BLEU"},
    "moa_release_bleu": {"score": 13.5, "sd": 0.1},
    "sacrebleu": {"score": 12.0, "signature": "nrefs:1"},
    "meta": {"evaluation": {"tokens": 5}, "warnings": [], "hyphens": {"references": "split"}},
}
STATE = {
    "prepare": {
        "inputs": {},
        "facts": {"folder": "/", "sentences": {"test": 3}, "fingerprint": "f"},
    },
    "train": {
        **{
            "inputs": {"data": "f", "model": {}, "train": {}},
            "goal": {"max_epoch": 3},
            "files": {},
        },
        **{"fingerprint": "t", "facts": {"parameters": 5}},
    },
    "average": {
        "fingerprint": "a",
        "inputs": {"train": ["t"], "count": 2},
        "files": {},
        "facts": None,
    },
    "generate-test": {
        "fingerprint": "g",
        "inputs": {"made": ["a"], "settings": {"beam": 2}},
        "files": {},
    },
}


def parse_state(place: Path) -> None:
    """Damaged, it proves nothing; what can be trusted of it is used."""
    (place / "input").rename(place / "state.json")
    recipe = build(Recipe, RECIPE, "fuzz", "")
    claim.differences(recipe, claim.finished_settings(place, recipe), {})
    prepared_data(place)


def parse_scores(place: Path) -> None:
    scores = read_scores(place / "input")
    json.dumps(flat_metrics(scores), allow_nan=False)
    recipe = build(Recipe, RECIPE, "fuzz", "")
    describe(headline_of(recipe, recipe, scores), {"test": scores}, 1.0)


RESULT: dict[str, Any] = {
    "experiment": "a_moa",
    "reproduces": {"paper": "p", "table": "1", "row": "Ours"},
    "metrics": {"multi_bleu": 20.5, "valid_ppl": 7.0, "sacrebleu_signature": "nrefs:1"},
    "status": "running",
    **{"subset": "test", "updates": 9, "epochs": 3, "checkpoints_averaged": 2, "seed": 1},
    **{
        "parameters": 12345,
        "generation": {"beam": 2},
        "evaluation": {"tokens": 5},
        "hardware": "CPU",
    },
    **{"date": "2026-01-01", "commit": "0123456789-dirty", "train_seconds": 90.5},
}
PAPER = {
    **{"paper": "p", "title": "A Paper", "citation": "Somebody"},
    "tables": [
        {
            **{
                "table": "1",
                "caption": "Scores",
                "columns": {"BLEU": {"metric": "multi_bleu"}},
            },
            "rows": [{"row": "Ours", "experiments": ["a_moa"], "values": {"BLEU": 20.0}}],
        }
    ],
}


def parse_result(place: Path) -> None:
    (place / "papers").mkdir()
    (place / "papers" / "p.json").write_text(json.dumps(PAPER))
    render(load_comparison(place, [place / "input"]))


def of_json(name: str, mapping: Any, parse: Callable[[Path], None]) -> Parser:
    make = of_mapping(mapping, json.dumps, VALUES, JSON_ODD)
    return Parser(name, json.dumps(mapping).encode(), make, parse)


def parse_curve(place: Path) -> None:
    read_learning_curve(place / "input")


LOG_BYTES = dump_log(LOG).encode()
LOGS = of_mapping(LOG, dump_log, VALUES, LOG_ODD)
PARSERS = {
    parser.name: parser
    for parser in (
        Parser(
            "generation-log", GENERATION, of_bytes(GENERATION, GENERATION_ODD), parse_generation
        ),
        Parser("german", GERMAN, of_bytes(GERMAN, GERMAN_ODD), parse_german),
        Parser("bpe-codes", CODES, of_bytes(CODES, CODES_ODD), parse_codes),
        Parser("archives", tar_of(), archives, parse_archive),
        Parser(
            *("recipe-yaml", dump_yaml(RECIPE).encode()),
            of_mapping(RECIPE, dump_yaml, (*VALUES, *YAML_TEXTS), YAML_ODD),
            *(parse_recipe, 400, 1e-4),
        ),
        Parser(
            *("study-yaml", dump_yaml(STUDY).encode()),
            of_mapping(STUDY, dump_yaml, (*VALUES, *YAML_TEXTS), YAML_ODD),
            *(parse_study, 400, 1e-4),
        ),
        of_json("record", RECORD, parse_single_record),
        Parser(
            *("records", dump_records([RECORD, RECORD]).encode()),
            of_mapping([RECORD, RECORD], dump_records, VALUES, JSON_ODD),
            parse_records,
        ),
        Parser("translations", lzma.compress(tar_of()), packed_tars, parse_translations),
        Parser("train-log", LOG_BYTES, LOGS, parse_log),
        Parser("learning-curve", LOG_BYTES, LOGS, parse_curve),
        Parser(
            "perplexity", PERPLEXITY, of_bytes(PERPLEXITY, PERPLEXITY_ODD), parse_perplexity
        ),
        of_json("state", STATE, parse_state)._replace(cases=600),
        of_json("scores", SCORES, parse_scores),
        of_json("result", RESULT, parse_result),
    )
}
