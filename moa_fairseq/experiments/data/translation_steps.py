"""The steps of parallel text: tokens → bpe, or model → pieces → sample → binarised."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.catalogue import SENTENCEPIECE, datasets
from moa_fairseq.experiments.data.job import CODES, PreparationJob
from moa_fairseq.experiments.data.parallel_text import (
    BAD,
    WHOLE,
    Piece,
    PiecePair,
    hyphens,
    is_raw,
    read_lines,
    read_pairs,
)
from moa_fairseq.experiments.data.text_stages import Split, Treatment, learn_codes, write_splits
from moa_fairseq.experiments.make import Step
from moa_fairseq.text.languages import writes_no_spaces
from moa_fairseq.text.tokenizer import has_prefixes

SHOWN = 3  # pairs of the training text
SAMPLE = 1000  # pairs to inspect
log = logging.getLogger(__name__)


def translation_steps(job: PreparationJob) -> list[Step]:
    """tokens → bpe, or model → pieces → sample → binarised."""
    settings = job.settings
    languages = job.languages
    data = job.data
    tokens = text = job.root / "tokens"
    merges = settings["bpe"]
    given = settings.get("codes")
    by_pieces = settings.get("segmentation") == SENTENCEPIECE
    models = pieces.names(languages, settings["joined_dictionary"])
    splits = list(job.parts or job.subsets)
    if data.hold_out and data.hold_out.split not in splits:
        splits.insert(1, data.hold_out.split)

    def pairs(split: str) -> list[PiecePair]:
        texts = job.texts.get(split, [])
        return list(zip(texts[::2], texts[1::2]))

    def pair(folder: Path, split: str) -> PiecePair:
        return Piece(folder / f"{split}.{languages[0]}"), Piece(folder / f"{split}.{languages[1]}")

    def tokenised() -> list[Split]:
        found = []
        for split in job.parts:
            steps = [data.steps_for(split, language, settings) for language in languages]
            treatment = Treatment((steps[0], steps[1]), cleaning=data.cleaning("tokens", split))
            train = split == "train"
            own = not data.downloadable and not by_pieces  # pieces cut any word into text
            hold_out = data.hold_out if train else None
            found.append(Split(split, pairs(split), treatment, hold_out, train, own))
        return found

    def token_inputs() -> dict[str, Any]:
        treated = [[split.name, split.treatment, split.hold_out] for split in tokenised()]
        return {"languages": languages, "texts": job.read(), "splits": treated}

    def tokenise(new: Path) -> dict[str, Any]:
        found = itertools.islice(read_pairs(pairs("train"), mark_bad=True), SAMPLE)
        sample = [sides for sides in found if not any(side.startswith(BAD) for side in sides)]
        # People can see whether the sides belong together, and whether the text is already segmented.
        for sides in sample[:SHOWN]:
            log.info("  %s", " | ".join(f"{one}: {side[:60].strip()}" for one, side in zip(languages, sides)))
        asked = datasets()[settings["recipe"]]
        taken = not data.steps and not data.codes and settings.get("tokenize") is None and not by_pieces
        if taken and is_raw(itertools.chain(*sample)):
            way = datasets()[asked.raw or asked.name]
            if asked.raw:
                sets = f"--set data.recipe={way.name} --set data.bpe={way.merges} "
            else:
                sets = ""
            if way.name == "parallel":
                what = "Moses' tokeniser"
            else:
                what = f"the steps of {way.name}"
            raise UserError(
                f"{pairs('train')[0][0].path} looks like raw text. Run `moa-fairseq prepare {way.name}` with "
                f"--tokenize (in a recipe: {sets}--set data.tokenize=true) to apply {what}, or with "
                f"--no-tokenize (data.tokenize=false) to use the text without changes."
            )
        if asked.splits_hyphens and not data.steps and hyphens(itertools.chain(*sample)) == WHOLE:
            log.warning(
                "%s has compounds with hyphens (a-b), but %s splits them (a @-@ b): its BLEU is not "
                "comparable with the paper's without a compound split",
                *(pairs("train")[0][1].path, asked.name),
            )
        for language in languages:
            if any(name == "tokenize" for name, _ in data.steps_for("test", language, settings)):
                _warn_of_rules(language)
        return write_splits(tokenised(), languages, new, job.workers)

    def learn(new: Path) -> dict[str, int]:
        new.mkdir()
        counts = {}
        for name in dict.fromkeys(models.values()):
            if given:
                counts[name] = pieces.obtain(new / name, Path(given))
            else:
                log.info("learning %s SentencePiece pieces: %s", f"{merges:,}", name)
                texts = [tokens / f"train.{language}" for language in languages if models[language] == name]
                lines = itertools.chain.from_iterable(map(read_lines, texts))
                counts[name] = pieces.learn(lines, texts[0], merges, new / name, **how)["pieces"]
            pieces.write_dictionary(new / name)
        return counts

    def segment(new: Path) -> dict[str, Any]:
        new.mkdir()
        codes: str | tuple[str, str] = str(new / CODES)
        if by_pieces:
            codes = (str(model / models[languages[0]]), str(model / models[languages[1]]))
        elif given:
            shutil.copyfile(given, new / CODES)
        else:
            log.info("learning %s joint BPE merges", f"{merges:,}")
            learn_codes([tokens / f"train.{language}" for language in languages], merges, new / CODES)
        treatments = {split: Treatment(codes=codes, cleaning=cleaning[split]) for split in splits}
        segmented = [Split(split, [pair(tokens, split)], how) for split, how in treatments.items()]
        return write_splits(segmented, languages, new, job.workers)

    def learned() -> Any:
        if given and not Path(given).is_file():
            raise UserError(
                f"data.codes: {given} does not exist. Give a file with BPE merges or a SentencePiece model."
            )
        return job.checksum(Path(given)) if given else merges

    steps = [Step("tokens", tokens, tokenise, token_inputs)]
    model = job.root / "model"
    cleaning = {split: data.cleaning("bpe", split) for split in splits}
    dictionaries = {}
    if by_pieces:
        fallback = settings["byte_fallback"]
        coverage = settings.get("character_coverage")
        how = pieces.translation_settings(settings["piece_model"], fallback, coverage)
        # Without bytes, the letters of long lines were once unknown.
        longest = {} if fallback else {"longest": pieces.LONGEST}
        text = job.root / "pieces"
        steps.append(
            Step(
                "model",
                model,
                learn,
                lambda: {"tokens": steps[0], "pieces": learned(), "settings": how, **longest},
            )
        )
        steps.append(Step("pieces", text, segment, {"model": steps[-1], "cleaning": cleaning}))
        sides = [str(pieces.dictionary_of(model / models[language])) for language in languages]
        dictionaries = {"srcdict": sides[0], "tgtdict": None if job.joined else sides[1]}
    elif merges is not None or given:
        text = job.root / "bpe"
        steps.append(
            Step("bpe", text, segment, lambda: {"tokens": steps[0], "codes": learned(), "cleaning": cleaning})
        )
    fraction = settings.get("train_fraction")
    seed = settings.get("train_fraction_seed", 1)
    if fraction not in (None, 1):
        whole = text
        text = job.root / "sample"

        def sample(new: Path) -> dict[str, int]:
            new.mkdir()
            for split in splits:
                for one, other in zip(pair(whole, split), pair(new, split)):
                    if split != "train":
                        os.link(one.path, other.path)
            return sample_pairs(pair(whole, "train"), pair(new, "train"), fraction, seed)

        steps.append(Step("sample", text, sample, {"text": steps[-1], "fraction": fraction, "seed": seed}))
    steps.append(job.binarise(steps[-1], splits, dictionaries=dictionaries))
    return [*steps, job.manifest(steps[-1])]


def _warn_of_rules(language: str) -> None:
    if writes_no_spaces(language):
        log.warning(
            "Moses' tokeniser finds no words in %s, which has no spaces. Use data.segmentation=%s",
            language,
            SENTENCEPIECE,
        )
    elif not has_prefixes(language):
        log.warning(
            "Moses has no list of abbreviations for %s: the English list is used, as Moses does", language
        )


def sample_pairs(source: PiecePair, destination: PiecePair, fraction: float, seed: int) -> dict[str, int]:
    """Write a fraction of the pairs of two files, at least one pair, in their order (MAE §5.2).

    The sample of a smaller fraction is part of a larger one's with the same seed.

    Args:
        source: the two input files.
        destination: the two output files.
        fraction: above 0 and at most 1.
        seed: determines the selected pairs.

    Returns:
        The numbers of pairs that are written (`lines`) and read (`of`).
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
    log.info("sample: %s of %s training pairs", f"{len(kept):,}", f"{total:,}")
    return {"lines": len(kept), "of": total}
