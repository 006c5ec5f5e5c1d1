"""Whether two models compute the same function, and their losses on data."""

import argparse
import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

_PAD = 1  # fairseq's symbols 0 to 3 are <s>, <pad>, </s> and <unk>
_FIRST_WORD = 4
_LENGTHS = (9, 5, 1)  # of the random sentences, in symbols
_MAX_POSITIONS = (
    "max_source_positions",
    "max_target_positions",
    "max_positions",
    "tokens_per_sample",
)


class LossData(NamedTuple):
    """The data on which losses are measured.

    Args:
        folder: the binarised folder.
        subset: the name of a subset, such as "valid".
        max_tokens: the largest number of tokens of a batch.
        max_batches: the largest number of batches that are read.
    """

    folder: Path
    subset: str
    max_tokens: int
    max_batches: int


@torch.no_grad()
def largest_difference(
    one: nn.Module, other: nn.Module, job: str, settings: argparse.Namespace
) -> float:
    """The largest difference between two models' outputs on random sentences, relative to the largest output.

    The models run in float64 and in evaluation mode, and stay so. The outputs at padding do not count.

    Args:
        one, other: two models with the same dictionary.
        job: a key of `models.BODIES`, which says how the models are called.
        settings: the settings of a model, for the length of the longest sentence that it reads.

    Returns:
        The largest absolute difference, divided by the largest absolute output of `one`.
    """
    # The smaller dictionary; with adaptive inputs, the smallest matrix of a band
    symbols = min(_embedding_sizes(one, "weight"))
    tokens, is_padding = _random_sentences(symbols, _sentence_lengths(settings))

    def output(model: nn.Module) -> Tensor:
        model = model.double().eval()
        if job == "translation":
            source = tokens.flip(1)  # fairseq pads sources on the left
            logits = model(source, source.ne(_PAD).sum(1), tokens)[0]
        else:
            logits = model(tokens)[0]
        return logits[~is_padding]

    first = output(one)
    second = output(other)
    return ((first - second).abs().max() / first.abs().max().clamp_min(1e-12)).item()


def _sentence_lengths(settings: argparse.Namespace) -> list[int]:
    """The lengths of the random sentences; they leave a position of the model free, if it has several."""
    limits = [getattr(settings, name, None) for name in _MAX_POSITIONS]
    longest = min(map(int, filter(None, limits)), default=max(_LENGTHS) + 1) - 1
    return [max(1, min(length, longest)) for length in _LENGTHS]


def _embedding_sizes(model: nn.Module, ending: str) -> set[int]:
    """The numbers of rows of the token embeddings whose parameters' names have this ending."""
    sizes = set()
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and name.endswith(ending):
            sizes.add(len(parameter))
    return sizes


def _random_sentences(dictionary_size: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sentences of random words, padded on the right.

    Args:
        dictionary_size: the number of symbols.
        lengths: the number of words of each of B sentences; T is the largest.

    Returns:
        Symbols, [B, T], and which of them are padding, [B, T] bool.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), max(lengths))
    first_word = min(_FIRST_WORD, dictionary_size - 1)
    tokens = torch.randint(first_word, dictionary_size, shape, generator=generator)
    is_padding = torch.arange(max(lengths))[None] >= torch.tensor(lengths)[:, None]
    return tokens.masked_fill(is_padding, _PAD), is_padding


def mean_losses(
    models: Sequence[nn.Module], checkpoint: Checkpoint, job: str, data: LossData
) -> list[float]:
    """Each model's mean loss over the first batches of a subset, on the CPU in float32.

    The loss is the cross entropy; a masked language model has that of the masked tokens, and all models see
    the same masks.

    Args:
        models: models with the same dictionary, for the same job; they stay in float32, in evaluation mode.
        checkpoint: names the task, and says whether there is an adaptive softmax.
        job: a key of `models.BODIES`.
        data: the data, and how much of it is read.

    Returns:
        Bits per token, of each model.

    Raises:
        UserError: if the data cannot be read, is empty or belongs to other dictionaries, or the checkpoint
            names no task.
    """
    task = _task_of(checkpoint, data.folder)
    _check_dictionaries(models[0], task, data.folder)
    criterion = _criterion_of(checkpoint, task, job)
    models = [model.float().eval() for model in models]
    sums = [0.0] * len(models)
    tokens = 0
    samples = batches(task, models[0], data.subset, data.max_tokens, torch.device("cpu"))
    with torch.no_grad():
        for number, sample in enumerate(samples):
            if number == data.max_batches:
                break
            for index, model in enumerate(models):
                loss, size, _ = criterion(model, sample)
                sums[index] += float(loss)
            tokens += size
    if not tokens:
        raise UserError(f"--subset {data.subset} of {data.folder} is empty.")
    return [total / tokens / math.log(2) for total in sums]


def _task_of(checkpoint: Checkpoint, data: Path) -> Any:
    """The checkpoint's task, which reads another data folder."""
    if not data.is_dir():
        raise UserError(
            f"--data {data} is not a folder. Give the folder that fairseq-preprocess wrote."
        )
    group = copy.deepcopy(checkpoint.cfg.get("task"))
    if checkpoint.is_old or group is None:
        raise UserError(
            "--data needs a checkpoint with the name of its task, which this old file lacks."
        )
    settings = group if isinstance(group, dict) else vars(group)
    try:
        config = OmegaConf.create(settings | {"data": str(data)}, flags={"allow_objects": True})
        return tasks.setup_task(config, from_checkpoint=True)
    except Exception as error:  # fairseq raises bare ones, too
        remedy = "Give the folder that fairseq-preprocess wrote: binarised/ in a prepared data set"
        raise UserError(f"--data {data} cannot be read: {shortened(error)}. {remedy}.") from error


def _check_dictionaries(model: nn.Module, task: Any, data: Path) -> None:
    """Raise UserError if the data's dictionaries do not have the model's numbers of symbols."""
    embedded = _embedding_sizes(model, "embed_tokens.weight")
    symbols = {len(task.source_dictionary or ()), len(task.target_dictionary or ())}
    if not embedded <= symbols:
        raise UserError(
            f"--data {data} has dictionaries of {sorted(symbols)} symbols, but the model has "
            f"{sorted(embedded)}. Give the folder that the model was trained on."
        )


def _criterion_of(checkpoint: Checkpoint, task: Any, job: str) -> nn.Module:
    """fairseq's loss for a model's job, without auxiliary losses."""
    if job == "masked LM":
        return MaskedLmLoss(MaskedLmConfig(tpu=False), task)
    if getattr(checkpoint.settings, "adaptive_softmax_cutoff", None):
        return WholeAdaptiveLoss(task, False)
    return CrossEntropyCriterion(task, False)
