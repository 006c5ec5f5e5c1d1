"""Files that torch reads and that are not fairseq checkpoints all the same: one paragraph says what is wrong.

What a checkpoint says is looked at before fairseq works with it, and any exception of fairseq's that is left
becomes a UserError. A model is not built if it is far larger than the weights beside its settings: it would
fill the memory, or take hours.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from omegaconf import open_dict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moa_fairseq.errors import UserError
from moa_fairseq.files import refuse_irregular
from moa_fairseq.plugin.patches.table import patch

MAX_SETTINGS = 100_000  # values in a checkpoint's configuration: fairseq's have some hundreds
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
_TEST = "plugin/patches/test_malformed_checkpoints.py::test_a_malformed_checkpoint_gets_a_paragraph"
_REMEDY = "Use another checkpoint, or the file that this one was copied from."
_OF_A_CHECKPOINT = (
    "Its settings or weights were changed, were saved by other code, or do not fit the data or the flags of "
    f"this command. {_REMEDY}"
)


def check_checkpoint(state: Any, name: str, size: int) -> None:
    """Check that `state`, read from a file of `size` bytes, can be one of fairseq's checkpoints.

    Weights are dense tensors that the file holds, all finite; the configuration is made of mappings.

    Args:
        state: what the file holds.
        name: the file's name, for the message.
        size: the file's size in bytes.

    Raises:
        UserError: names the first part that cannot be fairseq's.
    """

    def refuse(reason: str) -> NoReturn:
        raise UserError(f"Checkpoint {name} cannot have been saved by fairseq: {reason}. {_REMEDY}")

    if (
        not isinstance(state, dict)
        or not isinstance(state.get("model"), dict)
        or not state["model"]
    ):
        raise UserError(f"{name} is not a fairseq checkpoint: it contains no model. {_REMEDY}")
    _check_tensors(state, size, refuse)
    for key, value in state["model"].items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            refuse(f"the weight {str(key)[:80]} is of the type {type(value).__name__}")
        # A single truth value is a flag that a module saves.
        if value.dtype not in _DTYPES and (value.dtype != torch.bool or value.dim()):
            refuse(f"the weight {key[:80]} is made of {value.dtype}")
    check_weights(
        state["model"],
        f"Checkpoint {name} holds",
        "Use an earlier checkpoint of it, if there is one.",
    )
    cfg = state.get("cfg")
    args = state.get("args")
    _check_size_of_settings([cfg, args], refuse)
    if args is not None and not isinstance(args, argparse.Namespace):
        refuse(f"its settings (args) are of the type {type(args).__name__}")
    if cfg is not None:
        if not isinstance(cfg, dict) or not all(isinstance(key, str) for key in cfg):
            refuse(
                f"its settings (cfg) are of the type {type(cfg).__name__}, or a name in them is not text"
            )
        for group in ("model", "task"):
            if not isinstance(cfg.get(group, {}), (dict, argparse.Namespace)):
                refuse(f"cfg.{group} is of the type {type(cfg[group]).__name__}")


def check_weights(weights: Mapping[str, Tensor], beginning: str, remedy: str) -> None:
    """Check that all weights are finite.

    Args:
        weights: the weights by name.
        beginning, remedy: how the message begins and ends; between them it names the first such weight.

    Raises:
        UserError: if a weight is NaN or infinite.
    """
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.element_size() == 1:  # float8 lacks isfinite
            weight = weight.float()
        if not weight.isfinite().all():
            kind = "NaN" if weight.isnan().any() else "infinity"
            raise UserError(
                f"{beginning} {kind} in {name[:80]}: its training had diverged. {remedy}"
            )


def _parts(value: Any) -> list[Any]:
    """The items of a container, or the values of a mapping; no items for anything else."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        value = value.values()
    if not isinstance(value, (str, bytes, Tensor)) and hasattr(value, "__iter__"):
        return list(value)
    return []


def _check_tensors(state: dict[Any, Any], size: int, refuse: Callable[[str], NoReturn]) -> None:
    """Refuse tensors that together are larger than the file: tensors that repeat numbers or hold none."""
    visited: set[int] = set()
    pending: list[Any] = [state]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            dense = value.layout == torch.strided and not value.is_nested and not value.is_quantized
            if not dense or value.device.type == "meta":
                refuse(f"it holds a tensor that is not dense ({value.layout}, on {value.device})")
            storage = value.untyped_storage()
            if storage.data_ptr() not in visited:
                size -= storage.nbytes()
            visited.add(storage.data_ptr())
            if value.numel() * value.element_size() > storage.nbytes() or size < 0:
                refuse(
                    f"a tensor of the shape {list(value.shape)} is larger than what the file holds"
                )
        elif id(value) not in visited and (parts := _parts(value)):
            visited.add(id(value))
            pending += parts


def _check_size_of_settings(values: list[Any], refuse: Callable[[str], NoReturn]) -> None:
    """Refuse settings of too many values. A list that stands in ten places counts ten times, because
    OmegaConf copies it for each place.
    """
    pending = list(values)
    for _ in range(MAX_SETTINGS):
        if not pending:
            return
        pending += _parts(pending.pop())
    refuse(f"its settings have more than {MAX_SETTINGS:,} values, or hold themselves")


# ---- building a model


class Allowance(TorchDispatchMode):
    """A context in which a model may be built that is at most TIMES as large as the weights of its
    checkpoint.

    Args:
        weights: the weights that are already in memory; `grant` adds others.

    Raises:
        ValueError: inside the context, from the operation that would make the model larger.
    """

    TIMES = 16
    FREE_NUMBERS = 1 << 26  # beyond TIMES, for the tables of positions of small models
    FREE_TENSORS = 1000  # beyond TIMES; a million empty layers take hours as well
    current: ClassVar[list[Allowance]] = []

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.numbers = self.FREE_NUMBERS
        self.tensors = self.FREE_TENSORS
        self.grant(weights)

    def __enter__(self) -> Allowance:
        self.current.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.current.remove(self)
        super().__exit__(*error)

    def grant(self, weights: Iterable[Tensor]) -> None:
        """Add room for one more model of these weights."""
        for weight in weights:
            self.numbers += self.TIMES * weight.numel()
            self.tensors += self.TIMES

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        sizes = args[0] if args and isinstance(args[0], (list, tuple)) else args[-1:]
        needed = 0
        if (
            args
            and not isinstance(args[0], Tensor)
            and all(isinstance(size, (int, float)) for size in sizes)
        ):
            # a new tensor: empty([3, 4]), arange(7)
            self.numbers -= max(math.prod(sizes), 0)
            self.tensors -= 1
        else:
            shapes = [value.shape for value in args if isinstance(value, Tensor)]
            # The result has the broadcast shape, except in operations that do not work number by number.
            with contextlib.suppress(RuntimeError):
                shapes = [torch.broadcast_shapes(*shapes)]
            needed = max((math.prod(shape) for shape in shapes), default=0)
        if needed > self.numbers or self.numbers < 0 or self.tensors < 0:
            raise ValueError(
                f"{func} would make the model of these settings far larger than the weights in the "
                "file, so the model was not built"
            )
        return func(*args, **(kwargs or {}))


# ---- what fairseq raises


@contextlib.contextmanager
def explaining(what: str, path: str = "", remedy: str = _OF_A_CHECKPOINT) -> Iterator[None]:
    """A context in which any exception becomes a UserError.

    The message consists of `what`, the exception, its place in the code and the remedy.

    Args:
        what: begins the message.
        path: the checkpoint's path. A UserError that names it is raised unchanged; with "" every UserError
            is.
        remedy: ends the message, unless the exception is a UserError.

    Raises:
        UserError: in place of the exception.
    """
    try:
        yield
    except UserError as error:  # a UserError that does not name the checkpoint gets its name
        if path in str(error):
            raise
        raise UserError(f"{what}: {error}") from error
    except Exception as error:  # settings of unknown origin can cause any error
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if "/torch/" not in f.filename), frames[-1])
        origin = "/".join(Path(place.filename).parts[-3:])
        reason = " ".join(str(error).split())[:400]
        raise UserError(
            f"{what}: {type(error).__name__}: {reason} (in {origin}, line {place.lineno}). {remedy}"
        ) from error


@patch("fairseq.checkpoint_utils:load_checkpoint_to_cpu", _TEST)
def explain_loads(load: Callable, path: str, *args: Any, **options: Any) -> Any:
    """Load a checkpoint, and turn any exception into a UserError.

    fairseq assumes a checkpoint's content, and ends in a traceback if it is missing; it hangs at a named
    pipe, and fills the memory from a device.

    Raises:
        UserError: in all of these cases.
    """
    refuse_irregular(path)
    with explaining(f"Checkpoint {path} cannot be loaded", str(path)):
        state = load(path, *args, **options)
    for allowance in Allowance.current[-1:]:
        allowance.grant(state["model"].values())
    return state


@patch("fairseq.checkpoint_utils:load_model_ensemble_and_task", _TEST)
def explain_models(load: Callable, filenames: list[str], *args: Any, **options: Any) -> Any:
    """Build the models of checkpoints within an `Allowance`, and turn any exception into a UserError.

    fairseq builds any model that the settings describe, and impossible settings end in a traceback.

    Raises:
        UserError: if settings are impossible, or a model would be far larger than its weights or of no use.
    """
    state = options.get("state") or {}
    names = ", ".join(map(str, filenames))
    with explaining(f"The model of {names} cannot be loaded", names):
        with Allowance(state.get("model", {}).values()):
            models, cfg, task = load(filenames, *args, **options)
        _check_use(task, models)
        with open_dict(cfg):
            # Commands read these two settings without checking that they exist.
            cfg.update(task=cfg.get("task"), criterion=cfg.get("criterion"))
    return models, cfg, task


def _check_use(task: Any, models: list[Any]) -> None:
    """Raise ValueError for settings that fairseq reads only when the model is used."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, FairseqDropout) and not isinstance(module.p, (int, float)):
                raise ValueError(f"the dropout of {name} is {module.p!r:.80}")
    for part in (task, *models):
        limits = None
        with contextlib.suppress(Exception):  # not every task and model has limits
            limits = part.max_positions()
        for limit in limits if isinstance(limits, (list, tuple)) else [limits]:
            if isinstance(limit, (int, float)) and not limit > 0:
                raise ValueError(
                    f"the longest sentence (such as --max-source-positions) is {limit}"
                )


@patch(
    "fairseq.models.fairseq_model:BaseFairseqModel.load_state_dict",
    "plugin/patches/test_generation.py::test_weights_of_another_kind_are_refused",
)
def refuse_other_kinds(
    load: Callable, model: Any, state: dict[str, Any], *args: Any, **options: Any
) -> Any:
    """Refuse a weight of integers or complex numbers for a parameter of real numbers, and the reverse.

    torch silently converts integers and complex numbers into weights.

    Raises:
        UserError: names the first such weight.
    """
    for name, parameter in model.named_parameters():
        weight = state.get(name)
        if (
            isinstance(weight, Tensor)
            and weight.is_floating_point() != parameter.is_floating_point()
        ):
            reason = f"is made of {weight.dtype}, and no training saves that"
            raise UserError(f"The weight {name[:80]} {reason}. {_REMEDY}")
    return load(model, state, *args, **options)


@patch("fairseq.criterions:build_criterion", _TEST)
def explain_criteria(build: Callable, settings: Any, task: Any, *args: Any, **options: Any) -> Any:
    """Build a criterion, and turn any exception into a UserError.

    fairseq-validate builds any criterion that a checkpoint's settings describe.

    Raises:
        UserError: if no criterion can be built from the settings.
    """
    remedy = (
        "Change these flags; fairseq-validate has them from its checkpoint: then use another one."
    )
    with explaining("The criterion cannot be built from its settings", remedy=remedy):
        criterion = build(settings, task, *args, **options)
        if criterion is None:
            raise ValueError("there are none")
    return criterion


@patch(
    "fairseq.trainer:Trainer.load_checkpoint",
    "plugin/patches/test_checkpoint_writing.py::test_what_is_no_file_is_refused_before_it_is_opened",
)
def explain_resumption(
    load: Callable, trainer: Any, filename: str, *args: Any, **options: Any
) -> Any:
    """Load the state of a training, and turn any exception into a UserError.

    fairseq silently starts a new training if checkpoint_last.pt is not a regular file, and a damaged state of
    a training ends in a traceback, at once or after hours.

    Raises:
        UserError: in both cases.
    """
    refuse_irregular(filename)
    with explaining(f"The training cannot go on from {filename}", filename):
        extra = load(trainer, filename, *args, **options)
        if extra is not None:
            _check_place(trainer.get_num_updates(), extra)
    return extra


def _check_place(updates: Any, extra: dict[str, Any]) -> None:
    """Raise ValueError for a count or a best loss that would end the training only when it is used."""
    place = extra["train_iterator"]
    counts = {"num_updates": updates, "epoch": place.get("epoch", 0)}
    counts["iterations_in_epoch"] = place.get("iterations_in_epoch", 0)
    for name, value in counts.items():
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"{name} is {value!r:.80}")
    for name in ("best", "previous_training_time"):
        value = extra.get(name) or 0.0
        # Several processes sum up their training times in a tensor.
        if torch.is_tensor(value) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {extra[name]!r:.80}")
