"""How large a recipe's training set is: measured on binarised data, else looked up in corpus_sizes.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Optional, Tuple

import numpy

from moa_fairseq.data_prep.binarised import INPUT, subset_stems
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.schema import CLASSIFICATION, MASKED_LM, Recipe

TABLE = Path(__file__).with_name("corpus_sizes.json")
SPECIAL_SYMBOLS = 4  # of a fairseq dictionary, beside the lines of dict.*.txt


@dataclasses.dataclass(frozen=True)
class CorpusSize:
    """A training set. Tokens include the end of each sentence.

    fill: target tokens of an update as a fraction of the tokens it may have; the rest is padding and
    sentences that are longer on the source side. batches: how many fairseq cuts one epoch into, known of
    measured data only. longest: tokens of the longest sentence, for a plan without data. origin: where the
    numbers are from.
    """

    name: str
    sentences: int
    source_tokens: int
    target_tokens: int
    vocabulary: int
    fill: float
    origin: str
    batches: Optional[int] = None
    longest: Optional[int] = None

    def updates_per_epoch(self, effective: int, devices: int, update_freq: int) -> int:
        """Updates in an epoch; effective: tokens that one of them may have."""
        if self.batches is not None:
            return math.ceil(math.ceil(self.batches / devices) / update_freq)
        return max(1, round(self.target_tokens / (effective * self.fill)))


def known_size(recipe: Recipe) -> Optional[CorpusSize]:
    """The entry of the table whose experiments the recipe belongs to, by the longest common beginning."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))["corpora"]
    names = (recipe.experiment, recipe.data.recipe)
    found = [
        (len(beginning), entry)
        for entry in table
        for beginning in entry["experiments"]
        if any(name.startswith(beginning) for name in names)
    ]
    if not found:
        return None
    entry: dict[str, Any] = max(found, key=lambda pair: pair[0])[1]
    return CorpusSize(**{key: value for key, value in entry.items() if key != "experiments"})


def measured_size(recipe: Recipe, folder: Path, max_tokens: int) -> CorpusSize:
    """Read the lengths of all training sentences and cut them into batches as fairseq will.

    folder: made by fairseq-preprocess. Raises UserError when its training set is not there.
    """
    from fairseq.data import data_utils

    import moa_fairseq  # noqa: F401  (so that the last batch is kept, as in training)

    source, target = sentence_sizes(recipe, folder, "train")
    language = recipe.data.target
    place = folder / INPUT if recipe.kind == CLASSIFICATION else folder
    dictionary = place / (f"dict.{language}.txt" if language else "dict.txt")
    try:
        with open(dictionary, "rb") as lines:
            masks = recipe.kind in (MASKED_LM, CLASSIFICATION)  # <mask>
            vocabulary = sum(1 for _ in lines) + SPECIAL_SYMBOLS + masks
    except OSError as error:
        raise UserError(f"--data {folder}: {dictionary.name} cannot be read ({error.strerror}).") from error
    batches, total = None, int(target.sum())
    if language or recipe.kind == CLASSIFICATION:
        longer = numpy.maximum(source, target)
        if longer.max(initial=0) > max_tokens:
            raise UserError(
                f"A training sentence has {longer.max():,} tokens and train.max_tokens is {max_tokens:,}: "
                "raise it, or leave long sentences out of the data."
            )
        order = numpy.lexsort((target, source))
        cut = data_utils.batch_by_size(
            order,
            num_tokens_fn=None,
            num_tokens_vec=longer[order],
            max_tokens=max_tokens,
            max_sentences=recipe.training_flags.get("batch-size"),
            required_batch_size_multiple=8,
        )
        batches = len(cut)
    return CorpusSize(
        name=folder.name,
        sentences=len(target),
        source_tokens=int(source.sum()),
        target_tokens=total,
        vocabulary=vocabulary,
        fill=total / (batches * max_tokens) if batches else 1.0,
        origin=f"measured in {folder}",
        batches=batches,
    )


def sentence_sizes(recipe: Recipe, folder: Path, split: str) -> Tuple[numpy.ndarray, numpy.ndarray]:
    """Tokens of every source and target sentence of a split; of one text twice those of its lines."""
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    languages = [language for language in (recipe.data.source, recipe.data.target) if language]
    stems = list(subset_stems(folder, languages, split).values())
    sizes = []
    for stem in stems if languages else stems[:1]:
        if not stem.with_name(stem.name + ".idx").is_file():
            raise UserError(f"{stem}.idx is missing: the folder is not as fairseq-preprocess makes it.")
        dataset = MMapIndexedDataset(str(stem))  # its memory map goes with it: copy before it does
        sizes.append(numpy.array(dataset.sizes, dtype=numpy.int64))
    return sizes[0], sizes[-1]
