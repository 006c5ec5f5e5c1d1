"""What the analyses of one trained model share: flags, a data set run through it, its modules by kind."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from moa_fairseq.attention.collector import NamedDecisions, collect_decisions
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import batches
from moa_fairseq.json_files import write_json
from moa_fairseq.recipes.checkpoints import trained_checkpoint
from moa_fairseq.recipes.finetune import prepared_data

# Label of a kind of attention → first and last part of its modules' paths, in the order of the pictures.
KINDS_OF_ATTENTION = {
    "encoder self-attention": ("encoder", "self_attn"),
    "decoder self-attention": ("decoder", "self_attn"),
    "decoder cross-attention": ("decoder", "encoder_attn"),
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the data that runs through it, and how."""
    parser.add_argument("model", type=Path, metavar="RUN_DIR|CHECKPOINT")
    parser.add_argument("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
    parser.add_argument("--subset", default="valid", help="which subset of the data to run (valid)")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="tokens in a batch (4096)")
    add_report_arguments(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the numbers go, and the device."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def checkpoint_and_data(
    model: Path, data: Optional[Path] = None, max_tokens: int = 4096
) -> Tuple[Path, Path]:
    """A run folder stands for its averaged (else its best) checkpoint and for the data it was trained on.

    Raises UserError for a folder without a checkpoint, a checkpoint without data, or an empty batch.
    """
    warnings.filterwarnings("ignore", message=".*pin_memory")
    if max_tokens < 1:
        raise UserError(f"--max-tokens {max_tokens}: a batch holds at least one token.")
    if model.is_dir():
        checkpoint = trained_checkpoint(model)
        if not checkpoint.is_file():
            raise UserError(
                f"{model} holds neither average.pt nor checkpoints/checkpoint_best.pt: train first."
            )
        return checkpoint, data or prepared_data(model) or Path()
    if data is None:
        raise UserError(
            f"{model} is not a run folder, so --data must name the binarised data to run through it."
        )
    return model, data


def forward_passes(
    task: Any, model: nn.Module, subset: str, max_tokens: int, device: torch.device
) -> Iterator[Tuple[Dict[str, Any], NamedDecisions]]:
    """(batch, decisions of all routers in forward order) for every batch of a subset, by teacher forcing.

    The model is put in evaluation mode on `device`. Raises UserError if the model has no router, or if
    the subset does not exist or is empty.
    """
    model = model.to(device).eval()
    empty = True
    for sample in batches(task, model, subset, max_tokens, device):
        with torch.no_grad(), collect_decisions() as decisions:
            model(**sample["net_input"], features_only=True)  # there is no router in the output layer
        if not decisions:
            raise UserError(f"This model has no router: {type(model).__name__} has no mixture of experts.")
        yield sample, decisions
        empty = False
    if empty:
        raise UserError(f"The subset {subset} has no sentence of at most {max_tokens} tokens.")


def by_kind(measured: Sequence[Any]) -> Dict[str, List[Any]]:
    """Measurements of modules (each has the module's `name`) by kind of attention; no empty kinds.

    "decoder.layers.3.encoder_attn" is a "decoder cross-attention"; its choice for keys and values, whose name
    ends in ".keys", is "decoder cross-attention, keys"; a name that fits nowhere is "other".
    """
    labels = {ends: label for label, ends in KINDS_OF_ATTENTION.items()}
    kinds = [kind for label in (*KINDS_OF_ATTENTION, "other") for kind in (label, f"{label}, keys")]
    found: Dict[str, List[Any]] = {kind: [] for kind in kinds}
    for item in measured:
        path = item.name.removesuffix(".keys").split(".")
        side = ", keys" if item.name.endswith(".keys") else ""
        found[labels.get((path[0], path[-1]), "other") + side].append(item)
    return {label: group for label, group in found.items() if group}


def finish(text: str, report: Dict[str, Any], json_file: Optional[Path], *pictures: Path) -> None:
    """Write the report where --json names a file, print the text, and say which files were written."""
    if json_file:
        write_json(json_file, report)
    print(text)
    written = [*pictures, json_file] if json_file else pictures
    if written:
        print(f"wrote {', '.join(map(str, written))}")
