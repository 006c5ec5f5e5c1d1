"""The steps of parallel text, for translation."""

import functools
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
    TextFile,
    TextFilePair,
    hyphens,
    is_raw,
    read_lines,
    read_pairs,
)
from moa_fairseq.experiments.data.text_stages import Split, Treatment, learn_codes, write_splits
from moa_fairseq.experiments.make import Step
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.text.languages import writes_no_spaces
from moa_fairseq.text.tokenizer import has_prefixes

SHOWN = 3  # pairs of the training text that the log shows
SAMPLE = 1000  # pairs of the training text that are inspected
log = logging.getLogger(__name__)


class TranslationPreparation:
    """The steps of a parallel data set: tokens → bpe, or model → pieces → sample → binarised.

    Args:
        job: the data section of the recipe, and the files of the data set.
    """

    def __init__(self, job: PreparationJob):
        settings = job.settings
        self.job = job
        self.data = job.data
        self.settings = settings
        self.languages = job.languages
        self.tokens = job.root / "tokens"
        self.model = job.root / "model"
        self.merges = settings["bpe"]
        self.given_codes = settings.get("codes")
        self.fraction = settings.get("train_fraction") or 1
        self.seed = settings.get("train_fraction_seed", 1)
        self.uses_pieces = settings.get("segmentation") == SENTENCEPIECE
        self.models = pieces.model_names(self.languages, settings["joined_dictionary"])
        self.splits = list(job.parts or job.subsets)
        hold_out = self.data.hold_out
        if hold_out and hold_out.split not in self.splits:
            self.splits.insert(1, hold_out.split)
        self.cleaning = {split: self.data.cleaning("bpe", split) for split in self.splits}

    def steps(self) -> list[Step]:
        """All steps in their order, the manifest included."""
        root = self.job.root
        tokens = Step("tokens", self.tokens, self.tokenise, self._token_inputs)
        steps = [tokens]
        dictionaries: dict[str, str | None] = {}
        if self.uses_pieces:
            model = Step(
                "model",
                self.model,
                self.learn_pieces,
                functools.partial(self._model_inputs, tokens),
            )
            inputs = {"model": model, "cleaning": self.cleaning}
            steps += [model, Step("pieces", root / "pieces", self.segment, inputs)]
            source, target = (
                str(pieces.dictionary_of(self._model_of(language))) for language in self.languages
            )
            dictionaries = {"srcdict": source, "tgtdict": None if self.job.joined else target}
        elif self.merges is not None or self.given_codes:
            merge_inputs = functools.partial(self._merge_inputs, tokens)
            steps.append(Step("bpe", root / "bpe", self.segment, merge_inputs))
        if self.fraction != 1:
            text = steps[-1]
            inputs = {"text": text, "fraction": self.fraction, "seed": self.seed}
            sample = functools.partial(self.sample, text.output)
            steps.append(Step("sample", root / "sample", sample, inputs))
        binarised = self.job.binarise(steps[-1], self.splits, dictionaries=dictionaries)
        return [*steps, binarised, self.job.manifest(binarised)]

    def tokenise(self, new: Path) -> Values:
        """Check a sample of the training text, and write the tokens of each split."""
        pairs = itertools.islice(read_pairs(self._texts("train"), mark_bad=True), SAMPLE)
        sample = [pair for pair in pairs if BAD not in "".join(pair)]
        first, second = self.languages
        # People can see whether the sides belong together, and whether the text is already segmented.
        for source, target in sample[:SHOWN]:
            log.info(f"  {first}: {source[:60].strip()} | {second}: {target[:60].strip()}")
        self._refuse_raw_text(sample)
        self._warn_of_hyphens(sample)
        for language in self.languages:
            steps = dict(self.data.steps_for("test", language, self.settings))
            if "tokenize" in steps:
                _warn_of_rules(language)
        return write_splits(self._splits_to_tokenise(), self.languages, new, self.job.workers)

    def learn_pieces(self, new: Path) -> dict[str, int]:
        """Learn the SentencePiece models, or copy the given one. Returns file name → number of pieces."""
        new.mkdir()
        counts = {}
        for name in dict.fromkeys(self.models.values()):
            model = new / name
            if self.given_codes:
                counts[name] = pieces.copy_model(model, Path(self.given_codes))
            else:
                log.info(f"learning {self.merges:,} SentencePiece pieces: {name}")
                texts = [
                    self._tokens_of(side) for side in self.languages if self.models[side] == name
                ]
                lines = itertools.chain.from_iterable(map(read_lines, texts))
                facts = pieces.learn(lines, texts[0], self.merges, model, **self._piece_settings())
                counts[name] = facts["pieces"]
            pieces.write_dictionary(model)
        return counts

    def segment(self, new: Path) -> Values:
        """Segment each split into SentencePiece pieces, or by merges, which are learnt here or given."""
        new.mkdir()
        codes: str | tuple[str, str] = str(new / CODES)
        if self.uses_pieces:
            source, target = self.languages
            codes = str(self._model_of(source)), str(self._model_of(target))
        elif self.given_codes:
            shutil.copyfile(self.given_codes, new / CODES)
        else:
            log.info(f"learning {self.merges:,} joint BPE merges")
            learn_codes(list(map(self._tokens_of, self.languages)), self.merges, new / CODES)
        splits = []
        for split in self.splits:
            treatment = Treatment(codes=codes, cleaning=self.cleaning[split])
            splits.append(Split(split, [self._pair(self.tokens, split)], treatment))
        return write_splits(splits, self.languages, new, self.job.workers)

    def sample(self, text: Path, new: Path) -> dict[str, int]:
        """Keep a fraction of the training pairs of a text, and the other splits as they are."""
        new.mkdir()
        for split in self.splits:
            if split != "train":
                for original, copy in zip(self._pair(text, split), self._pair(new, split)):
                    os.link(original.path, copy.path)
        originals = self._pair(text, "train")
        return sample_pairs(originals, self._pair(new, "train"), self.fraction, self.seed)

    def _token_inputs(self) -> Values:
        """What the tokenised text depends on."""
        treatments = []
        for split in self._splits_to_tokenise():
            treatments.append([split.name, split.treatment, split.hold_out])
        return {"languages": self.languages, "texts": self.job.text_inputs(), "splits": treatments}

    def _model_inputs(self, tokens: Step) -> Values:
        """What the SentencePiece models depend on."""
        inputs = {
            "tokens": tokens,
            "pieces": self._codes_input(),
            "settings": self._piece_settings(),
        }
        # An earlier version skipped long lines: without byte fallback, their letters could be unknown
        if not self.settings["byte_fallback"]:
            inputs["longest"] = pieces.LONGEST
        return inputs

    def _merge_inputs(self, tokens: Step) -> Values:
        """What the segmentation by merges depends on."""
        return {"tokens": tokens, "codes": self._codes_input(), "cleaning": self.cleaning}

    def _codes_input(self) -> Any:
        """The checksum of the given file of codes, or the number of codes to learn.

        Raises:
            UserError: if the given file is missing.
        """
        codes = self.given_codes
        if codes and not Path(codes).is_file():
            raise UserError(
                f"data.codes: {codes} does not exist. Give a file with BPE merges or a SentencePiece model."
            )
        return self.job.checksum(Path(codes)) if codes else self.merges

    def _piece_settings(self) -> Values:
        fallback = self.settings["byte_fallback"]
        coverage = self.settings.get("character_coverage")
        return pieces.translation_settings(self.settings["piece_model"], fallback, coverage)

    def _splits_to_tokenise(self) -> list[Split]:
        """The splits of the raw text, with the processing before the segmentation."""
        splits = []
        for split in self.job.parts:
            source, target = (
                self.data.steps_for(split, language, self.settings) for language in self.languages
            )
            treatment = Treatment((source, target), cleaning=self.data.cleaning("tokens", split))
            is_train = split == "train"
            splits.append(
                Split(
                    split,
                    self._texts(split),
                    treatment,
                    hold_out=self.data.hold_out if is_train else None,
                    lenient=is_train,
                    # SentencePiece cuts any word into pieces, none of which is one of fairseq's symbols
                    own=not self.data.downloadable and not self.uses_pieces,
                )
            )
        return splits

    def _refuse_raw_text(self, sample: list[tuple[str, str]]) -> None:
        """Raise UserError if text that is used without changes does not look tokenised."""
        data = self.data
        is_processed = data.steps or data.codes or self.settings.get("tokenize") is not None
        if is_processed or self.uses_pieces or not is_raw(itertools.chain(*sample)):
            return
        dataset = datasets()[self.settings["recipe"]]
        raw = datasets()[dataset.raw or dataset.name]
        overrides = ""
        if dataset.raw:
            overrides = f"--set data.recipe={raw.name} --set data.bpe={raw.merges} "
        steps = "Moses' tokeniser" if raw.name == "parallel" else f"the steps of {raw.name}"
        path = self._texts("train")[0][0].path
        raise UserError(
            f"{path} looks like raw text. Run `moa-fairseq prepare {raw.name}` with "
            f"--tokenize (in a recipe: {overrides}--set data.tokenize=true) to apply {steps}, or with "
            f"--no-tokenize (data.tokenize=false) to use the text without changes."
        )

    def _warn_of_hyphens(self, sample: list[tuple[str, str]]) -> None:
        """Warn if the text has whole hyphenated words, which the data set's own steps would split."""
        dataset = datasets()[self.settings["recipe"]]
        is_unprocessed = dataset.splits_hyphens and not self.data.steps
        if is_unprocessed and hyphens(itertools.chain(*sample)) == WHOLE:
            path = self._texts("train")[0][1].path
            log.warning(
                f"{path} has compounds with hyphens (a-b), but {dataset.name} splits them (a @-@ b): its "
                "BLEU is not comparable with the paper's without a compound split"
            )

    def _texts(self, split: str) -> list[TextFilePair]:
        """The (source, target) pairs of files of a split, which alternate in the job's texts."""
        texts = self.job.texts.get(split, [])
        return list(zip(texts[::2], texts[1::2]))

    def _pair(self, folder: Path, split: str) -> TextFilePair:
        source, target = self.languages
        return TextFile(folder / f"{split}.{source}"), TextFile(folder / f"{split}.{target}")

    def _tokens_of(self, language: str) -> Path:
        return self.tokens / f"train.{language}"

    def _model_of(self, language: str) -> Path:
        return self.model / self.models[language]


def _warn_of_rules(language: str) -> None:
    """Warn of a language for which Moses' tokeniser has no rules."""
    if writes_no_spaces(language):
        log.warning(
            f"Moses' tokeniser finds no words in {language}, which has no spaces. Use "
            f"data.segmentation={SENTENCEPIECE}"
        )
    elif not has_prefixes(language):
        log.warning(
            f"Moses has no list of abbreviations for {language}: the English list is used, as Moses does"
        )


def sample_pairs(
    source: TextFilePair, destination: TextFilePair, fraction: float, seed: int
) -> dict[str, int]:
    """Write a fraction of the pairs of two files, at least one pair, in their order (MAE §5.2).

    The sample of a smaller fraction is part of a larger one's with the same seed.

    Args:
        source: the two input files.
        destination: the two output files.
        fraction: the fraction of the pairs, above 0 and at most 1.
        seed: the random seed, which determines the selected pairs.

    Returns:
        "lines" and "of": the numbers of pairs that were written and read.
    """
    total = sum(1 for _ in read_lines(source[0].path))
    order = list(range(total))
    random.Random(seed).shuffle(order)
    sample = set(order[: max(1, math.ceil(total * fraction))])
    for old, new in zip(source, destination):
        with open(new.path, "w", encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(read_lines(old.path)):
                if number in sample:
                    stream.write(f"{line}\n")
    log.info(f"sample: {len(sample):,} of {total:,} training pairs")
    return {"lines": len(sample), "of": total}
