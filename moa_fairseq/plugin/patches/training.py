"""The trainer and the task: what they are told, what they load, and how they report an error."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqEncoder

from moa_fairseq.errors import UserError
from moa_fairseq.layers.running_statistics import forgetting, running_statistics_of
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger(__name__)

_MOST_DIFFERENCES = 8  # in a message
_COMPAT = "plugin/test_fairseq_compat.py::"
_RESUME = "test_resume.py::"
_BEST = "plugin/patches/test_best_checkpoint.py::"
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


@patch("fairseq.checkpoint_utils:save_checkpoint", f"{_BEST}test_nan_is_no_best")
def nan_is_no_best(
    save: Callable,
    cfg: Any,
    trainer: Any,
    epoch_itr: Any,
    val_loss: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Save a checkpoint whose validation is NaN, or infinitely good, without that value.

    A validation of NaN becomes fairseq's best value, and then any other value is better: a worse model
    replaces checkpoint_best.pt.
    """
    if val_loss is not None and not _can_be_best(val_loss, cfg):
        logger.warning(
            f"the validation's {cfg.best_checkpoint_metric} is {val_loss}: this checkpoint is never the best"
        )
        val_loss = None
    return save(cfg, trainer, epoch_itr, val_loss, *args, **options)


@patch(
    "fairseq.checkpoint_utils:load_checkpoint", f"{_BEST}test_a_best_value_of_nan_is_not_restored"
)
def restore_a_number(load: Callable, cfg: Any, trainer: Any, **options: Any) -> Any:
    """Replace a best value of NaN that was loaded by the value in checkpoint_best.pt.

    Older checkpoints have NaN as the best value: now the value comes from checkpoint_best.pt.
    """
    result = load(cfg, trainer, **options)
    save = checkpoint_utils.save_checkpoint
    if not _can_be_best(getattr(save, "best", 0.0), cfg):
        path = os.path.join(cfg.save_dir, f"checkpoint_best{trainer.checkpoint_suffix}.pt")
        state = load_checkpoint(path) if os.path.exists(path) else {}
        del save.best
        best = state.get("extra_state", {}).get("val_loss")
        if best is not None and _can_be_best(best, cfg):
            save.best = best
    return result


@patch("fairseq_cli.*:should_stop_early", f"{_BEST}test_nan_does_not_end_a_training_early")
def nan_is_the_worst(should_stop_early: Callable, cfg: Any, valid_loss: Any) -> bool:
    """Count a validation of NaN as the worst value.

    If the first validation is NaN, no later one is better: --patience ends the training.
    """
    if valid_loss is not None and not _can_be_best(valid_loss, cfg.checkpoint):
        valid_loss = -math.inf if cfg.checkpoint.maximize_best_checkpoint_metric else math.inf
    return should_stop_early(cfg, valid_loss)


def _can_be_best(value: float, cfg: Any) -> bool:
    """Whether another value could be better than this one: none is better than NaN or the best infinity."""
    # A caller may have fewer settings than fairseq's commands.
    maximize = getattr(cfg, "maximize_best_checkpoint_metric", False)
    if maximize:
        return value < math.inf
    return value > -math.inf


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


@patch(
    "fairseq.trainer:Trainer.load_checkpoint",
    f"{_RESUME}test_another_architecture_is_refused_and_overwrites_nothing",
)
def name_other_settings(
    load: Callable, trainer: Any, filename: str, *args: Any, **options: Any
) -> Any:
    """Name the settings that differ if a checkpoint holds a model of another architecture.

    fairseq reports that the architectures do not match, but not in which setting.

    Raises:
        UserError: names the settings that differ; if none differs, it quotes torch.
    """
    try:
        return load(trainer, filename, *args, **options)
    # fairseq raises an Exception without a type of its own; the text tells it from others.
    except Exception as error:
        if "ensure that the architectures match" not in str(error):
            raise
        differences = _differences(load_checkpoint(filename), trainer.cfg.model)
        torchs_reason = " ".join(str(error.__context__).split())
        remedy = "choose another --save-dir"
        if trainer.cfg.checkpoint.finetune_from_model == filename:
            remedy = "leave --finetune-from-model out"
        raise UserError(
            f"{filename} holds a different model from this command's, and cannot be loaded: "
            f"{'; '.join(differences[:_MOST_DIFFERENCES]) or torchs_reason[:500]}. Give the flags of the "
            f"training that saved it; or, to train another model, {remedy}."
        ) from error


def _program() -> dict[str, Any]:
    """The global names of fairseq-train, run as a program or as a module; {} in another program."""
    for name in ("__main__", "fairseq_cli.train"):
        function = getattr(sys.modules.get(name), "should_stop_early", None)
        if function:
            return inspect.unwrap(function).__globals__
    return {}


@patch(
    "fairseq_cli.train:train", f"{_RESUME}test_a_training_at_its_goal_makes_no_further_update", None
)
def end_at_the_goal() -> None:
    """Make no update if a training is resumed at its last update.

    A training that resumes at its last update (--max-update) makes one more update before it ends.
    """
    program = _program()
    if "train" not in program:
        return

    def train(cfg: Any, trainer: Any, *args: Any, **options: Any) -> Any:
        if trainer.get_num_updates() >= (cfg.optimization.max_update or math.inf):
            return [None], True
        return original(cfg, trainer, *args, **options)

    original = program["train"]
    program["train"] = train


_PATIENCE = f"{_RESUME}test_patience_goes_on_where_it_was"


@patch("fairseq.trainer:Trainer.save_checkpoint", _PATIENCE)
def save_patience(save: Callable, trainer: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    """Save the count of --patience with the checkpoint.

    --patience starts from zero after each restart, so that an interrupted training takes longer: the count is
    saved with the checkpoint.
    """
    count = vars(_program().get("should_stop_early", save))
    if "num_runs" in count:
        extra_state["patience"] = {"best": float(count["best"]), "num_runs": count["num_runs"]}
    return save(trainer, filename, extra_state)


@patch("fairseq.checkpoint_utils:load_checkpoint", _PATIENCE)
def load_patience(load: Callable, cfg: Any, trainer: Any, **options: Any) -> Any:
    """Restore the count of --patience from the checkpoint.

    The saved count of --patience is restored, unless the training starts over or fairseq also resets its best
    value.
    """
    extra_state, epoch_itr = load(cfg, trainer, **options)
    program = _program()
    count = (extra_state or {}).get("patience")
    forgets = cfg.reset_meters or cfg.reset_optimizer
    if program and isinstance(count, dict) and trainer.get_num_updates() and not forgets:
        program["should_stop_early"].best = count["best"]
        program["should_stop_early"].num_runs = count["num_runs"]
    return extra_state, epoch_itr


def _differences(state: dict[str, Any], model: Any) -> list[str]:
    """The model's own flags whose values in the checkpoint differ from this command's, as phrases."""
    saved = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    before = _by_name(saved)
    now = _by_name(model)
    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY[now.get("arch") or now["_name"]].add_args(parser)
    names = ["arch", *(action.dest for action in parser._actions if "drop" not in action.dest)]
    differences = []
    for name in dict.fromkeys(names):
        if name in before and name in now and str(before[name]) != str(now[name]):
            flag = f"--{name.replace('_', '-')}"
            differences.append(f"{flag} was {before[name]} and is {now[name]}")
    return differences


def _by_name(settings: Any) -> dict[str, Any]:
    return dict(settings.items()) if hasattr(settings, "items") else vars(settings)


@patch(
    "fairseq.trainer:Trainer.load_checkpoint",
    f"{_RESUME}test_a_joint_run_that_gave_its_gates_to_adam_goes_on_so",
)
def name_other_optimizers(
    load: Callable, trainer: Any, filename: str, *args: Any, **options: Any
) -> Any:
    """Refuse a checkpoint whose optimizer had other parameters.

    A checkpoint whose optimizer had other parameters ends in torch's ValueError, or is loaded wrongly if the
    sizes happen to fit.

    Raises:
        UserError: if the optimizer in the checkpoint had other parameters.
    """
    try:
        result = load(trainer, filename, *args, **options)
        fits = trainer._optimizer is None or _state_fits(trainer._optimizer.optimizer)
    except ValueError as error:  # torch's error is recognised by its text
        if "parameter group" not in str(error):
            raise
        fits = False
    if fits:
        return result
    raise UserError(
        f"{filename} holds an optimizer for other parameters than this run updates: resume "
        f"with the flags of its first run{getattr(trainer.task, 'optimizer_remedy', '')}, or keep only the "
        "model with --reset-optimizer --reset-lr-scheduler."
    )


def _state_fits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state is one of its parameters, in shapes and kinds: torch does not check."""
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            shape = value.shape if torch.is_tensor(value) else None
            is_moment = name in moments and value is not None
            if isinstance(value, str) or (is_moment and shape != parameter.shape):
                return False
            # flattened parameters (--fp16) have whatever length the model's have together
            sizes = (1, parameter.numel())
            if shape is not None and parameter.dim() == 1 and shape.numel() not in sizes:
                return False
    numbers = ("lr", "betas", "eps", "weight_decay", "momentum")
    return not any(
        isinstance(group.get(name), str) for group in optimizer.param_groups for name in numbers
    )
