"""Text in two languages: obtain → tokens → bpe → sample, and what is left to fairseq-preprocess."""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping

from moa_fairseq.data_prep import inputs
from moa_fairseq.data_prep.binarised import Prepared, text_folder
from moa_fairseq.data_prep.bpe import learn_codes
from moa_fairseq.data_prep.catalogue import Dataset
from moa_fairseq.data_prep.manifest import verdict, write_manifest
from moa_fairseq.data_prep.obtain import Store
from moa_fairseq.data_prep.parallel_text import Piece, PiecePair, read_lines
from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.data_prep.text_stages import Chain, Job, run_jobs
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

if TYPE_CHECKING:
    from moa_fairseq.data_prep.prepare import Preparation

CODES = "codes"
log = logging.getLogger(__name__)


def translation(job: Preparation, dataset: Dataset, store: Store) -> Prepared:
    """Carry out the stages of a data set in two languages; `job` says what and where."""
    texts = _pairs(job, dataset, store)
    mark = _segment(job, dataset, _tokenise(job, dataset, texts))
    mark = _sample(job, mark)
    splits = _splits(job, text_folder(job.settings, job.root))
    extra = {**dataset.preprocess, **job.settings["flags"]}
    mark = fingerprint_of("binarised", 2, job.settings["joined_dictionary"], extra, mark)
    prepared = job.binarise(dataset, splits, mark)
    read = {split: [piece for pair in files for piece in pair] for split, files in texts.items()}
    for line in verdict(write_manifest(job.root, job.settings, store.origins, read, dataset)):
        log.info(line)
    return prepared


def _pairs(job: Preparation, dataset: Dataset, store: Store) -> Dict[str, List[PiecePair]]:
    """split → pairs of text files, fetched and extracted where necessary, of equal length."""
    parts = inputs.split_parts(dataset, job.settings, job.source, job.subsets)
    # Both languages together, so that an archive is gone through once.
    flat = [part for sides in parts.values() for side in sides for part in side]
    codes = [dataset.codes] if dataset.codes else []
    pieces = store.pieces(flat, codes, dataset, job.root)
    if dataset.codes in pieces:
        # The merges by which text was segmented elsewhere: whoever fine-tunes a model on it needs them.
        with atomic_write(job.root / CODES) as stream:
            stream.writelines(line + "\n" for line in read_lines(pieces[dataset.codes].path))
    texts = {
        split: [(pieces[one], pieces[other]) for one, other in zip(*sides)] for split, sides in parts.items()
    }
    inputs.check_lengths(texts, job.memory())
    segmenting = job.settings["bpe"] is not None or bool(job.settings.get("codes"))
    inputs.check_looks(texts.get("train", ()), job.languages, segmenting)
    return texts


def _tokenise(job: Preparation, dataset: Dataset, texts: Mapping[str, List[PiecePair]]) -> str:
    splits = []
    for split, files in texts.items():
        steps = [dataset.steps_for(split, language) for language in job.languages]
        if job.settings.get("lowercase") and not any(name == "lowercase" for name, _ in steps[0]):
            steps = [(("lowercase", {}), *side) for side in steps]
        chain = Chain((steps[0], steps[1]), cleaning=dataset.cleaning("tokens", split))
        train = split == "train"
        splits.append(Job(split, files, chain, dataset.hold_out if train else None, lenient=train))
    memory = job.memory()
    described = [
        [split.split, split.chain, split.hold_out]
        + [[piece.markup, memory.checksum(piece.path)] for pair in split.files for piece in pair]
        for split in splits
    ]
    mark = fingerprint_of("tokens", 3, job.languages, described)
    build = functools.partial(run_jobs, splits, job.languages, workers=job.workers)
    job.stage("tokens", mark, build, resumable=True)
    return mark


def _segment(job: Preparation, dataset: Dataset, tokens_mark: str) -> str:
    merges, given, tokens = job.settings["bpe"], job.settings.get("codes"), job.root / "tokens"
    if merges is None and given is None:
        return tokens_mark
    if given and not Path(given).is_file():
        raise UserError(f"data.codes: there is no file {given} with BPE merges.")
    cleaning = {split: dataset.cleaning("bpe", split) for split in dataset.subsets}
    learned_as = job.memory().checksum(Path(given)) if given else merges
    mark = fingerprint_of("bpe", 3, learned_as, cleaning, tokens_mark)

    def build(new: Path) -> Dict[str, Any]:
        codes = new / CODES
        if given:
            shutil.copyfile(given, codes)
        elif not codes.is_file():
            log.info(f"learning {merges:,} joint BPE merges")
            train = [tokens / f"train.{language}" for language in job.languages]
            learn_codes(train, merges, codes)
        jobs = [
            Job(split, [_pair(job, tokens, split)], Chain(codes=str(codes), cleaning=cleaning.get(split)))
            for split in _splits(job, tokens)
        ]
        return run_jobs(jobs, job.languages, new, job.workers)

    job.stage("bpe", mark, build, resumable=True)
    return mark


def _sample(job: Preparation, text_mark: str) -> str:
    """A part of the training pairs, chosen at random; the other splits as they are."""
    fraction = job.settings.get("train_fraction")
    if fraction is None or fraction == 1:
        return text_mark
    seed = job.settings["train_fraction_seed"]
    mark = fingerprint_of("sample", 1, fraction, seed, text_mark)
    text = text_folder({**job.settings, "train_fraction": None}, job.root)

    def build(new: Path) -> Dict[str, int]:
        for split in _splits(job, text):
            for language in job.languages:
                name = f"{split}.{language}"
                if split != "train":
                    os.link(text / name, new / name)
        return sample_pairs(_pair(job, text, "train"), _pair(job, new, "train"), fraction, seed)

    job.stage("sample", mark, build)
    return mark


def _pair(job: Preparation, folder: Path, split: str) -> PiecePair:
    source, target = (Piece(folder / f"{split}.{language}") for language in job.languages)
    return source, target


def _splits(job: Preparation, folder: Path) -> List[str]:
    """The splits in a stage's folder; train and valid first, as ever."""
    names = {path.stem for path in folder.glob(f"*.{job.languages[0]}")}
    return sorted(names, key=lambda name: (name != "train", name != "valid", name))


def sample_pairs(source: PiecePair, destination: PiecePair, fraction: float, seed: int) -> Dict[str, int]:
    """Write fraction of the pairs of two files, one at least, in their order; returns how many (MAE §5.2).

    The sample of a smaller fraction is part of a larger one's with the same seed.
    """
    total = sum(1 for _ in read_lines(source[0].path))
    order = list(range(total))
    random.Random(seed).shuffle(order)
    kept = set(order[: max(1, math.ceil(total * fraction))])
    for old, new in zip(source, destination):
        with open(new.path, "w", encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(read_lines(old.path)):
                if number in kept:
                    stream.write(line + "\n")
    log.info(f"sample: {len(kept):,} of {total:,} training pairs")
    return {"lines": len(kept), "of": total}
