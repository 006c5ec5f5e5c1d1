"""From a data set to a binarised folder: obtain → tokens → BPE → binarised, each kept once it is whole."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from moa_fairseq.data_prep.binarised import (
    check_binarised,
    check_place,
    is_binarised,
    is_classification,
    preprocess_flags,
)
from moa_fairseq.data_prep.bpe import learn_codes
from moa_fairseq.data_prep.catalogue import (
    Dataset,
    classification_sets,
    language_modeling_sets,
    translation_sets,
)
from moa_fairseq.data_prep.inputs import (
    brought_tokens,
    check_lengths,
    check_looks,
    hint,
    split_parts,
    texts_for_manifest,
)
from moa_fairseq.data_prep.manifest import verdict, write_manifest
from moa_fairseq.data_prep.obtain import Store
from moa_fairseq.data_prep.parallel_text import Piece, PiecePair, read_lines
from moa_fairseq.data_prep.sampling import sample_pairs
from moa_fairseq.data_prep.stage_folder import FileMemory, build_folder, fingerprint_of
from moa_fairseq.data_prep.terms import before_download
from moa_fairseq.data_prep.text_sources import TEXT_SOURCES, has_text
from moa_fairseq.data_prep.text_stages import Chain, Job, run_jobs
from moa_fairseq.data_prep.workers import default_workers as workers
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

CODES = "codes"
Say = Callable[[str], None]
Texts = Dict[str, List[PiecePair]]


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
    need. source: the --data folder, or None for a data set that is downloaded. root: where the stages
    are kept. preprocess: runs fairseq-preprocess with the given flags and raises when it fails.
    downloads: where public files are kept (beside `root` unless given).
    """

    settings: Mapping[str, Any]
    subsets: Sequence[str]
    source: Optional[Path]
    root: Path
    preprocess: Callable[[Mapping[str, Any]], None]
    say: Say = print
    downloads: Optional[Path] = None
    offline: bool = False
    workers: int = dataclasses.field(default_factory=workers)

    @property
    def languages(self) -> Tuple[str, str]:
        """(source, target)."""
        return self.settings["source"], self.settings["target"]

    def run(self) -> Prepared:
        """Carry out every stage that is not done yet. Raises UserError for unusable data."""
        check_place(self.root)
        if self.source and (self.settings["recipe"] == "binarised" or is_binarised(self.source)):
            return self._use_binarised(self.source)
        dataset = translation_sets()[self.settings["recipe"]]
        if self.source and brought_tokens(dataset, self.source, self.languages):
            train = " and ".join(f"train.{language}" for language in self.languages)
            self.say(f"{self.source} holds {train}: taken as tokenised and cleaned; what is left is BPE")
            dataset = translation_sets()["parallel"]
        store = Store(self.source, self.downloads or self.root.parent / "downloads", self.offline, self.say)
        texts = self._obtain(dataset, store)
        tokens, mark = self._tokenise(dataset, texts)
        text, mark = self._segment(dataset, tokens, mark)
        text, mark = self._sample(text, mark)
        prepared = self._binarise(dataset, text, mark)
        read = texts_for_manifest(texts, self._memory())
        for line in verdict(write_manifest(self.root, self.settings, store.origins, read, dataset)):
            self.say(line)
        return prepared

    def _obtain(self, dataset: Dataset, store: Store) -> Texts:
        """split → pairs of text files, fetched and extracted where necessary, of equal length."""
        parts = split_parts(dataset, self.languages, self.source, self.subsets, self.settings)
        # Both languages together, so that an archive is gone through once.
        flat = [part for sides in parts.values() for side in sides for part in side]
        announce = functools.partial(before_download, dataset, self.root, store.downloads, self.say)
        found = store.pieces(flat, [dataset.codes] if dataset.codes else [], announce)
        pieces: Dict[Any, Optional[Piece]] = dict(zip([*flat, dataset.codes], found))
        if pieces.get(dataset.codes):
            self._keep_codes(pieces[dataset.codes].path)
        texts = {
            split: [(pieces[one], pieces[other]) for one, other in zip(*sides)]
            for split, sides in parts.items()
        }
        check_lengths(texts, self._memory())
        segmenting = self.settings["bpe"] is not None or bool(self.settings.get("codes"))
        check_looks(texts.get("train", ()), self.languages, segmenting)
        return texts

    def _keep_codes(self, codes: Path) -> None:
        """The merges by which text was segmented elsewhere: whoever fine-tunes a model on it needs them."""
        with atomic_write(self.root / CODES) as stream:
            stream.writelines(line + "\n" for line in read_lines(codes))

    def _memory(self) -> FileMemory:
        return FileMemory(self.root / "files.json")

    def _tokenise(self, dataset: Dataset, texts: Texts) -> Tuple[Path, str]:
        jobs = [self._text_job(dataset, split, files) for split, files in texts.items()]
        memory = self._memory()
        described = [
            [job.split, job.chain, job.hold_out and dataclasses.astuple(job.hold_out)]
            + [[piece.markup, memory.sha256(piece.path)] for pair in job.files for piece in pair]
            for job in jobs
        ]
        mark = fingerprint_of("tokens", 3, self.languages, described)
        folder = self.root / "tokens"

        def build(new: Path) -> Dict[str, Any]:
            return run_jobs(jobs, self.languages, new, self.workers, self.say)

        build_folder(folder, mark, build, self.say, resumable=True)
        return folder, mark

    def _text_job(self, dataset: Dataset, split: str, files: List[PiecePair]) -> Job:
        steps = [dataset.steps_for(split, language) for language in self.languages]
        if self.settings.get("lowercase") and not any(name == "lowercase" for name, _ in steps[0]):
            steps = [(("lowercase", {}), *side) for side in steps]
        chain = Chain((steps[0], steps[1]), cleaning=dataset.cleaning("tokens", split))
        train = split == "train"
        return Job(split, files, chain, dataset.hold_out if train else None, lenient=train)

    def _segment(self, dataset: Dataset, tokens: Path, tokens_mark: str) -> Tuple[Path, str]:
        merges, given = self.settings["bpe"], self.settings.get("codes")
        if merges is None and given is None:
            return tokens, tokens_mark
        given = Path(given) if given else None
        if given and not given.is_file():
            raise UserError(f"data.codes: there is no file {given} with BPE merges.")
        cleaning = {split: dataset.cleaning("bpe", split) for split in dataset.subsets}
        learned_as = self._memory().sha256(given) if given else merges
        mark = fingerprint_of("bpe", 3, learned_as, cleaning, tokens_mark)

        def build(new: Path) -> Dict[str, Any]:
            codes = new / CODES
            if given:
                shutil.copyfile(given, codes)
            elif not codes.is_file():
                self.say(f"learning {merges:,} joint BPE merges")
                train = [tokens / f"train.{language}" for language in self.languages]
                learn_codes(train, merges, codes, self.workers)
            jobs = [
                Job(split, [self._pair(tokens, split)], Chain(codes=str(codes), cleaning=cleaning.get(split)))
                for split in self._splits(tokens)
            ]
            return run_jobs(jobs, self.languages, new, self.workers, self.say)

        build_folder(self.root / "bpe", mark, build, self.say, resumable=True)
        return self.root / "bpe", mark

    def _sample(self, text: Path, text_mark: str) -> Tuple[Path, str]:
        """A part of the training pairs, chosen at random; the other splits as they are."""
        fraction, seed = self.settings.get("train_fraction"), self.settings.get("train_fraction_seed")
        if fraction in (None, 1):
            return text, text_mark
        mark = fingerprint_of("sample", 1, fraction, seed, text_mark)

        def build(new: Path) -> Dict[str, int]:
            for split in self._splits(text):
                for language in self.languages:
                    name = f"{split}.{language}"
                    if split != "train":
                        os.link(text / name, new / name)
            return sample_pairs(self._pair(text, "train"), self._pair(new, "train"), fraction, seed, self.say)

        build_folder(self.root / "sample", mark, build, self.say)
        return self.root / "sample", mark

    def _pair(self, folder: Path, split: str) -> PiecePair:
        source, target = (Piece(folder / f"{split}.{language}") for language in self.languages)
        return source, target

    def _splits(self, folder: Path) -> List[str]:
        """The splits in a stage's folder; train and valid first, as ever."""
        names = {path.stem for path in folder.glob(f"*.{self.languages[0]}")}
        return sorted(names, key=lambda name: (name != "train", name != "valid", name))

    def _binarise(self, dataset: Dataset, text: Path, text_mark: str) -> Prepared:
        joined, extra = self.settings["joined_dictionary"], {**dataset.preprocess, **self.settings["flags"]}
        mark = fingerprint_of("binarised", 2, joined, extra, text_mark)
        splits = self._splits(text)

        def build(new: Path) -> Dict[str, int]:
            values = preprocess_flags(text, new, splits, self.languages, joined, self.workers, extra)
            self.preprocess(values)
            return check_binarised(new, self.languages, splits, joined)

        sentences = build_folder(self.root / "binarised", mark, build, self.say)
        return Prepared(self.root / "binarised", sentences, mark)

    def _use_binarised(self, source: Path) -> Prepared:
        check_place(source)
        self.say(f"{source}: binarised already; used as it is")
        joined = self.settings["joined_dictionary"]
        sentences = check_binarised(source, self.languages, self.subsets, joined)
        return Prepared(source, sentences, given_fingerprint(source))


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


def require_source(settings: Mapping[str, Any], source: Optional[Path]) -> Optional[Path]:
    """The --data folder; None for a data set that is downloaded; or a UserError that says what to bring.

    A folder in which no file of the data set lies is refused: whoever names one wants it to be used.
    """
    recipe = settings["recipe"]
    known = {**translation_sets(), **language_modeling_sets(), **classification_sets()}
    text = TEXT_SOURCES.get(recipe)
    dataset = known.get(text.dataset if text else recipe)
    if dataset is not None and dataset.downloadable:
        if source is not None and not (text and has_text(source, recipe)):
            _check_known(dataset, settings, source)
        return source
    if source is not None:
        return source
    if recipe in TEXT_SOURCES:
        bring = TEXT_SOURCES[recipe].bring
    elif recipe in known:
        bring = hint(known[recipe], settings)
    else:
        bring = "Give --data the folder made by it."
    raise UserError(f"--data is missing: data recipe {recipe!r} starts from your files. {bring}")


def _check_known(dataset: Dataset, settings: Mapping[str, Any], source: Path) -> None:
    if not source.is_dir():
        raise UserError(f"--data {source} is not a folder.")
    if is_binarised(source) or is_classification(source) or (source / "dict.txt").is_file():
        return
    if dataset.generated:
        raise UserError(
            f"--data {source} is no binarised {dataset.name}: name the folder `binarised` in that which "
            f"moa-fairseq prepare {dataset.name} made, or leave --data away, so that it is made."
        )
    languages = [settings[side] for side in ("source", "target") if settings.get(side)]
    parts = dataset.parts(languages)
    archives = [Path(part.archive).name for part in parts if part.archive]
    texts = [Path(name).name for part in parts for name in (part.members or (part.file,))]
    own = [f"train.{language}" for language in languages] if archives else []
    inside = [name for part in parts for name in part.members]
    for name in (*archives, *texts, *inside, *own):
        stem = source / name.removesuffix(".gz")
        if (source / name).is_file() or stem.is_file() or stem.with_name(f"{stem.name}.gz").is_file():
            return
    looked = "; ".join(
        f"{what}: {', '.join(dict.fromkeys(found))}"
        for what, found in (("archives", archives), ("texts", texts), ("your own tokenised text", own))
        if found
    )
    raise UserError(
        f"--data {source} holds no file of {dataset.name}. Looked for ({looked}), plain or .gz. Name the "
        "folder that has some of them (what it lacks is downloaded), or leave --data away, so that all are "
        "downloaded."
    )
