"""From a data folder to a binarised one: tokenise → BPE → fairseq-preprocess, each kept once it is whole."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from moa_fairseq.data_prep.binarised import check_binarised, is_binarised, preprocess_flags
from moa_fairseq.data_prep.parallel_text import SplitFiles, find_splits
from moa_fairseq.data_prep.stage_folder import build_folder, digest_files, fingerprint_of
from moa_fairseq.data_prep.text_sources import TEXT_SOURCES
from moa_fairseq.data_prep.text_stages import TextSteps, learn_codes, segment_files, tokenise_splits
from moa_fairseq.errors import UserError

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TextSource:
    """What one data recipe knows about its raw files.

    stems: split → file name without language. moses: edition of Moses' scripts, "" when the text is
    tokenised already. bring: what --data must hold, for error messages.
    """

    stems: Mapping[str, str]
    moses: str
    bring: str


_PLAIN_STEMS = {"train": "train", "valid": "valid", "test": "test", "test1": "test1", "test2": "test2"}

SOURCES: Dict[str, TextSource] = {
    "multi30k": TextSource(
        {
            "train": "train",
            "valid": "val",
            "test": "test_2016_flickr",
            "test1": "test_2017_flickr",
            "test2": "test_2017_mscoco",
        },
        # Multi30k's published token files were made with the Moses scripts of 2016; BLEU depends on it.
        "2016",
        "Give --data the folder data/task1/raw of the GitHub repository multi30k/dataset: raw text in "
        "train, val and test_2016_flickr .{source} and .{target}, plain or .gz.",
    ),
    "embedded": TextSource(
        _PLAIN_STEMS,
        "current",
        "Give --data a folder with train, valid and test .{source} and .{target}, or leave --data away: "
        "`moa-fairseq corpus` then builds the embedded corpus.",
    ),
    "parallel": TextSource(
        _PLAIN_STEMS,
        "",
        "Give --data a folder with train, valid and test .{source} and .{target} (plain or .gz): tokenised "
        "text, one sentence per line, before BPE. Segmented already? Add --set data.bpe=none. A folder "
        "made by fairseq-preprocess is used as it is.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A binarised folder: its path, sentences per subset, and a fingerprint of what it was made from."""

    folder: Path
    sentences: Dict[str, int]
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One data section of a recipe, ready to be carried out.

    settings: the recipe's `data` section as a mapping. subsets: those that training and generation
    need. source: the --data folder. root: where the stages are kept. preprocess: runs
    fairseq-preprocess with the given flags and raises when it fails.
    """

    settings: Mapping[str, Any]
    subsets: Sequence[str]
    source: Path
    root: Path
    preprocess: Callable[[Mapping[str, Any]], None]
    say: Say = print

    @property
    def languages(self) -> Tuple[str, str]:
        """(source, target)."""
        return self.settings["source"], self.settings["target"]

    def run(self) -> Prepared:
        """Carry out every stage that is not done yet. Raises UserError for unusable data."""
        if self.settings["recipe"] == "binarised" or is_binarised(self.source):
            return self._use_binarised()
        origin = SOURCES[self.settings["recipe"]]
        bring = origin.bring.format(**self.settings)
        splits = find_splits(self.source, dict(origin.stems), self.languages, self.subsets, bring)
        tokens, tokens_mark = self._tokenise(splits, origin)
        text, text_mark = self._segment(tokens, tokens_mark, list(splits))
        return self._binarise(text, text_mark, list(splits))

    def _tokenise(self, splits: Dict[str, SplitFiles], origin: TextSource) -> Tuple[Path, str]:
        steps = TextSteps(self.settings["lowercase"], origin.moses)
        files = [path for pair in splits.values() for path in pair]
        mark = fingerprint_of(
            "tokens", 1, steps, self.languages, digest_files(files, self.root / "inputs.json")
        )
        folder = self.root / "tokens"
        build_folder(
            folder, mark, lambda new: tokenise_splits(splits, self.languages, steps, new, self.say), self.say
        )
        return folder, mark

    def _segment(self, tokens: Path, tokens_mark: str, splits: List[str]) -> Tuple[Path, str]:
        merges = self.settings["bpe"]
        if merges is None:
            return tokens, tokens_mark
        mark = fingerprint_of("bpe", 1, merges, tokens_mark)
        files = [f"{split}.{language}" for split in splits for language in self.languages]

        def build(new: Path) -> Dict[str, int]:
            self.say(f"learning {merges:,} joint BPE merges")
            learn_codes([tokens / f"train.{language}" for language in self.languages], merges, new / "codes")
            segment_files({tokens / name: new / name for name in files}, new / "codes")
            return {"merges": merges}

        build_folder(self.root / "bpe", mark, build, self.say)
        return self.root / "bpe", mark

    def _binarise(self, text: Path, text_mark: str, splits: List[str]) -> Prepared:
        joined, extra = self.settings["joined_dictionary"], self.settings["flags"]
        mark = fingerprint_of("binarised", 1, joined, extra, text_mark)

        def build(new: Path) -> Dict[str, int]:
            self.preprocess(preprocess_flags(text, new, splits, self.languages, joined, workers(), extra))
            return check_binarised(new, self.languages, splits, joined)

        sentences = build_folder(self.root / "binarised", mark, build, self.say)
        return Prepared(self.root / "binarised", sentences, mark)

    def _use_binarised(self) -> Prepared:
        self.say(f"{self.source}: binarised already; used as it is")
        sentences = check_binarised(
            self.source, self.languages, self.subsets, self.settings["joined_dictionary"]
        )
        return Prepared(self.source, sentences, given_fingerprint(self.source))


def given_fingerprint(folder: Path) -> str:
    """A fingerprint of a folder that fairseq-preprocess made elsewhere.

    File sizes tell apart two preparations; reading gigabytes to be sure is not worth the wait.
    """
    sizes = {
        path.name: path.stat().st_size
        for path in sorted(folder.glob("*.*"))
        if path.is_file() and path.suffix in (".bin", ".idx", ".txt")
    }
    return fingerprint_of("given", sizes)


def prepared_folder(settings: Mapping[str, Any], source: Optional[Path], parent: Path) -> Path:
    """Where the stages of a data section are kept: another folder for other settings or another source."""
    place = str(source.resolve()) if source else ""
    name = "_".join(settings[key] for key in ("recipe", "source", "target") if settings[key])
    return parent / f"{name}-{fingerprint_of(dict(settings), place)[:8]}"


def require_source(settings: Mapping[str, Any], source: Optional[Path]) -> Path:
    """The --data folder, or a UserError that says what to bring."""
    if source is not None:
        return source
    recipe = settings["recipe"]
    known = {**SOURCES, **TEXT_SOURCES}
    bring = (
        known[recipe].bring.format(**settings) if recipe in known else "Give --data the folder made by it."
    )
    raise UserError(f"--data is missing: data recipe {recipe!r} starts from your files. {bring}")


def workers() -> int:
    """Processes for fairseq-preprocess."""
    return min(8, os.cpu_count() or 1)
