"""Average the weights of several checkpoints into one, with the flags of fairseq's own script.

  moa-fairseq average --inputs runs/X/checkpoints --num-epoch-checkpoints 10 --output runs/X/average.pt
  moa-fairseq average --inputs a.pt b.pt c.pt --output average.pt

Sums run in float32; integer tensors are averaged rounding down. The result keeps the settings of the
newest checkpoint (the last one named), so that fairseq-generate loads it, and no optimizer state. One
checkpoint at a time is in memory, beside the sum.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import refuse_existing, refuse_overwriting
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint

_EPOCH_NAME = re.compile(r"checkpoint(\d+)\.pt")
_UPDATE_NAME = re.compile(r"checkpoint_\d+_(\d+)\.pt")

State = dict[str, Tensor]


def average_checkpoints(paths: Sequence[Path]) -> dict:
    """Average the models of several checkpoints of one training.

    Parameters that share storage in every model (a tied output projection) are added once and stay one
    tensor; if a later model no longer shares them, they become two. The weights are in float32; float64
    weights stay so.

    Args:
        paths: the files, at least two, the newest last.

    Returns:
        A checkpoint with the average, and with the settings of the last file.

    Raises:
        UserError: for fewer than two paths, for a file that is truncated, malicious or not a fairseq
            checkpoint, and for models that differ in parameters, shapes or seeds.
    """
    if len(paths) < 2:
        raise UserError(
            f"An average needs at least two checkpoints, but {len(paths)} is given "
            f"({', '.join(map(str, paths)) or 'none'}). Name more under --inputs, or keep more epochs."
        )
    made_by = provenance()
    seeds: dict[int, Path] = {}  # seed → the first checkpoint with it
    sums: State = {}  # for the first parameter of each storage
    first_names: dict[str, str] = {}  # parameter → the first parameter of the same storage
    for path in paths:
        checkpoint = load_checkpoint(path)
        model = checkpoint.pop("model")
        checkpoint["last_optimizer_state"] = None
        if sums:
            shapes = {name: sums[first].shape for name, first in first_names.items()}
            _check_parameters(model, shapes, path)
            _add(sums, first_names, model)
        else:
            first_names = shared_storage(model)
            for name in dict.fromkeys(first_names.values()):
                sums[name] = _widened(model[name], copy=True)
        del model  # so that only one model is in memory, besides the sums
        seed = _seed(checkpoint)
        if seed is not None:
            seeds.setdefault(seed, path)
        _check_seeds(seeds)
    for total in sums.values():
        _divide(total, len(paths))
    # This is the newest checkpoint; only a resumed training needs its carried context
    if isinstance(checkpoint.get("extra_state"), dict):
        checkpoint["extra_state"].pop("carried_context", None)
    return checkpoint | {
        "model": {name: sums[first] for name, first in first_names.items()},
        "averaged_from": [path.name for path in paths],
        "made_by": made_by,
    }


def _add(sums: State, first_names: dict[str, str], model: State) -> None:
    """Add a model to `sums`.

    A parameter that it no longer shares gets a separate sum; `first_names` is updated.
    """
    first_of_model = shared_storage(model)
    for name, first in list(first_names.items()):
        if name != first and first_of_model[name] != first_of_model[first]:
            sums[name] = sums[first].clone()
            first_names[name] = name
    for name, total in sums.items():
        total += _widened(model[name])


def _seed(state: Mapping[str, Any]) -> int | None:
    """The seed of a checkpoint's training, if its settings name one, in the old format or the new."""
    cfg = state.get("cfg")
    common = cfg.get("common") if isinstance(cfg, Mapping) else state.get("args")
    seed = common.get("seed") if isinstance(common, Mapping) else getattr(common, "seed", None)
    return seed if isinstance(seed, int) else None


def _check_seeds(seeds: Mapping[int, Path]) -> None:
    """Raise UserError if there are several seeds."""
    if len(seeds) > 1:
        (seed_a, path_a), (seed_b, path_b) = seeds.items()
        raise UserError(
            f"{path_a} was trained with seed {seed_a}, and {path_b} with seed {seed_b}. Average "
            "checkpoints of one training only."
        )


def _divide(total: Tensor, count: int) -> None:
    """Divide a sum in place; integers are rounded down."""
    if total.is_floating_point() or total.is_complex():
        total.div_(count)
    else:
        total.copy_(torch.div(total, count, rounding_mode="floor"))


def _check_parameters(model: State, shapes: Mapping[str, torch.Size], path: Path) -> None:
    """Raise UserError for a model with other parameters, or with other shapes."""
    for key in [*shapes, *model]:
        if key not in model or key not in shapes:
            relation = "lacks" if key not in model else "alone has"
            raise UserError(
                f"{path} {relation} the parameter {key}: it belongs to another model than the checkpoints "
                f"before it. Average checkpoints of one training only."
            )
        if model[key].shape != shapes[key]:
            raise UserError(
                f"{path}: {key} has shape {list(model[key].shape)}, but {list(shapes[key])} in the "
                f"checkpoints before it. Average checkpoints of one architecture and one dictionary only."
            )


def numbered_checkpoints(folder: Path, by_updates: bool = False) -> list[tuple[int, Path]]:
    """A folder's numbered checkpoints, the oldest first.

    Args:
        folder: fairseq's --save-dir.
        by_updates: whether the files checkpoint_E_U.pt are listed by update U, instead of the files
            checkpointE.pt by epoch E.

    Returns:
        (epoch, file) or (update, file) for each checkpoint.
    """
    pattern = _UPDATE_NAME if by_updates else _EPOCH_NAME
    numbered = []
    for path in folder.glob("checkpoint*.pt"):
        match = pattern.fullmatch(path.name)
        if match:
            numbered.append((int(match[1]), path))
    return sorted(numbered)


def last_checkpoints(
    folder: Path, number: int, by_updates: bool = False, upper_bound: int | None = None
) -> list[Path]:
    """The newest numbered checkpoints in a folder, oldest first.

    Args:
        folder: fairseq's --save-dir.
        number: the number of checkpoints.
        by_updates: whether updates are numbered instead of epochs, as for `numbered_checkpoints`.
        upper_bound: later epochs or updates are left out; None: none.

    Raises:
        UserError: if there are fewer checkpoints, or if the folder does not exist.
    """
    if not folder.is_dir():
        raise UserError(
            f"--inputs {folder} is not a folder, which --num-epoch-checkpoints and the like need."
        )
    paths = []
    for position, path in numbered_checkpoints(folder, by_updates):
        if upper_bound is None or position <= upper_bound:
            paths.append(path)
    if len(paths) < number:
        kind = "update" if by_updates else "epoch"
        bound = "" if upper_bound is None else f" up to {kind} {upper_bound}"
        names = ", ".join(path.name for path in paths) or "none"
        raise UserError(
            f"{folder} holds {len(paths)} {kind} checkpoints{bound} ({names}), but {number} are to be "
            f"averaged. Train longer, ask for fewer, or keep more (--keep-last-epochs)."
        )
    return paths[len(paths) - number :]


def shared_storage(model: State) -> dict[str, str]:
    """The first of the parameters that share storage, by the name of each.

    Args:
        model: name of a parameter → its value.

    Returns:
        Name of a parameter → name of the first parameter that is the same view of the same storage.
    """
    names_by_view: dict[tuple, str] = {}
    first_names = {}
    for name, tensor in model.items():
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first_names[name] = names_by_view.setdefault(view, name) if tensor.numel() else name
    return first_names


def _widened(tensor: Tensor, copy: bool = False) -> Tensor:
    """The tensor in the dtype of the sum: float32, but float64 and integers stay as they are."""
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.float32 if narrow else tensor.dtype, copy=copy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq average`: those of fairseq's scripts/average_checkpoints.py."""
    parser.add_argument(
        "--inputs",
        nargs="+",
        required=True,
        type=Path,
        help="checkpoint files, or one folder of checkpoints",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="the averaged checkpoint"
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite an existing FILE (never an input)"
    )
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument(
        "--num-epoch-checkpoints",
        type=int,
        metavar="N",
        help="average the last N files checkpointE.pt",
    )
    numbers.add_argument(
        "--num-update-checkpoints",
        type=int,
        metavar="N",
        help="average the last N files checkpoint_E_U.pt",
    )
    parser.add_argument(
        "--checkpoint-upper-bound",
        type=int,
        metavar="M",
        help="use nothing later than this epoch or update",
    )


def _requested_checkpoints(args: argparse.Namespace) -> list[Path]:
    """The files of --inputs, or the last ones of its folder. Raise UserError for flags that do not fit."""
    flag, number = "--num-epoch-checkpoints", args.num_epoch_checkpoints
    by_updates = args.num_update_checkpoints is not None
    if by_updates:
        flag, number = "--num-update-checkpoints", args.num_update_checkpoints
    if number is None:
        if args.checkpoint_upper_bound is not None:
            raise UserError(
                f"--checkpoint-upper-bound chooses among the files of a folder: it needs {flag}."
            )
        for path in args.inputs:
            if path.is_dir():
                raise UserError(
                    f"--inputs {path} is a folder: say with {flag} how many of its checkpoints."
                )
        return args.inputs
    if number < 2:
        raise UserError(f"{flag} {number}: an average needs at least two checkpoints.")
    if len(args.inputs) != 1:
        raise UserError(f"--inputs takes one folder beside {flag}, not {len(args.inputs)}.")
    return last_checkpoints(args.inputs[0], number, by_updates, args.checkpoint_upper_bound)


def run(args: argparse.Namespace) -> int:
    """Average and write the result, or nothing."""
    paths = _requested_checkpoints(args)
    inputs = list(paths)
    for folder in filter(Path.is_dir, args.inputs):
        inputs += folder.glob("checkpoint*.pt")
    refuse_overwriting(args.output, inputs, "--output")
    refuse_existing(args.output, args.force, "--output")
    save_checkpoint(average_checkpoints(paths), args.output)
    print(f"averaged {len(paths)} checkpoints into {args.output}: {', '.join(map(str, paths))}")
    return 0
