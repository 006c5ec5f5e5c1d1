"""How an update's tokens are spread over devices and accumulation steps, and how many updates there are.

Each device gets at least as many tokens as the longest sentence or sample has. Of those longer than
--max-tokens, fairseq skips training sentences, stops at validation sentences, and cuts samples of language
models.
"""

import argparse
import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import DICTIONARY, INPUT, subset_stems
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.schema import (
    CLASSIFICATION,
    MASKED_LM,
    TRANSLATION,
    Recipe,
    Train,
)
from moa_fairseq.experiments.scoring.meta_model import quiet

TABLE = Path(__file__).with_name("corpus_sizes.json")
SPECIAL_SYMBOLS = 4  # symbols of a fairseq dictionary in addition to the lines of dict.*.txt
# fairseq's default of --max-source-positions and --max-target-positions: it skips longer sentences.
MAX_POSITIONS = 1024
LOUD_DEVIATION = 0.01  # a batch that deviates more from the recipe's is worth a warning
# A learning rate that is, at the last update, farther than this fraction of the way from the minimum to the
# peak is worth a warning.
FAR_FROM_MINIMUM = 0.1
# Schedules that end: the name of their last rate, and the setting that moves their end.
SCHEDULES = {
    "cosine": ("min_lr", "train.flags.warmup-updates plus lr-period-updates"),
    "polynomial_decay": ("end_learning_rate", "train.flags.total-num-update"),
    "tri_stage": ("final_lr_scale", "the steps of the stages"),
}


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How one update's tokens are spread over devices and accumulation steps.

    Args:
        devices: number of processes that train together.
        update_freq: accumulation steps per update.
        max_tokens: the largest number of tokens per device and step, including padding.
        wanted: the number of tokens per update that the recipe requests, or None.
    """

    devices: int
    update_freq: int
    max_tokens: int
    wanted: int | None

    @property
    def effective(self) -> int:
        """Tokens per update, including padding."""
        return self.devices * self.update_freq * self.max_tokens

    @property
    def deviation(self) -> float:
        """The deviation of the effective batch from the requested one, by rounding, as a fraction."""
        return self.effective / self.wanted - 1 if self.wanted else 0.0

    def describe(self) -> str:
        """One line for the log, including rounding, and its remedy if it is large."""
        line = (
            f"batch: {self.devices} device(s) x update-freq {self.update_freq} x max-tokens "
            f"{self.max_tokens:,} = {self.effective:,} tokens per update"
        )
        if self.deviation:
            line += f" (recipe: {self.wanted:,}, {self.deviation:+.2%} by rounding)"
        if abs(self.deviation) > LOUD_DEVIATION:
            line += ". Use another number of devices, or --set train.max_tokens=... to come nearer."
        return line


def plan_batch(train: Train, devices: int) -> BatchPlan:
    """Keep the effective batch on any number of devices.

    The number of accumulation steps is the smallest that respects train.max_tokens. Then --max-tokens is
    lowered, so that devices x steps x max-tokens is the effective batch, or smaller by less than devices x
    steps. If --max-tokens would be below train.min_tokens, there are fewer steps.

    Args:
        train: the recipe's section.
        devices: the number of processes that train together.
    """
    requested = train.effective_batch_tokens
    if requested is None:
        return BatchPlan(devices, 1, train.max_tokens, None)
    least_tokens = min(train.min_tokens or 1, train.max_tokens, requested)
    fewest_steps = math.ceil(requested / (devices * train.max_tokens))
    most_steps = requested // (devices * least_tokens)
    steps = max(1, min(fewest_steps, most_steps))
    max_tokens = min(train.max_tokens, requested // (devices * steps))
    return BatchPlan(devices, steps, max(least_tokens, max_tokens), requested)


def fit_devices(
    recipe: Recipe, hardware: Hardware, data: Path | None
) -> tuple[Recipe, Hardware, str]:
    """Leave out devices that cannot share an update because each would get less than the longest sentence.

    Args:
        recipe: the recipe; without train.min_tokens the length of the longest sentence or sample is used.
        hardware: all devices.
        data: the binarised folder; without it, the known size of the corpus is used.

    Returns:
        The recipe with train.min_tokens, the hardware with as many devices as can share an update, and the
        reason for using fewer ("" if all are used).

    Raises:
        UserError: if other programs have started the processes, so that none can be left out here.
    """
    train = recipe.train
    if train.min_tokens is None:
        train = dataclasses.replace(train, min_tokens=_longest_sentence(recipe, data))
        recipe = dataclasses.replace(recipe, train=train)
    most_devices = hardware.devices
    if train.min_tokens and train.effective_batch_tokens:
        least_tokens = min(train.min_tokens, train.max_tokens)
        most_devices = max(1, train.effective_batch_tokens // least_tokens)
    if hardware.devices <= most_devices:
        return recipe, hardware, ""
    reason = (
        f"an update has {train.effective_batch_tokens:,} tokens (train.effective_batch_tokens) and the "
        f"longest sentence or sample {train.min_tokens:,}"
    )
    if hardware.shared:
        raise UserError(
            f"{hardware.devices} devices are too many: {reason}. Start at most {most_devices} processes "
            "(--gpus, --nodes, torchrun's --nproc-per-node)."
        )
    assumed = "" if data else " (That length is assumed until the data is prepared.)"
    reason = (
        f"using {most_devices} of {hardware.devices} devices: {reason}. With smaller shares, sentences would "
        f"be left out.{assumed}"
    )
    return recipe, hardware.with_devices(most_devices), reason


def _longest_sentence(recipe: Recipe, data: Path | None) -> int | None:
    """The number of tokens of the longest sentence or sample that is not skipped; None if it is unknown."""
    flags = recipe.training_flags
    if recipe.kind not in (TRANSLATION, CLASSIFICATION):
        sample = flags.get("tokens-per-sample")
        return int(sample) if sample else None
    if data is None:
        size = known_size(recipe)
        return size.longest if size else None
    limit = recipe.train.max_tokens
    for side in ("source", "target"):
        limit = min(limit, int(flags.get(f"max-{side}-positions") or MAX_POSITIONS))
    class_token = flags.get("init-token") is not None  # before every sentence of a classifier
    longest = 0
    for split in ("train", "valid"):
        sizes = numpy.maximum(*sentence_sizes(recipe, data, split)) + class_token
        longest = max(longest, int(sizes[sizes <= limit].max(initial=0)))
    return longest or None  # of data without sentences


@dataclasses.dataclass(frozen=True)
class CorpusSize:
    """A training set. Token counts include the end of each sentence.

    Args:
        name: the name of the corpus, or of its folder.
        sentences, source_tokens, target_tokens: the numbers of sentences and of tokens on each side.
        vocabulary: the number of symbols in the target's dictionary, including fairseq's own.
        fill: the used fraction of an update: its target tokens, divided by the tokens that it may have. The
            rest is padding, or is lost because sentences are longer on the source side.
        origin: the source of the numbers.
        batches: the number of batches per epoch, for measured data only.
        longest: the number of tokens of the longest sentence, for a plan without data.
    """

    name: str
    sentences: int
    source_tokens: int
    target_tokens: int
    vocabulary: int
    fill: float
    origin: str
    batches: int | None = None
    longest: int | None = None

    def updates_per_epoch(self, batch: BatchPlan) -> int:
        """The number of updates per epoch."""
        if self.batches is not None:
            return math.ceil(math.ceil(self.batches / batch.devices) / batch.update_freq)
        return max(1, round(self.target_tokens / (batch.effective * self.fill)))


def planned_updates(train: Train, batch: BatchPlan, size: CorpusSize | None) -> int | None:
    """Updates to max_epoch or max_update, whichever comes first; None if this depends on an unknown `size`.

    Args:
        train: the recipe's section.
        batch: how an update is spread over devices.
        size: the size of the training set; without it, max_epoch is ignored.
    """
    limits = [train.max_update] if train.max_update else []
    if train.max_epoch and size:
        limits.append(train.max_epoch * size.updates_per_epoch(batch))
    return min(limits, default=None)


def schedule_warning(args: argparse.Namespace, updates: int | None) -> str | None:
    """A warning when the learning rate ends far from its minimum: the model would not have annealed.

    None if all is well, if the number of updates is unknown, and if a schedule without a minimum
    (inverse_sqrt, fixed) has at least reached its peak.

    Args:
        args: fairseq's parsed flags of the training.
        updates: the number of updates of the whole training.
    """
    if updates is None:
        return None
    key = "warmup_steps" if args.lr_scheduler == "tri_stage" else "warmup_updates"
    warmup = getattr(args, key, 0) or 0
    if warmup >= updates:
        return (
            f"the learning rate still rises at the last update ({updates:,}): it warms up for {warmup:,} "
            f"(train.flags.{key.replace('_', '-')}). Set it to a part of the updates, or train longer."
        )
    if args.lr_scheduler not in SCHEDULES:
        return None
    rate, peak, minimum = _last_rates(args, updates)
    # A schedule of few updates is still far from its minimum one or two updates before its end
    tolerance = max(FAR_FROM_MINIMUM, 2 / max(1, updates))
    if rate - minimum <= tolerance * (peak - minimum):
        return None
    _, end_setting = SCHEDULES[args.lr_scheduler]
    return (
        f"the learning rate of the last update ({updates:,}) is {rate:.2g}, {rate / peak:.0%} of its peak; "
        f"the schedule ({args.lr_scheduler}) ends at {minimum:g}. Let {end_setting} end with it."
    )


def _last_rates(args: argparse.Namespace, updates: int) -> tuple[float, float, float]:
    """The learning rate of the last update, and the peak and the minimum of its schedule."""
    import torch
    from fairseq import optim
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = convert_namespace_to_omegaconf(args)
    optimizer = optim.build_optimizer(config.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    schedule = optim.lr_scheduler.build_lr_scheduler(config.lr_scheduler, optimizer)
    schedule.step_begin_epoch(1)
    # step_update(n) returns the rate of update n + 1
    rate = schedule.step_update(max(0, updates - 1))
    peak = max(config.optimization.lr)
    key, _ = SCHEDULES[args.lr_scheduler]
    minimum = config.lr_scheduler[key] * (peak if key == "final_lr_scale" else 1)
    return rate, peak, minimum


def training_set(recipe: Recipe, data: Path | None) -> CorpusSize | None:
    """The size of the training set: measured in a binarised folder, else looked up; None if unknown.

    Args:
        recipe: the training.
        data: the binarised folder, or None.

    Raises:
        UserError: see `measured_size`.
    """
    if data:
        return measured_size(recipe, data, plan_batch(recipe.train, 1).max_tokens)
    return known_size(recipe)


def known_size(recipe: Recipe) -> CorpusSize | None:
    """The entry of corpus_sizes.json for the recipe's experiment, by the longest matching prefix."""
    matches: dict[str, dict[str, Any]] = {}
    for entry in json.loads(TABLE.read_text("utf-8"))["corpora"]:
        for prefix in entry.pop("experiments"):
            if recipe.experiment.startswith(prefix) or recipe.data.recipe.startswith(prefix):
                matches[prefix] = entry
    return CorpusSize(**matches[max(matches, key=len)]) if matches else None


def measured_size(recipe: Recipe, folder: Path, max_tokens: int) -> CorpusSize:
    """Read the lengths of all training sentences and cut them into batches as fairseq will.

    Args:
        recipe: the training.
        folder: the folder made by fairseq-preprocess.
        max_tokens: the largest number of tokens of a batch on one device.

    Raises:
        UserError: if the training set or dictionary is missing, or a sentence is longer than max_tokens.
    """
    source, target = sentence_sizes(recipe, folder, "train")
    vocabulary = _vocabulary_size(recipe, folder)
    tokens = int(target.sum())
    batches = None
    if recipe.kind in (TRANSLATION, CLASSIFICATION):
        batches = _count_batches(recipe, source, target, max_tokens)
    return CorpusSize(
        name=folder.name,
        sentences=len(target),
        source_tokens=int(source.sum()),
        target_tokens=tokens,
        vocabulary=vocabulary,
        fill=tokens / (batches * max_tokens) if batches else 1.0,
        origin=f"measured in {folder}",
        batches=batches,
    )


def _vocabulary_size(recipe: Recipe, folder: Path) -> int:
    """The number of symbols in the dictionary of a binarised folder, for a translation in the target's."""
    names = {TRANSLATION: f"dict.{recipe.data.target}.txt", CLASSIFICATION: f"{INPUT}/{DICTIONARY}"}
    dictionary = folder / names.get(recipe.kind, DICTIONARY)
    has_mask = recipe.kind in (MASKED_LM, CLASSIFICATION)  # the symbol <mask>
    try:
        with open(dictionary, "rb") as lines:
            return sum(1 for _ in lines) + SPECIAL_SYMBOLS + has_mask
    except OSError as error:  # it has the reason
        raise UserError(
            f"--data {folder}: cannot read {dictionary.name} ({error.strerror})."
        ) from error


def _count_batches(
    recipe: Recipe, source: numpy.ndarray, target: numpy.ndarray, max_tokens: int
) -> int:
    """The number of batches into which fairseq cuts sentence pairs of these lengths, [N] int64 each."""
    from fairseq.data import data_utils

    import moa_fairseq  # noqa: F401  (so that the last batch is kept, as in training)

    longer = numpy.maximum(source, target)
    if longer.max(initial=0) > max_tokens:
        raise UserError(
            f"train.max_tokens {max_tokens:,}: a training sentence has {longer.max():,} tokens. Increase it, "
            "or remove long sentences from the data."
        )
    order = numpy.lexsort((target, source))
    batches = data_utils.batch_by_size(
        order,
        num_tokens_fn=None,
        num_tokens_vec=longer[order],
        max_tokens=max_tokens,
        max_sentences=recipe.training_flags.get("batch-size"),
        required_batch_size_multiple=8,
    )
    return len(batches)


def sentence_sizes(recipe: Recipe, folder: Path, split: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The number of tokens of every sentence of a split, including the sentence end.

    Args:
        recipe: the recipe, whose languages are read.
        folder: the folder made by fairseq-preprocess.
        split: the name of the split, such as "train".

    Returns:
        The lengths of the N source and of the N target sentences, [N] int64 each; for text in one language
        both are the lengths of its lines.

    Raises:
        UserError: if a file is missing.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    languages = list(filter(None, (recipe.data.source, recipe.data.target)))
    stems = list(subset_stems(folder, languages, split).values())
    if not languages:
        del stems[1:]  # a classifier's labels, which are not sentences
    sizes = []
    for stem in stems:
        if not stem.with_name(f"{stem.name}.idx").is_file():
            raise UserError(
                f"{stem}.idx is missing, so fairseq-preprocess did not make this folder."
            )
        dataset = MMapIndexedDataset(str(stem))
        # The memory map of its sizes closes with it: copy them
        sizes.append(numpy.array(dataset.sizes, dtype=numpy.int64))
    return sizes[0], sizes[-1]
