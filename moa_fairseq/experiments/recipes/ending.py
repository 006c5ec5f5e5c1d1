"""The recipe's requirements at the end of its training, checked before the training begins."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.recipes.batch import BatchPlan, measured_size, planned_updates
from moa_fairseq.experiments.recipes.schema import INTERVAL, TRANSLATION, Recipe

# Flags with names of files to read: at the first start of a training, and after its end.
_FILES = {
    "train": ("finetune-from-model", "continue-once"),
    "generate": ("lm-path",),
    "score": ("reference", "raw-reference", "against"),
}
_BEST = "--set average=null evaluates the best checkpoint"


def unmet(
    recipe: Recipe, updates: int | None = None, per_epoch: int | None = None
) -> Iterator[tuple[str, str]]:
    """Settings by which the training would leave less than the average or the evaluation needs.

    Args:
        recipe: of the training.
        updates: of the whole training, if the data is known; otherwise train.max_update is used.
        per_epoch: updates per epoch, if the data is known.

    Returns:
        (key, why) of each problem.
    """
    if recipe.finetune == "noft":  # nothing is trained
        return
    flags = recipe.training_flags
    average = recipe.average
    train = recipe.train

    def number(flag: str, default: int = 0) -> int:
        if isinstance(value := flags.get(flag), int) and value > 0:
            return value
        return default

    updates = updates or train.max_update
    every = number("save-interval", 1)
    interval = number(INTERVAL)
    ends = [train.max_epoch] if train.max_epoch else []
    if updates and per_epoch:
        ends.append(updates // per_epoch)
    epochs = min(ends, default=None)
    if train.max_epoch and train.max_epoch % every:
        why = f"the end of the training, epoch {train.max_epoch} (train.max_epoch), would not be saved"
        yield "train.flags.save-interval", f"{why}. Use a divisor of it, or leave the flag out."
    if average is None:
        by_epochs_alone = train.max_epoch and not train.max_update and not interval
        reasons = {
            "disable-validation": flags.get("disable-validation"),
            "validate-interval": by_epochs_alone and number("validate-interval", 1) > (train.max_epoch or 1),
            "validate-after-updates": updates and number("validate-after-updates") > updates,
        }
        for flag in (flag for flag, holds in reasons.items() if holds):
            why = "without validation there is no best checkpoint to evaluate"
            yield (
                f"train.flags.{flag}",
                f"{why}. Leave the flag out, or average checkpoints (average.epochs).",
            )
    elif average.epochs:
        if epochs is None:
            saved = average.epochs
        else:
            saved = epochs // every
        if flags.get("no-epoch-checkpoints"):
            why = f"no epoch would leave a checkpoint, but average.epochs needs {average.epochs}"
            yield "train.flags.no-epoch-checkpoints", f"{why}. Leave the flag out; {_BEST}."
        elif saved < average.epochs:
            if updates and per_epoch:
                size = f" ({updates:,} updates, {per_epoch:,} in an epoch)"
            else:
                size = ""
            why = (
                f"the average needs {average.epochs} checkpoints, but the training would leave {saved}{size}"
            )
            if saved > 1:
                fewer = f"--set average.epochs={saved} averages those; "
            else:
                fewer = ""
            yield "average.epochs", f"{why}. Train longer; {fewer}{_BEST}."
    elif average.updates and updates and interval:
        last = updates
        first = max(1, number("validate-after-updates"))

        def written(interval: int) -> int:
            """The number of saved checkpoints: fairseq saves none at an update that ends an epoch."""
            if per_epoch:
                both = math.lcm(interval, per_epoch)
            else:
                both = last + 1
            return (last // interval - (first - 1) // interval) - max(0, last // both - (first - 1) // both)

        if written(interval) < average.updates:
            widths = [updates // (average.updates + more) for more in range(3)]
            enough = next((width for width in widths if width and written(width) >= average.updates), None)
            why = f"the average needs {average.updates} checkpoints, but of {updates:,} updates one every "
            why += f"{interval:,} (train.flags.{INTERVAL}) would leave {written(interval)}"
            if enough:
                oftener = f"--set train.flags.{INTERVAL}={enough} leaves enough; "
            else:
                oftener = ""
            yield "average.updates", f"{why}. Train longer; {oftener}{_BEST}."


def check_ending(recipe: Recipe, batch: BatchPlan, data: Path) -> None:
    """Raise an error for a training that would end without the files that the recipe needs.

    Args:
        recipe: of the training.
        batch: how an update is shared.
        data: the binarised folder.

    Raises:
        UserError: with the key.
    """
    size = None
    if recipe.kind == TRANSLATION:  # for other types the updates per epoch are only estimated
        # fairseq itself reports a sentence that is too long for a batch
        with contextlib.suppress(UserError):
            size = measured_size(recipe, data, batch.max_tokens)
    updates = planned_updates(recipe.train, batch, size)
    for key, why in unmet(recipe, updates, size.updates_per_epoch(batch) if size else None):
        raise UserError(f"{key}: {why}")
    if recipe.score and recipe.score.headline == "masked_lm_word_ppl":
        counted = read_manifest(data).get("splits") or {}
        if missing := [name for name in recipe.score.subsets if name not in counted]:
            why = f"{data} has no manifest.json with word counts of {', '.join(missing)}"
            raise UserError(f"score.headline: {why}. Set masked_lm_ppl, or let the recipe make the data.")


def check_files(recipe: Recipe, first_start: bool) -> None:
    """Raise an error for a recipe with the name of a missing file.

    Args:
        recipe: with its flags.
        first_start: also check files that only the first start of a training reads.

    Raises:
        UserError: with the flag and the file.
    """
    for section, names in _FILES.items():
        flags: Any = getattr(getattr(recipe, section), "flags", {})
        for name in names if first_start or section != "train" else ():
            paths = flags.get(name) or []
            for path in paths if isinstance(paths, list) else [paths]:
                if not Path(str(path)).is_file():
                    raise UserError(f"{section}.flags.{name}: there is no file {path}.")
