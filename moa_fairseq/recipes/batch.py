"""How an update's tokens are spread over devices and accumulation steps, and how few a device may get.

A device gets no fewer than the longest sentence or sample has: fairseq leaves training sentences out that are
longer than --max-tokens, stops at those of the validation set, and cuts the samples of language models.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Optional, Tuple

import numpy

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.corpus_size import CorpusSize, known_size, measured_size, sentence_sizes
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.schema import CLASSIFICATION, TRANSLATION, Recipe, Train

# fairseq's default of --max-source-positions and --max-target-positions: it skips what is longer anyway.
MAX_POSITIONS = 1024


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How one update's tokens are spread over devices and accumulation steps."""

    devices: int
    update_freq: int
    max_tokens: int
    wanted: Optional[int]

    @property
    def effective(self) -> int:
        """Tokens of one update, padding included."""
        return self.devices * self.update_freq * self.max_tokens

    def describe(self) -> str:
        """One line for the log, rounding included."""
        line = (
            f"{self.devices} device(s) x update-freq {self.update_freq} x max-tokens {self.max_tokens:,} "
            f"= {self.effective:,} tokens per update"
        )
        if self.wanted and self.wanted != self.effective:
            line += f" ({self.wanted:,} asked for, {self.deviation:+.2%} by rounding)"
        return line

    @property
    def deviation(self) -> float:
        """How far the update is from the one that was asked for, as a fraction of it."""
        return self.effective / self.wanted - 1 if self.wanted else 0.0


def plan_batch(train: Train, devices: int) -> BatchPlan:
    """Keep the effective batch on any number of devices.

    The fewest accumulation steps that respect train.max_tokens, then --max-tokens lowered so that
    devices x steps x max-tokens is the effective batch, short of it by less than devices x steps. Where that
    would go below train.min_tokens, fewer steps.
    """
    wanted = train.effective_batch_tokens
    if wanted is None:
        return BatchPlan(devices, 1, train.max_tokens, None)
    floor = min(train.min_tokens or 1, train.max_tokens, wanted)
    steps = max(1, min(-(-wanted // (devices * train.max_tokens)), wanted // (devices * floor)))
    share = min(train.max_tokens, wanted // (devices * steps))
    return BatchPlan(devices, steps, max(floor, share), wanted)


def training_set(recipe: Recipe, data: Optional[Path]) -> Optional[CorpusSize]:
    """How large the training set is: measured in a binarised folder, else looked up; None if unknown."""
    if data is None:
        return known_size(recipe)
    return measured_size(recipe, data, plan_batch(recipe.train, 1).max_tokens)


def planned_updates(train: Train, batch: BatchPlan, size: Optional[CorpusSize]) -> Optional[int]:
    """Updates to max_epoch or max_update, whichever comes first; None where `size` would have to say it."""
    limits = [train.max_update] if train.max_update else []
    if train.max_epoch and size:
        limits.append(
            train.max_epoch * size.updates_per_epoch(batch.effective, batch.devices, batch.update_freq)
        )
    return min(limits, default=None)


def with_floor(recipe: Recipe, data: Optional[Path], assume: bool = True) -> Recipe:
    """The recipe with train.min_tokens, unless it says that itself.

    data: the binarised folder; without one the known size of the corpus counts if `assume`.
    """
    if recipe.train.min_tokens is not None:
        return recipe
    flags = recipe.training_flags
    if recipe.kind not in (TRANSLATION, CLASSIFICATION):
        sample = flags.get("tokens-per-sample")
        longest = int(sample) if sample else None
    elif data is None:
        size = known_size(recipe) if assume else None
        longest = size.longest if size else None
    else:
        positions = (int(flags.get(f"max-{side}-positions", MAX_POSITIONS)) for side in ("source", "target"))
        limit = min(recipe.train.max_tokens, *positions)
        class_token = flags.get("init-token") is not None  # before every sentence of a classifier
        pairs = [
            numpy.maximum(*sentence_sizes(recipe, data, split)) + class_token for split in ("train", "valid")
        ]
        longest = max(int(sizes[sizes <= limit].max(initial=0)) for sizes in pairs) or None
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, min_tokens=longest))


def fit_devices(recipe: Recipe, hardware: Hardware) -> Tuple[Hardware, Optional[str]]:
    """As many of the devices as can share an update, and a warning where some are left out.

    Raises UserError where other programs have started the processes, so that none can be left out here.
    """
    train = recipe.train
    if not train.min_tokens or not train.effective_batch_tokens:
        return hardware, None
    most = max(1, train.effective_batch_tokens // min(train.min_tokens, train.max_tokens))
    if hardware.devices <= most:
        return hardware, None
    why = (
        f"an update has {train.effective_batch_tokens:,} tokens (train.effective_batch_tokens) and the "
        f"longest sentence or sample {train.min_tokens:,}"
    )
    world = hardware.world
    if hardware.shared:
        raise UserError(
            f"{hardware.devices} devices are too many: {why}, which no device's share may fall below, or "
            f"sentences are left out. Start at most {most} processes (--gpus, --nodes, torchrun's "
            "--nproc-per-node)."
        )
    smaller = dataclasses.replace(world, size=most, here=most) if world and most > 1 else None
    fewer = dataclasses.replace(hardware, gpus=most, world=smaller)
    return fewer, (
        f"WARNING: {most} of {hardware.devices} devices are used: {why}. A smaller share would leave "
        "sentences out."
    )
