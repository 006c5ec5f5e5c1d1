"""Miniature archives with the real layout and names, and tables that know them instead of the real ones."""

import gzip
import hashlib
import io
import json
import pickle
import random
import tarfile
import types
import zipfile

import pytest

from moa_fairseq.experiments.data import catalogue, command, language_model_steps
from moa_fairseq.experiments.data.catalogue import TRANSLATION, datasets
from moa_fairseq.experiments.data.prepare import Preparation

_TABLE = pickle.dumps(catalogue._table())
_ENGLISH = "the a dog house street evening runs sees “quick” old-fashioned it's well, (green) Mr. 3.5 %"
_GERMAN = "der ein Hund Haus Straße Abend läuft sieht „schnell“ alt-modisch z.B. gut, (grün) Dr. 3,5 %"
_FRENCH = "le un chien maison rue soir court voit « vite » vieux-jeu l'an bien, (vert) M. 3,5 %"
WORDS = {
    lang: row.split() for lang, row in (("en", _ENGLISH), ("de", _GERMAN), ("fr", _FRENCH))
}


def sentences(count, language, seed=1):
    """Made-up raw sentences; the same seed gives the same lengths in every language."""
    generator = random.Random(seed)
    lengths = [generator.randint(3, 9) for _ in range(count)]
    generator = random.Random(f"{seed}{language}")
    return [" ".join(generator.choices(WORDS[language], k=length)) + "." for length in lengths]


def text(lines):
    return "".join(line + "\n" for line in lines)


def sgm(lines, language, kind="srcset"):
    body = "".join(
        f'<seg id="{number}">{line}</seg>\n' for number, line in enumerate(lines, start=1)
    )
    head = f'<{kind} setid="x" srclang="any">\n<doc sysid="ref" docid="d" origlang="en">\n<p>\n'
    return f"{head}{body}</p>\n</doc>\n</{kind}>\n"


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:gz") as archive:
        for name, content in members.items():
            content = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_zip(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def pair(pattern, count, languages, seed=1):
    return {pattern.format(lang=lang): text(sentences(count, lang, seed)) for lang in languages}


def wmt(folder, languages, *archives):
    """Training archives (name, members, pairs, seed), and the test sets of both pairs."""
    for name, pattern, count, seed in archives:
        write_tar(
            folder / f"training-parallel-{name}.tgz", pair(pattern, count, languages, seed)
        )
    members = {}
    for pair_name, both in (("deen", ("de", "en")), ("fren", ("fr", "en"))):
        for lang in both:
            lines = [
                *sentences(4, lang, 5),
                "It’s “here”." if lang == "en" else "C’est « ici ».",
            ]
            for side in ("src", "ref"):
                members[f"test-full/newstest2014-{pair_name}-{side}.{lang}.sgm"] = sgm(
                    lines, lang
                )
    write_tar(folder / "test-full.tgz", members)


def wmt_de(folder):
    europarl = ("europarl-v7", "training/europarl-v7.de-en.{lang}", 60, 1)
    news = ("nc-v12", "training/news-commentary-v12.de-en.{lang}", 30, 3)
    wmt(folder, ("en", "de"), europarl, news)
    crawl = pair("commoncrawl.de-en.{lang}", 20, ("en", "de"), 2)
    crawl["commoncrawl.de-en.en"] += "one side only\n" + "much " * 81 + "\nshort\n"
    long = "und so weiter und so fort bis es zehn Wörter sind"
    crawl["commoncrawl.de-en.de"] += "\n" + "viel " * 81 + f"\n{long}\n"
    write_tar(folder / "training-parallel-commoncrawl.tgz", {"training/readme": "x", **crawl})
    sides = {
        "src.en": sgm(sentences(5, "en", 4), "en"),
        "ref.de": sgm(sentences(5, "de", 4), "de", "refset"),
    }
    write_tar(
        folder / "dev.tgz",
        {f"dev/newstest2013-{side}.sgm": text for side, text in sides.items()},
    )


def wmt_fr(folder):
    wmt(
        *(folder, ("en", "fr")),
        ("europarl-v7", "training/europarl-v7.fr-en.{lang}", 700, 1),
        ("commoncrawl", "commoncrawl.fr-en.{lang}", 650, 2),
        ("un", "un/undoc.2000.fr-en.{lang}", 20, 3),
        ("nc-v9", "training/news-commentary-v9.fr-en.{lang}", 20, 4),
    )
    giga = pair("giga-fren.release2.fixed.{lang}.gz", 30, ("en", "fr"), 6)
    packed = {name: gzip.compress(content.encode(), mtime=0) for name, content in giga.items()}
    write_tar(folder / "training-giga-fren.tar", packed)


def vaswani(folder):
    members = {"vocab.bpe.32000": "the\n", "bpe.32000": "#version: 0.2\n"}
    for name, count in (
        ("train.tok.clean", 40),
        ("newstest2013.tok", 4),
        ("newstest2014.tok", 5),
    ):
        lines = {
            lang: [line.replace("e", "e@@ ") for line in sentences(count, lang, count)]
            for lang in ("en", "de")
        }
        members.update({f"{name}.bpe.32000.{lang}": text(rows) for lang, rows in lines.items()})
    write_tar(folder / "wmt16_en_de.tar.gz", members)


def iwslt(folder):
    members = {"de-en/README": "WIT3"}
    parts = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    for lang in ("de", "en"):
        head = [
            "<url>http://www.ted.com/talks/x</url>",
            "<keywords>talks</keywords>",
            "<speaker>A B</speaker>",
        ]
        head += ["<talkid>1</talkid>", f"<title>{WORDS[lang][1]} title</title>"]
        head += [f"<description>{WORDS[lang][0]} text.</description>"]
        members[f"de-en/train.tags.de-en.{lang}"] = text(
            [*head, *(" " + s for s in sentences(60, lang, 7))]
        )
        for number, part in enumerate(parts):
            lines = [f" {line} " for line in sentences(2 + number, lang, 8 + number)]
            members[f"de-en/IWSLT14.{part}.de-en.{lang}.xml"] = '<?xml version="1.0"?>\n' + sgm(
                lines, lang
            )
    write_tar(folder / "de-en.tgz", members)


def multi30k(folder):
    folder.mkdir(parents=True, exist_ok=True)
    counts = {
        "train": 60,
        "val": 5,
        "test_2016_flickr": 6,
        "test_2017_flickr": 4,
        "test_2017_mscoco": 3,
    }
    for seed, (name, count) in enumerate(counts.items()):
        for file, data in pair(f"{name}.{{lang}}.gz", count, ("en", "de", "fr"), seed).items():
            (folder / file).write_bytes(gzip.compress(data.encode(), mtime=0))


def wikitext(folder):
    def split(seed, count):
        return "".join(
            f" {line.replace('street', '<unk>')} \n \n" for line in sentences(count, "en", seed)
        )

    for stem, ending in (("103", "tokens"), ("103-raw", "raw"), ("2-raw", "raw")):
        write_zip(
            folder / f"wikitext-{stem}-v1.zip",
            {
                f"wikitext-{stem}/wiki.{name}.{ending}": split(seed, count)
                for seed, (name, count) in enumerate((("train", 80), ("valid", 6), ("test", 7)))
            },
        )


def enwik8(folder):
    data = text(sentences(90, "fr", 9)).encode()[:2000]
    write_zip(folder / "enwik8.zip", {"enwik8": data})


def documents(path, rows):
    """A file of JSON lines, packed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def hub(train, valid, count):
    """The maker of the first files of a set, as the hub names them."""

    def make(folder):
        for number in range(count):
            rows = [
                {"text": "\n".join(sentences(4, "en", seed)), "url": "x"}
                for seed in range(9 * number, 9 * number + 9)
            ]
            documents(folder / train.format(number), rows)
        documents(folder / valid, rows)

    return make


MINIATURES = {
    "c4": hub("c4-train.{:05d}-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz", 4),
    "pes2o": hub("train-{:05d}-of-00020.json.gz", "validation-00000-of-00002.json.gz", 4),
    "wmt14_en_de": wmt_de,
    "wmt14_en_de_vaswani": vaswani,
    "wmt14_en_fr": wmt_fr,
    "iwslt14_de_en": iwslt,
    "multi30k": multi30k,
    "wikitext103_word": wikitext,
    "wikitext103_sp8k": wikitext,
    "wikitext2_sp4k": wikitext,
    "wikitext103_raw": wikitext,
    "wikitext103_gpt2bpe": wikitext,
    "enwik8": enwik8,
}


@pytest.fixture
def miniature(tmp_path):
    """miniature(name) → a folder with the archives of a data set, small."""

    def make(name):
        folder = tmp_path / "archives" / name
        MINIATURES[name](folder)
        return folder

    return make


@pytest.fixture
def made():
    """The functions that make archives and look at folders."""
    return types.SimpleNamespace(
        sentences=sentences,
        text=text,
        sgm=sgm,
        write_tar=write_tar,
        write_zip=write_zip,
        documents=documents,
        tree=tree,
    )


@pytest.fixture
def tables(monkeypatch):
    """tables(urls=None, pins=None): let the tables expect miniatures, served at `urls + file name`."""
    caches = (catalogue.public_files, catalogue.datasets)

    def change(urls="http://127.0.0.1:9/", pins=None):
        changed = pickle.loads(_TABLE)
        for name in changed["files"]:
            base = name.rpartition("/")[2]
            numbered = {
                key: value for key, value in changed["files"][name].items() if key == "shards"
            }
            changed["files"][name] = {
                "urls": [urls + base],
                **numbered,
                **(pins or {}).get(base, {}),
            }
        lm = changed["language_modeling"]
        lm["enwik8"]["byte_splits"] = {"train": 1800, "valid": 100, "test": 100}
        changed["classification"]["listops"]["generated"]["sizes"] = {
            "train": 100,
            "valid": 10,
            "test": 20,
        }
        for name in ("wikitext103_sp8k", "wikitext2_sp4k", "c4", "pes2o"):
            lm[name]["pieces"] = 60
        for name in ("c4", "pes2o"):
            lm[name].update(tokens={"train": 1500, "valid": 300}, learn_on=2)
        monkeypatch.setattr(catalogue, "_table", lambda: changed)
        for cache in caches:
            cache.cache_clear()

    yield change
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def prepare(tables, preprocess, toy_gpt2, tmp_path, said, monkeypatch):
    """prepare(name, source, ...) → (Prepared, output folder): in this process, offline, from small tables."""
    tables()
    monkeypatch.setattr(
        language_model_steps, "obtain_gpt2_files", lambda folders, offline: toy_gpt2
    )

    def run(
        name, at_hand, out="out", subsets=("train", "valid", "test"), workers=1, **settings
    ):
        said.clear()
        row = datasets()[name]
        values = {"recipe": name, "flags": {}}
        if row.kind == TRANSLATION:
            languages = dict(zip(("source", "target"), row.languages or ("en", "de")))
            bpe = 20 if row.merges or not row.downloadable else None
            joined = row.joined_dictionary
            values.update(
                languages, bpe=bpe, joined_dictionary=joined, lowercase=False, tokenize=False
            )
        folders = (at_hand, tmp_path / out, preprocess, tmp_path / out / "downloads")
        job = Preparation(
            {**values, **settings}, subsets, *folders, offline=True, workers=workers
        )
        return job.run(), tmp_path / out

    return run


@pytest.fixture
def own_text(tmp_path):
    """A folder with train, valid and test of two languages: text of one's own."""
    folder = tmp_path / "own"
    folder.mkdir()
    for split, count in (("train", 30), ("valid", 5), ("test", 4)):
        for language in ("en", "de"):
            (folder / f"{split}.{language}").write_text(
                text(sentences(count, language)), "utf-8"
            )
    return folder


@pytest.fixture
def in_process(monkeypatch, preprocess):
    """fairseq-preprocess without a process of its own."""
    monkeypatch.setattr(command, "Executor", lambda: preprocess)


def tree(folder):
    """name → sha256 of everything that a preparation leaves, but locks, logs and notes on time stamps."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name
        not in (".lock", "files.json", "checked.json", "state.json", "commands.sh")
        and path.suffix != ".log"
    }
