"""The recipe's requirements at the end of its training, checked before the training begins."""

import contextlib
import math
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.recipes.batch import BatchPlan, measured_size, planned_updates
from moa_fairseq.experiments.recipes.rules import Problems
from moa_fairseq.experiments.recipes.schema import INTERVAL, TRANSLATION, Recipe, Score
from moa_fairseq.experiments.scoring.chains import SACREBLEU, tokenizer_for

# Flags that name files to read, by section. Those of "train" are read only at the first start of a training.
_FILES = {
    "train": ("finetune-from-model", "continue-once"),
    "generate": ("lm-path",),
    "score": ("reference", "raw-reference", "against"),
}
_BEST = "--set average=null evaluates the best checkpoint"


def missing_checkpoints(
    recipe: Recipe, updates: int | None = None, per_epoch: int | None = None
) -> Problems:
    """Settings by which the training would leave less than the average or the evaluation needs.

    Args:
        recipe: the training.
        updates: the number of updates of the training, if the data is known (default: train.max_update).
        per_epoch: the number of updates per epoch, if the data is known.

    Returns:
        A (key, problem) pair for each.
    """
    if recipe.finetune == "noft":  # nothing is trained
        return
    train = recipe.train
    updates = updates or train.max_update
    every = _count_flag(recipe, "save-interval", 1)
    if train.max_epoch and train.max_epoch % every:
        problem = f"the end of the training, epoch {train.max_epoch} (train.max_epoch), would not be saved"
        yield "train.flags.save-interval", f"{problem}. Use a divisor of it, or leave the flag out."
    if recipe.average is None:
        yield from _without_best(recipe, updates)
    elif recipe.average.epochs:
        yield from _too_few_epochs(recipe, recipe.average.epochs, updates, per_epoch)
    elif recipe.average.updates and updates and _count_flag(recipe, INTERVAL):
        yield from _too_few_updates(recipe, recipe.average.updates, updates, per_epoch)


def _count_flag(recipe: Recipe, flag: str, default: int = 0) -> int:
    """The value of a flag of fairseq-train if it is a positive number, else the default."""
    value = recipe.training_flags.get(flag)
    return value if isinstance(value, int) and value > 0 else default


def _without_best(recipe: Recipe, updates: int | None) -> Problems:
    """Problems of a recipe without an average: it needs the best checkpoint, which a validation saves."""
    train = recipe.train
    by_epochs_alone = train.max_epoch and not train.max_update and not _count_flag(recipe, INTERVAL)
    first_epoch = _count_flag(recipe, "validate-interval", 1)
    no_validation = {
        "disable-validation": recipe.training_flags.get("disable-validation"),
        "validate-interval": by_epochs_alone and first_epoch > (train.max_epoch or 1),
        "validate-after-updates": updates
        and _count_flag(recipe, "validate-after-updates") > updates,
    }
    for flag, holds in no_validation.items():
        if holds:
            problem = (
                "without validation there is no best checkpoint to evaluate. Leave the flag out, or "
                "average checkpoints (average.epochs)."
            )
            yield f"train.flags.{flag}", problem


def _too_few_epochs(
    recipe: Recipe, count: int, updates: int | None, per_epoch: int | None
) -> Problems:
    """Problems of an average over `count` epochs, if the training leaves fewer checkpoints."""
    ends = [recipe.train.max_epoch] if recipe.train.max_epoch else []
    if updates and per_epoch:
        ends.append(updates // per_epoch)
    saved = min(ends) // _count_flag(recipe, "save-interval", 1) if ends else count
    if recipe.training_flags.get("no-epoch-checkpoints"):
        problem = f"no epoch would leave a checkpoint, but average.epochs needs {count}"
        yield "train.flags.no-epoch-checkpoints", f"{problem}. Leave the flag out; {_BEST}."
    elif saved < count:
        is_known = updates and per_epoch
        size = f" ({updates:,} updates, {per_epoch:,} in an epoch)" if is_known else ""
        problem = (
            f"the average needs {count} checkpoints, but the training would leave {saved}{size}"
        )
        fewer = f"--set average.epochs={saved} averages those; " if saved > 1 else ""
        yield "average.epochs", f"{problem}. Train longer; {fewer}{_BEST}."


def _too_few_updates(recipe: Recipe, count: int, updates: int, per_epoch: int | None) -> Problems:
    """Problems of an average of `count` checkpoints that are saved by updates."""
    interval = _count_flag(recipe, INTERVAL)
    first = max(1, _count_flag(recipe, "validate-after-updates"))  # nothing is saved before

    def multiples(number: int) -> int:
        return max(0, updates // number - (first - 1) // number)

    def saved(every: int) -> int:
        """The number of saved checkpoints: fairseq saves none at an update that ends an epoch."""
        at_ends = multiples(math.lcm(every, per_epoch)) if per_epoch else 0
        return multiples(every) - at_ends

    if saved(interval) >= count:
        return
    # The longest interval first; shorter ones make up for ends of epochs
    intervals = (updates // number for number in range(count, count + 3))
    enough = next((every for every in intervals if every and saved(every) >= count), 0)
    oftener = f"--set train.flags.{INTERVAL}={enough} leaves enough; " if enough else ""
    problem = (
        f"the average needs {count} checkpoints, but of {updates:,} updates one every {interval:,} "
        f"(train.flags.{INTERVAL}) would leave {saved(interval)}. Train longer; {oftener}{_BEST}."
    )
    yield "average.updates", problem


def check_ending(recipe: Recipe, batch: BatchPlan, data: Path) -> None:
    """Raise an error for a training that would end without the files that the recipe needs.

    Args:
        recipe: the training.
        batch: how an update is spread over devices.
        data: the binarised folder.

    Raises:
        UserError: for such a training, with the key to change, and if sacreBLEU cannot load the tokeniser of
            the target language.
    """
    size = None
    if recipe.kind == TRANSLATION:  # for other types the updates per epoch are only estimated
        # No error for a sentence that is too long for a batch: fairseq reports it
        with contextlib.suppress(UserError):
            size = measured_size(recipe, data, batch.max_tokens)
    updates = planned_updates(recipe.train, batch, size)
    per_epoch = size.updates_per_epoch(batch) if size else None
    for key, problem in missing_checkpoints(recipe, updates, per_epoch):
        raise UserError(f"{key}: {problem}")
    if recipe.score:
        _check_scoring(recipe, recipe.score, data)


def _check_scoring(recipe: Recipe, score: Score, data: Path) -> None:
    """Raise UserError if sacreBLEU lacks its tokeniser, or a perplexity of words their number."""
    runs_sacrebleu = SACREBLEU in (score.flags.get("chain") or SACREBLEU)
    if recipe.kind == TRANSLATION and (recipe.data.running_text or runs_sacrebleu):
        tokenizer_for(recipe.data.target or "", score.flags.get("sacrebleu-tokenizer"))
    if score.headline == "masked_lm_word_ppl":
        counted = read_manifest(data).get("splits") or {}
        if missing := [name for name in score.subsets if name not in counted]:
            raise UserError(
                f"score.headline: {data} has no manifest.json with word counts of {', '.join(missing)}. Set "
                "masked_lm_ppl, or let the recipe make the data."
            )


def check_files(recipe: Recipe, first_start: bool) -> None:
    """Raise an error for a recipe with the name of a missing file.

    Args:
        recipe: the recipe.
        first_start: True to check also the files that only the first start of a training reads.

    Raises:
        UserError: for a missing file; the message names the flag.
    """
    for section, names in _FILES.items():
        if section == "train" and not first_start:
            continue
        flags: Any = getattr(getattr(recipe, section), "flags", {})
        for name in names:
            value = flags.get(name) or []
            paths = value if isinstance(value, list) else [value]
            for path in paths:
                if not Path(str(path)).is_file():
                    raise UserError(f"{section}.flags.{name}: there is no file {path}.")
