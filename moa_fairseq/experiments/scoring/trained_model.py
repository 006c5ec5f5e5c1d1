"""Loads a trained model and the data to measure it on."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from torch import Tensor, nn

import moa_fairseq  # noqa: F401  (registers the models; makes fairseq load checkpoints safely)
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.text_files import unverified_text_files


def load_trained(checkpoint: Path, data: Path | None) -> tuple[nn.Module, Any]:
    """Load the model of a checkpoint, and its task, which reads binarised data.

    Args:
        checkpoint: the file.
        data: the binarised folder; None: that of the training.

    Returns:
        The model, and fairseq's task.

    Raises:
        UserError: if the checkpoint or the folder does not exist, or if the dictionaries in the folder differ
            from those that the run keeps.
    """
    if not checkpoint.is_file():
        reason = "is a folder" if checkpoint.is_dir() else "does not exist"
        raise UserError(f"{checkpoint} {reason}: name a checkpoint, such as a run's average.pt.")
    if data is not None and not data.is_dir():
        raise UserError(
            f"--data {data} is not a folder: name the one that fairseq-preprocess wrote."
        )
    overrides = {} if data is None else {"data": str(data)}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), overrides)
    # An old checkpoint has "args"
    settings = getattr(state.get("cfg"), "task", None) or state.get("args")
    folder = str(getattr(settings, "data", None) or "").split(os.pathsep)[0]
    if data is None and folder and not os.path.isdir(folder):
        raise UserError(
            f"{checkpoint} was trained on the binarised data in {folder}, which is not there"
            f"{'' if os.path.isabs(folder) else ' as seen from this folder'}: name that data, or other data "
            "with the same dictionaries, with --data DATA_BIN. All other settings are in the checkpoint."
        )
    if folder:  # this raises the error for other dictionaries
        unverified_text_files(checkpoint, (data or Path(folder)).resolve(), named=data is not None)
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
    return models[0], task


def load_masked_lm(checkpoint: Path, data: Path | None) -> tuple[Any, Any]:
    """Load a masked language model as `load_trained` does.

    Args:
        checkpoint, data: the arguments of `load_trained`.

    Raises:
        UserError: in the cases of `load_trained`, and for any other kind of model.
    """
    model, task = load_trained(checkpoint, data)
    if not hasattr(task, "mask_idx"):
        raise UserError(
            f"{checkpoint} is not a masked language model: it was trained for {type(task).__name__}."
        )
    return model, task


def symbols_at(dictionary: Any, ids: Tensor) -> list[str]:
    """The symbols of a sentence.

    Args:
        dictionary: the dictionary with which the sentence was binarised.
        ids: the ids of the symbols, [T].
    """
    return [dictionary[index] for index in ids.tolist()]


def device_for(cpu: bool) -> torch.device:
    """The GPU if there is one, unless `cpu` asks for the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def load_subset(task: Any, subset: str) -> Any:
    """fairseq's data set of a subset.

    Args:
        task: fairseq's task, which reads the data.
        subset: the name of the subset, such as "test".

    Raises:
        UserError: if there is no such subset.
    """
    try:
        task.load_dataset(subset)
    # The subset is missing or damaged, or the task has no such subset; the message says which
    except (OSError, RuntimeError, KeyError, ValueError, AssertionError) as error:
        raise UserError(f"--subset {subset}: {shortened(error)}") from error
    return task.dataset(subset)


def batches(
    task: Any, model: Any, subset: str, max_tokens: int, device: torch.device
) -> Iterable[dict[str, Any]]:
    """The batches of a subset, in a fixed order.

    Sentences that are longer than max_tokens or than the model reads are left out.

    Args:
        task: fairseq's task, which reads the data.
        model: the model, which says how long a sentence may be.
        subset: the name of the subset, such as "test".
        max_tokens: the largest number of tokens of a batch.
        device: the device to which the batches are moved.

    Raises:
        UserError: if there is no such subset.
    """
    dataset = load_subset(task, subset)
    limits = utils.resolve_max_positions(task.max_positions(), model.max_positions(), max_tokens)
    iterator = task.get_batch_iterator(
        dataset, max_tokens=max_tokens, max_positions=limits, ignore_invalid_inputs=True
    )
    for sample in iterator.next_epoch_itr(shuffle=False):
        if sample:
            yield utils.move_to_cuda(sample) if device.type == "cuda" else sample


def shortened(error: Exception) -> str:
    """The first 300 characters of an error's message: those of fairseq and torch can list all parameters."""
    return " ".join(str(error).split())[:300]
