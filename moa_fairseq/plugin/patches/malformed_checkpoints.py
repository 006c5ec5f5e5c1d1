"""Files that torch reads and that are not fairseq checkpoints all the same: one paragraph says what is wrong.

Any exception of fairseq's that `check_checkpoint` has not prevented becomes a UserError. A model is not built
if it is far larger than the weights beside its settings: it would fill the memory, or take hours.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from omegaconf import open_dict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moa_fairseq.errors import UserError
from moa_fairseq.files import refuse_irregular
from moa_fairseq.plugin.patches.checkpoint_content import REMEDY
from moa_fairseq.plugin.patches.table import patch

_TEST = "plugin/patches/test_malformed_checkpoints.py::test_a_malformed_checkpoint_gets_a_paragraph"
_REMEDY_OF_SETTINGS = (
    "Its settings or weights were changed, were saved by other code, or do not fit the data or the flags of "
    f"this command. {REMEDY}"
)


class Allowance(TorchDispatchMode):
    """A context in which a model may be built that is at most TIMES as large as its checkpoint's weights.

    Args:
        weights: the weights that are already in memory; `grant` adds others.

    Raises:
        ValueError: inside the context, from the operation that would make the model larger.
    """

    TIMES = 16
    FREE_NUMBERS = 1 << 26  # beyond TIMES, for the tables of positions of small models
    FREE_TENSORS = 1000  # beyond TIMES; a million empty layers take hours as well
    entered: ClassVar[list[Allowance]] = []

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.numbers_left = self.FREE_NUMBERS
        self.tensors_left = self.FREE_TENSORS
        self.grant(weights)

    def __enter__(self) -> Allowance:
        self.entered.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered.remove(self)
        super().__exit__(*error)

    def grant(self, weights: Iterable[Tensor]) -> None:
        """Add room for one more model of these weights."""
        for weight in weights:
            self.numbers_left += self.TIMES * weight.numel()
            self.tensors_left += self.TIMES

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        size = _size_of_new_tensor(args)
        needed = 0
        if size is None:
            needed = _size_of_result(args)
        else:
            self.numbers_left -= size
            self.tensors_left -= 1
        if needed > self.numbers_left or self.tensors_left < 0:
            raise ValueError(
                f"{func} would make the model of these settings far larger than the weights in the "
                "file, so the model was not built"
            )
        return func(*args, **(kwargs or {}))


def _size_of_new_tensor(args: Any) -> Any:
    """How many numbers an operation such as empty([3, 4]) or arange(7) makes; None if it reads tensors."""
    if not args or isinstance(args[0], Tensor):
        return None
    sizes = args[0] if isinstance(args[0], (list, tuple)) else args[-1:]
    if not all(isinstance(size, (int, float)) for size in sizes):
        return None
    return max(math.prod(sizes), 0)


def _size_of_result(args: Any) -> int:
    """How many numbers an operation on tensors makes, as far as their shapes tell."""
    shapes = [value.shape for value in args if isinstance(value, Tensor)]
    # The result has the broadcast shape, except in operations that do not work number by number.
    with contextlib.suppress(RuntimeError):
        shapes = [torch.broadcast_shapes(*shapes)]
    return max((math.prod(shape) for shape in shapes), default=0)


@contextlib.contextmanager
def explaining(
    what: str, path: str | None = None, remedy: str = _REMEDY_OF_SETTINGS
) -> Iterator[None]:
    """A context in which any exception becomes a UserError.

    The message consists of `what`, the exception, its place in the code and the remedy.

    Args:
        what: begins the message.
        path: the checkpoint's path. A UserError that names it is raised unchanged; with None every UserError
            is.
        remedy: ends the message, unless the exception is a UserError.

    Raises:
        UserError: in place of the exception.
    """
    try:
        yield
    except UserError as error:  # one that does not name the checkpoint gets its name
        if path is None or path in str(error):
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
    if Allowance.entered:
        Allowance.entered[-1].grant(state["model"].values())
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
        _check_limits(task)
        for model in models:
            _check_limits(model)
            _check_dropouts(model)
        with open_dict(cfg):
            # Commands read these two settings without checking that they exist.
            cfg.update(task=cfg.get("task"), criterion=cfg.get("criterion"))
    return models, cfg, task


def _check_limits(part: Any) -> None:
    """Raise ValueError if a task or a model takes no token; fairseq reads its limits only in use."""
    try:
        limits = part.max_positions()
    except Exception:  # not every task and model has limits
        return
    for limit in limits if isinstance(limits, (list, tuple)) else [limits]:
        if isinstance(limit, (int, float)) and not limit > 0:
            raise ValueError(f"the longest sentence (such as --max-source-positions) is {limit}")


def _check_dropouts(model: Any) -> None:
    """Raise ValueError for a dropout that is no number, which fairseq reads only in use."""
    for name, module in model.named_modules():
        if isinstance(module, FairseqDropout) and not isinstance(module.p, (int, float)):
            raise ValueError(f"the dropout of {name} is {module.p!r:.80}")


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
            raise UserError(f"The weight {name[:80]} {reason}. {REMEDY}")
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
            _check_progress(trainer.get_num_updates(), extra)
    return extra


def _check_progress(updates: Any, extra: dict[str, Any]) -> None:
    """Raise ValueError for a count or a best loss that would end the training only when it is used."""
    place = extra["train_iterator"]
    counts = {
        "num_updates": updates,
        "epoch": place.get("epoch", 0),
        "iterations_in_epoch": place.get("iterations_in_epoch", 0),
    }
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
