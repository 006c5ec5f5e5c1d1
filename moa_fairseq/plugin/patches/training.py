"""The trainer: what it tells a task and a model, and what it does with its own mistakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from fairseq.models import FairseqEncoder

from moa_fairseq.layers.running_statistics import forgetting, running_statistics_of
from moa_fairseq.plugin.patches.table import patch

_COMPAT = "plugin/test_fairseq_compat.py::"
_CONTEXT = (
    "plugin/tasks/test_resumed_context.py::test_a_resumed_context_equals_an_uninterrupted_one"
)


@patch(
    "fairseq.trainer:Trainer.train_step",
    "plugin/tasks/test_bcd.py::test_a_whole_update_is_a_g_step_and_then_an_f_step",
)
def announce_updates(
    train_step: Callable, trainer: Any, samples: Any, *args: Any, **options: Any
) -> Any:
    """Call `task.before_update(trainer, samples)` before an update and `model.set_num_updates` after it.

    fairseq passes a task one micro-batch at a time; a task with `before_update(trainer, samples)` now gets a
    whole update before it begins. The model is called after each update, so that a checkpoint saved between
    updates is complete and holds nothing of an update that overflowed.
    """
    for statistics in running_statistics_of(trainer.get_model()):
        statistics.forget()  # an update that overflowed and was skipped may have left some
    before_update = getattr(trainer.task, "before_update", None)
    if before_update is not None:
        before_update(trainer, samples)
    result = train_step(trainer, samples, *args, **options)
    model = trainer.get_model()
    if hasattr(model, "set_num_updates"):
        model.set_num_updates(trainer.get_num_updates())
    return result


@patch(
    "fairseq.tasks.fairseq_task:FairseqTask.train_step",
    "plugin/tasks/test_observed_updates.py::test_routers_count_what_an_update_was_made_of",
)
def observe_no_fillers(
    train_step: Callable,
    task: Any,
    sample: Any,
    model: Any,
    criterion: Any,
    optimizer: Any,
    update_num: int,
    ignore_grad: bool = False,
) -> Any:
    """Leave the tokens of a repeated micro-batch out of the running statistics.

    A worker that has no micro-batch left runs an old one again, only to take part; routers and gates would
    count its tokens.
    """
    with forgetting(running_statistics_of(model)) if ignore_grad else contextlib.nullcontext():
        return train_step(task, sample, model, criterion, optimizer, update_num, ignore_grad)


@patch(
    "fairseq.nan_detector:NanDetector.add_hooks",
    f"{_COMPAT}test_the_module_that_made_a_nan_is_named",
)
def search_nan_without_encoders(add_hooks: Callable, detector: Any, module: Any) -> None:
    """Set no backward hook on an encoder in the search for NaN.

    The search for the module that made a NaN ends in a StopIteration: an encoder returns lists of tensors, in
    which torch's backward hooks find no tensor.
    """
    backward = detector.backward
    detector.backward = backward and not isinstance(module, FairseqEncoder)
    add_hooks(detector, module)
    detector.backward = backward


@patch(
    "fairseq.modules.dynamic_convolution:DynamicConv_scripatable.reset_parameters",
    f"{_COMPAT}test_dynamic_convolutions_leave_no_weight_unfilled",
)
def fill_the_unused_bias(reset_parameters: Callable, convolution: Any) -> None:
    """Fill the bias that a dynamic convolution does not use with zeros.

    A dynamic convolution without a bias has an uninitialised weight of that name: arbitrary memory is saved,
    sometimes NaN, and such a checkpoint is an error.
    """
    torch.nn.init.zeros_(convolution.conv_bias)
    reset_parameters(convolution)


@patch("fairseq.models.ema:EMA.__init__", f"{_COMPAT}test_a_moving_average_of_a_model_with_counts")
def average_no_counts(
    init: Callable, ema: Any, model: Any, config: Any, device: Any = None, skip_keys: Any = None
) -> None:
    """Copy the integers of a model into its moving average instead of averaging them.

    --store-ema multiplies every tensor of a model by a fraction, and torch refuses that for integers: the
    number of batches that a batch normalisation has seen.
    """
    integers = set(skip_keys or ())
    for key, value in model.state_dict().items():
        if torch.is_tensor(value) and not value.is_floating_point():
            integers.add(key)
    init(ema, model, config, device, integers)


@patch("fairseq.checkpoint_utils:save_checkpoint", _CONTEXT)
def announce_saves(
    save: Callable, cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, **options: Any
) -> Any:
    """Call `task.before_save(trainer, epoch_itr)` in every process before a checkpoint is saved.

    fairseq saves only the first process's task state; a carried context is spread over all processes.
    """
    before_save = getattr(trainer.task, "before_save", None)
    if before_save is not None and not cfg.no_save:
        before_save(trainer, epoch_itr)
    return save(cfg, trainer, epoch_itr, *args, **options)


@patch("fairseq.checkpoint_utils:load_checkpoint", _CONTEXT)
def announce_restarts(load: Callable, cfg: Any, trainer: Any, **options: Any) -> Any:
    """Call `task.after_load(trainer, epoch_itr, extra_state)` after a checkpoint was loaded.

    fairseq passes a task its saved state without the model or the place in the epoch.
    """
    extra_state, epoch_itr = load(cfg, trainer, **options)
    after_load = getattr(trainer.task, "after_load", None)
    if extra_state is not None and after_load is not None:
        after_load(trainer, epoch_itr, extra_state)
    return extra_state, epoch_itr
