"""From a folder of running text to a binarised one for language models: GPT-2 BPE → fairseq-preprocess."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from moa_fairseq.data_prep.binarised import check_place, check_stem
from moa_fairseq.data_prep.catalogue import language_modeling_sets
from moa_fairseq.data_prep.gpt2_files import (
    DICTIONARY,
    ENCODER,
    NUMERIC_ORDER,
    ROBERTA_ORDER,
    VOCAB,
    Gpt2Files,
    obtain_gpt2_files,
)
from moa_fairseq.data_prep.obtain import Store
from moa_fairseq.data_prep.prepare import Prepared, Say, given_fingerprint, workers
from moa_fairseq.data_prep.stage_folder import build_folder, digest_files, fingerprint_of
from moa_fairseq.data_prep.terms import before_download
from moa_fairseq.data_prep.text_sources import TEXT_SOURCES, find_text, has_text
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

MANIFEST = "manifest.json"
OTHER_DICTIONARY = "data.flags.srcdict"
# What manifest.json calls a dictionary, in words.
DICTIONARIES = {
    ROBERTA_ORDER: "RoBERTa's",
    NUMERIC_ORDER: "RoBERTa's entries in the order of their ids, as RoBERTa's own was not at hand",
    OTHER_DICTIONARY: "as data.flags.srcdict says (null: of the training text)",
}


@dataclasses.dataclass(frozen=True)
class TextPreparation:
    """One data section of a recipe for language models, ready to be carried out.

    settings: the `data` section as a mapping (recipe, flags). subsets: those that training and scoring
    need. source: a folder or .zip with the text, a folder with its archive, a folder that fairseq-preprocess
    made, or None for a text that is downloaded. root: where the stages are kept; `root`/binarised is the
    result. preprocess: runs fairseq-preprocess with the given flags and raises when it fails. gpt2_files:
    brings the encoding's files, given folders to look into. downloads: where public files are kept (None:
    the text must lie in `source`).
    """

    settings: Mapping[str, Any]
    subsets: Sequence[str]
    source: Optional[Path]
    root: Path
    preprocess: Callable[[Mapping[str, Any]], None]
    say: Say = print
    gpt2_files: Optional[Callable[[Sequence[Path], Say], Gpt2Files]] = None
    downloads: Optional[Path] = None
    offline: bool = False
    workers: int = dataclasses.field(default_factory=workers)

    def run(self) -> Prepared:
        """Carry out every stage that is not done yet. Raises UserError for unusable data."""
        check_place(self.root)
        recipe = self.settings["recipe"]
        if self.source and (recipe not in TEXT_SOURCES or is_binarised_text(self.source)):
            check_place(self.source)
            self.say(f"{self.source}: binarised already; used as it is")
            lines = check_binarised_text(self.source, self.subsets)
            return Prepared(self.source, lines, given_fingerprint(self.source))
        texts, terms = self._texts(recipe)
        folders = [self.source] if self.source else []
        if self.gpt2_files:
            files = self.gpt2_files(folders, self.say)
        else:
            files = obtain_gpt2_files(folders, self.say, offline=self.offline)
        facts, mark = self._encode(texts, files)
        return self._binarise({**terms, **facts}, mark)

    def _texts(self, recipe: str) -> Tuple[Dict[str, Path], Dict[str, Any]]:
        """The text file of each split, out of `source` or as a download, and its terms of use and origin."""
        name = TEXT_SOURCES[recipe].dataset
        dataset = language_modeling_sets()[name] if name else None
        terms = {"licence": dataset.licence if dataset else ""}
        if dataset is None or self.downloads is None or (self.source and has_text(self.source, recipe)):
            return find_text(self.source, recipe, self.subsets, self.root / "text", self.say), terms
        store = Store(self.source, self.downloads, self.offline, self.say)
        announce = functools.partial(before_download, dataset, self.root, self.downloads, self.say)
        pieces = store.pieces(dataset.parts(), before=announce)
        return {split: piece.path for split, piece in zip(dataset.splits, pieces)}, {
            **terms,
            "sources": store.origins,
        }

    def _encode(self, texts: Dict[str, Path], files: Gpt2Files) -> tuple:
        """Stage `bpe`: the ids of every split, and the three files that explain them."""
        pinned = {
            "dictionary": digest_files([files.dictionary], self.root / "dictionary.json"),
            "order": files.order,
        }
        digests = digest_files(list(texts.values()), self.root / "inputs.json")
        mark = fingerprint_of("gpt2-bpe", 1, digests, pinned)

        def build(new: Path) -> Dict[str, Any]:
            # Imported late: a second run that has nothing to do should not wait for it.
            from moa_fairseq.data_prep.gpt2_bpe import encode_file

            splits = {}
            for split, text in texts.items():
                splits[split] = {
                    "file": text.name,
                    **encode_file(text, new / split, self.root / f"parts-{mark}", files, self.workers),
                }
                self.say(self._describe(split, splits[split]))
            for path, name in (
                (files.encoder, ENCODER),
                (files.vocab, VOCAB),
                (files.dictionary, DICTIONARY),
            ):
                shutil.copyfile(path, new / name)
            shutil.rmtree(self.root / f"parts-{mark}", ignore_errors=True)
            return {"dictionary": files.order, "splits": splits}

        return build_folder(self.root / "bpe", mark, build, self.say), mark

    def _describe(self, split: str, facts: Mapping[str, Any]) -> str:
        """One line of counts, with a warning where they are not those of the published text."""
        words = facts["words"] + facts["lines"]
        text = (
            f"{split} ({facts['file']}): {facts['lines']:,} lines, {words:,} words with one end of line "
            f"each, {facts['subwords']:,} subwords; <unk> {facts['unk']:,} times, "
            f"@-@ {facts['hyphen']:,} times"
        )
        expected = TEXT_SOURCES[self.settings["recipe"]].words.get(split)
        return text + (
            f"; WARNING: {expected:,} words were expected" if expected not in (None, words) else ""
        )

    def _binarise(self, facts: Mapping[str, Any], mark: str) -> Prepared:
        """Stage `binarised`: what fairseq trains on, the encoding's files and manifest.json beside it."""
        bpe, extra = self.root / "bpe", self.settings["flags"]
        dictionary = OTHER_DICTIONARY if "srcdict" in extra else facts["dictionary"]
        mark = fingerprint_of("binarised-text", 1, extra, mark)

        def build(new: Path) -> Dict[str, int]:
            flags = text_preprocess_flags(bpe, new, list(facts["splits"]), extra, self.workers)
            self.preprocess(flags)
            for name in (ENCODER, VOCAB):
                shutil.copyfile(bpe / name, new / name)
            with atomic_write(new / MANIFEST) as stream:
                recipe = self.settings["recipe"]
                json.dump({"recipe": recipe, **facts, "dictionary": dictionary}, stream, indent=1)
                stream.write("\n")
            return check_binarised_text(new, list(facts["splits"]))

        lines = build_folder(self.root / "binarised", mark, build, self.say)
        self.say(f"dictionary: {DICTIONARIES[dictionary]}")
        return Prepared(self.root / "binarised", lines, mark)


def text_preprocess_flags(
    bpe: Path, destination: Path, splits: Sequence[str], extra: Mapping[str, Any], processes: int = 0
) -> Dict[str, Any]:
    """The flags of fairseq-preprocess, by name, for the files of the stage `bpe`."""
    return {
        "only-source": True,
        "srcdict": str(bpe / DICTIONARY),
        **{f"{split}pref": str(bpe / split) for split in splits},
        "workers": processes or workers(),
        **extra,
        "destdir": str(destination),
    }


def is_binarised_text(folder: Path) -> bool:
    """True for a folder that fairseq-preprocess --only-source wrote to, whole or not."""
    return folder.is_dir() and (folder / DICTIONARY).is_file() and any(folder.glob("*.idx"))


def check_binarised_text(folder: Path, subsets: Sequence[str]) -> Dict[str, int]:
    """Check dict.txt and the .bin/.idx pair of each subset. Returns subset → number of lines.

    Raises UserError naming the file that is missing, empty or cut off.
    """
    if not (folder / DICTIONARY).is_file():
        raise UserError(
            f"{folder} is no binarised text: it has no {DICTIONARY}. Run the prepare stage, or give --data a "
            f"folder that fairseq-preprocess --only-source made."
        )
    return {subset: check_stem(folder / subset) for subset in subsets}


def read_manifest(folder: Path) -> Dict[str, Any]:
    """manifest.json of a binarised folder, {} where there is none."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{folder / MANIFEST} is no JSON ({error}): prepare the data again.") from error


def bpe_files(folder: Path) -> Optional[List[Path]]:
    """encoder.json and vocab.bpe of a binarised folder, or None."""
    paths = [folder / ENCODER, folder / VOCAB]
    return paths if all(path.is_file() for path in paths) else None
