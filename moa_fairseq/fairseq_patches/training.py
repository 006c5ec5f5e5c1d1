"""The trainer and the task: what they are told, what they load, and what they say of an error."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, Callable, Dict, List

import torch
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqEncoder

from moa_fairseq.attention.observers import forgetting, observers_of
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.checkpoint_files import load_checkpoint

_MOST = 8  # differences that are listed


def take_bf16_for_a_gpu(override_module_args: Callable, args: argparse.Namespace) -> Any:
    """The step that turns arguments into a config is the last one before `tpu` is read."""
    if getattr(args, "bf16", False) and torch.cuda.is_available():
        args.tpu = False
    return override_module_args(args)


def announce_updates(train_step: Callable, trainer: Any, samples: Any, *args: Any, **options: Any) -> Any:
    """The task is told before an update, and the model after it."""
    for observer in observers_of(trainer.get_model()):
        observer.forget()  # left by an update that overflowed and was skipped
    before_update = getattr(trainer.task, "before_update", None)
    if before_update is not None:
        before_update(trainer, samples)
    result = train_step(trainer, samples, *args, **options)
    model = trainer.get_model()
    if hasattr(model, "set_num_updates"):
        model.set_num_updates(trainer.get_num_updates())
    return result


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
    """Nothing observes a micro-batch that a worker runs only to take part."""
    with forgetting(observers_of(model)) if ignore_grad else contextlib.nullcontext():
        return train_step(task, sample, model, criterion, optimizer, update_num, ignore_grad)


def search_nan_without_encoders(add_hooks: Callable, detector: Any, module: Any) -> None:
    """The hooks that find the module which made a NaN: encoders get no backward hook."""
    backward = detector.backward
    detector.backward = backward and not isinstance(module, FairseqEncoder)
    add_hooks(detector, module)
    detector.backward = backward


def average_no_counts(
    init: Callable, ema: Any, model: Any, config: Any, device: Any = None, skip_keys: Any = None
) -> None:
    """Integers of the model are copied into a moving average, not averaged."""
    tensors = {key: value for key, value in model.state_dict().items() if torch.is_tensor(value)}
    integers = {key for key, value in tensors.items() if not value.is_floating_point()}
    init(ema, model, config, device, integers.union(skip_keys or ()))


def announce_saves(save: Callable, cfg: Any, trainer: Any, epoch_itr: Any, *args: Any, **options: Any) -> Any:
    """`task.before_save(trainer, epoch_itr)` runs in every process."""
    before_save = getattr(trainer.task, "before_save", None)
    if before_save is not None and not cfg.no_save:
        before_save(trainer, epoch_itr)
    return save(cfg, trainer, epoch_itr, *args, **options)


def announce_restarts(load: Callable, cfg: Any, trainer: Any, **options: Any) -> Any:
    """`task.after_load(trainer, epoch_itr, extra_state)` follows the loading of a checkpoint."""
    extra_state, epoch_itr = load(cfg, trainer, **options)
    after_load = getattr(trainer.task, "after_load", None)
    if extra_state is not None and after_load is not None:
        after_load(trainer, epoch_itr, extra_state)
    return extra_state, epoch_itr


def name_other_settings(load: Callable, trainer: Any, filename: str, *args: Any, **options: Any) -> Any:
    """A checkpoint of another model, to resume from or to fine-tune: the settings that differ are named."""
    try:
        return load(trainer, filename, *args, **options)
    except Exception as error:
        if "ensure that the architectures match" not in str(error):
            raise
        found = _differences(load_checkpoint(filename), trainer.cfg.model)
        torchs_reason = " ".join(str(error.__context__).split())
        raise UserError(
            f"{filename} holds another model than that of this command, and cannot be loaded: "
            f"{'; '.join(found[:_MOST]) or torchs_reason[:500]}. Give the flags that the checkpoint was "
            "made with; or, to train another model, choose another --save-dir."
        ) from error


def _differences(state: Dict[str, Any], model: Any) -> List[str]:
    """Each of the model's own flags whose value in the checkpoint is not that of this command."""
    before, now = (
        dict(settings.items()) if hasattr(settings, "items") else vars(settings)
        for settings in ((state.get("cfg") or {}).get("model") or state.get("args") or {}, model)
    )
    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY[now.get("arch") or now["_name"]].add_args(parser)
    names = ["arch", *(action.dest for action in parser._actions if "drop" not in action.dest)]
    return [
        f"--{name.replace('_', '-')} was {before[name]} and is {now[name]}"
        for name in dict.fromkeys(names)
        if name in before and name in now and str(before[name]) != str(now[name])
    ]


def name_other_optimizers(load: Callable, trainer: Any, filename: str, *args: Any, **options: Any) -> Any:
    """The optimizer of a checkpoint that had other parameters is a UserError."""
    try:
        result = load(trainer, filename, *args, **options)
        fits = trainer._optimizer is None or _state_fits(trainer._optimizer.optimizer)
    except ValueError as error:
        if "parameter group" not in str(error):
            raise
        fits = False
    if fits:
        return result
    raise UserError(
        f"{filename} holds an optimizer for other parameters than those that this run updates: go on "
        f"with the flags of its first run{getattr(trainer.task, 'optimizer_remedy', '')}, or keep the "
        "model alone with --reset-optimizer --reset-lr-scheduler."
    )


def _state_fits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state is one of its parameters, in shapes and kinds: torch does not check."""
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            shape = value.shape if torch.is_tensor(value) else None
            if isinstance(value, str) or (name in moments and value is not None and shape != parameter.shape):
                return False
            # flattened parameters (--fp16) have whatever length the model's have together
            if shape is not None and parameter.dim() == 1 and shape.numel() not in (1, parameter.numel()):
                return False
    numbers = ("lr", "betas", "eps", "weight_decay", "momentum")
    return not any(isinstance(group.get(name), str) for group in optimizer.param_groups for name in numbers)
