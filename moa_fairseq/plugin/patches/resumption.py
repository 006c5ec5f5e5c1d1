"""A training that goes on: it is the same training, and keeps its patience and its goal."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.table import patch

_MOST_DIFFERENCES = 8  # in a message
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_NUMBERS = ("lr", "betas", "eps", "weight_decay", "momentum")
_RESUME = "test_resume.py::"
_PATIENCE = f"{_RESUME}test_patience_goes_on_where_it_was"


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


def _differences(state: dict[str, Any], model: Any) -> list[str]:
    """The model's own flags whose values in the checkpoint differ from this command's, as phrases."""
    saved = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    before = _as_dict(saved)
    now = _as_dict(model)
    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY[now.get("arch") or now["_name"]].add_args(parser)
    names = ["arch", *(action.dest for action in parser._actions if "drop" not in action.dest)]
    differences = []
    for name in dict.fromkeys(names):
        if name in before and name in now and str(before[name]) != str(now[name]):
            flag = f"--{name.replace('_', '-')}"
            differences.append(f"{flag} was {before[name]} and is {now[name]}")
    return differences


def _as_dict(settings: Any) -> dict[str, Any]:
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
    """Whether the state that an optimizer has loaded can belong to its parameters: torch does not check."""
    for parameter, state in optimizer.state.items():
        if not all(_value_fits(name, value, parameter) for name, value in state.items()):
            return False
    return not any(
        isinstance(group.get(name), str) for group in optimizer.param_groups for name in _NUMBERS
    )


def _value_fits(name: str, value: Any, parameter: torch.Tensor) -> bool:
    if not torch.is_tensor(value):
        return not isinstance(value, str) and (value is None or name not in _MOMENTS)
    if name in _MOMENTS and value.shape != parameter.shape:
        return False
    # Flattened parameters (--fp16) have whatever length the model's have together.
    return parameter.dim() != 1 or value.numel() in (1, parameter.numel())


@patch(
    "fairseq_cli.train:train", f"{_RESUME}test_a_training_at_its_goal_makes_no_further_update", None
)
def end_at_the_goal() -> None:
    """Make no update if a training is resumed at its last update.

    A training that resumes at its last update (--max-update) makes one more update before it ends.
    """
    program = _program()
    original = program.get("train")
    if original is None:
        return

    def train(cfg: Any, trainer: Any, *args: Any, **options: Any) -> Any:
        if trainer.get_num_updates() >= (cfg.optimization.max_update or math.inf):
            return [None], True
        return original(cfg, trainer, *args, **options)

    program["train"] = train


@patch("fairseq.trainer:Trainer.save_checkpoint", _PATIENCE)
def save_patience(save: Callable, trainer: Any, filename: str, extra_state: dict[str, Any]) -> Any:
    """Save the count of --patience with the checkpoint.

    --patience starts from zero after each restart, so that an interrupted training takes longer: fairseq
    keeps the count at its function `should_stop_early`.
    """
    stop: Any = _program().get("should_stop_early")
    if hasattr(stop, "num_runs"):
        extra_state["patience"] = {"best": float(stop.best), "num_runs": stop.num_runs}
    return save(trainer, filename, extra_state)


@patch("fairseq.checkpoint_utils:load_checkpoint", _PATIENCE)
def load_patience(load: Callable, cfg: Any, trainer: Any, **options: Any) -> Any:
    """Restore the count of --patience from the checkpoint.

    The count of --patience continues, unless the training starts over, or fairseq also resets its best value.
    """
    extra_state, epoch_itr = load(cfg, trainer, **options)
    stop = _program().get("should_stop_early")
    count = (extra_state or {}).get("patience")
    forgets = cfg.reset_meters or cfg.reset_optimizer
    if stop and isinstance(count, dict) and trainer.get_num_updates() and not forgets:
        stop.best = count["best"]
        stop.num_runs = count["num_runs"]
    return extra_state, epoch_itr


def _program() -> dict[str, Any]:
    """The global names of fairseq-train, run as a program or as a module; {} in another program."""
    for name in ("__main__", "fairseq_cli.train"):
        function = getattr(sys.modules.get(name), "should_stop_early", None)
        if function:
            return inspect.unwrap(function).__globals__
    return {}
