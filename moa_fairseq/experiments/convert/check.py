"""Whether two models compute the same function, and their losses on data."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from omegaconf import OmegaConf
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert.models import Checkpoint
from moa_fairseq.experiments.scoring.trained_model import batches, shortened
from moa_fairseq.plugin.patches.adaptive_loss import WholeAdaptiveLoss

_PAD = 1
_FIRST_WORD = 4
_LENGTHS = (9, 5, 1)


@torch.no_grad()
def largest_difference(
    one: nn.Module, other: nn.Module, job: str, settings: argparse.Namespace
) -> float:
    """The largest difference of two models' outputs on random sentences, over the largest output.

    In float64 and in evaluation mode; positions of padding are left out. Both models stay in float64.

    Args:
        one, other: models of the same dictionary.
        job: a key of `models.BODIES`: what they are called with.
        settings: of a model, for the longest sentence that it reads.

    Returns:
        The largest absolute difference, as a part of the largest absolute output of `one`.
    """
    limits = ("max_source_positions", "max_target_positions", "max_positions", "tokens_per_sample")
    most = 99
    for name in limits:
        most = min(most, int(getattr(settings, name, None) or 99))
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, max(1, most - 1)) for length in _LENGTHS]
    sizes = []
    for name, parameter in one.named_parameters():
        if "embed_tokens" in name and name.endswith("weight"):
            sizes.append(len(parameter))
    symbols = min(sizes)
    tokens = torch.randint(
        _FIRST_WORD, max(symbols, 5), (len(lengths), max(lengths)), generator=generator
    )
    tokens.clamp_(max=symbols - 1)
    right = torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]
    padded = tokens.masked_fill(right, _PAD)

    def output(model: nn.Module) -> Tensor:
        model = model.double().eval()
        if job == "translation":
            source = padded.flip(1)  # fairseq pads sources on the left
            logits = model(source, source.ne(_PAD).sum(1), padded)[0]
        else:
            logits = model(padded)[0]
        return logits[~right]

    first = output(one)
    second = output(other)
    return ((first - second).abs().max() / first.abs().max().clamp_min(1e-12)).item()


def mean_losses(
    models: Sequence[nn.Module],
    checkpoint: Checkpoint,
    job: str,
    data: Path,
    subset: str,
    max_tokens: int,
    most: int,
) -> list[float]:
    """Each model's mean loss over the first batches of a subset, on the CPU in float32.

    Cross entropy, of masked tokens in a masked language model; all models see the same masks.

    Args:
        models: of one dictionary and job; they stay in float32, in evaluation mode.
        checkpoint: names the task, and whether there is an adaptive softmax.
        job: a key of `models.BODIES`.
        data: the binarised folder.
        subset: its name, such as "valid".
        max_tokens: of a batch.
        most: how many batches are read, at most.

    Returns:
        Bits per token, of each model.

    Raises:
        UserError: if the data cannot be read, is empty or belongs to other dictionaries, or the checkpoint
            names no task.
    """
    if not data.is_dir():
        raise UserError(
            f"--data {data} is not a folder. Give the folder that fairseq-preprocess wrote."
        )
    group = copy.deepcopy(checkpoint.cfg.get("task"))
    if checkpoint.is_old or group is None:
        raise UserError(
            "--data needs a checkpoint with the name of its task, which this old file lacks."
        )
    group = dict(group if isinstance(group, dict) else vars(group), data=str(data))
    try:
        task = tasks.setup_task(
            OmegaConf.create(group, flags={"allow_objects": True}), from_checkpoint=True
        )
    except Exception as error:  # fairseq raises bare ones, too
        remedy = "Give the folder that fairseq-preprocess wrote: binarised/ in a prepared data set"
        raise UserError(f"--data {data} cannot be read: {shortened(error)}. {remedy}.") from error
    rows = set()
    for name, parameter in models[0].named_parameters():
        if name.endswith("embed_tokens.weight"):
            rows.add(len(parameter))
    symbols = {len(task.source_dictionary or ()), len(task.target_dictionary or ())}
    if not rows <= symbols:
        raise UserError(
            f"--data {data} has dictionaries of {sorted(symbols)} symbols, but the model has {sorted(rows)}. "
            "Give the folder that the model was trained on."
        )
    criterion: nn.Module = CrossEntropyCriterion(task, False)
    if job == "masked LM":
        criterion = MaskedLmLoss(MaskedLmConfig(tpu=False), task)
    elif getattr(checkpoint.settings, "adaptive_softmax_cutoff", None):
        criterion = WholeAdaptiveLoss(task, False)
    models = [model.float().eval() for model in models]
    sums = [0.0] * len(models)
    tokens = 0
    with torch.no_grad():
        for number, sample in enumerate(
            batches(task, models[0], subset, max_tokens, torch.device("cpu"))
        ):
            if number == most:
                break
            for place, model in enumerate(models):
                loss, size, _ = criterion(model, sample)
                sums[place] += float(loss)
            tokens += size
    if not tokens:
        raise UserError(f"--subset {subset} of {data} is empty.")
    return [total / tokens / math.log(2) for total in sums]
