"""The one place that knows fairseq and torch versions.

`install()` runs when the plugin is imported. It changes ten things in fairseq, each because today's
stack breaks or endangers it, or because a hook is missing:

1. Checkpoints load safely: tensors, plain containers and `argparse.Namespace`, nothing else.
   torch ≥ 2.6 refuses the Namespace in fairseq's checkpoints by default, and fairseq's main branch
   switches the check off; both end here in the same allow-list.
2. `checkpoint_last.pt` and `checkpoint_best.pt` are replaced atomically: fairseq copies onto them in
   place, and a full disk or a kill in that moment would leave half a checkpoint to resume from.
3. `--bf16` works on GPUs: fairseq's command line takes it to mean a TPU.
4. No sentence is lost: fairseq's main branch drops the last batch of a data set whenever its size is no
   multiple of `--required-batch-size-multiple` (8), in validation and generation too.
5. A resumed training sees the batches of an uninterrupted one: fairseq groups sentences into batches
   once, by the seed of the first epoch that a process sees, so a restart in a later epoch regroups them,
   and repeats some and skips others. Here a restart groups by the seed of epoch 1 as well.
6. An error meant for the user (`UserError`) is printed as one paragraph, not as a traceback.
7. Several processes: see `fairseq_workers`.
8. A task that has a method `before_update(trainer, samples)` gets to see all micro-batches of an update
   before the trainer begins with the first one; fairseq shows a task one at a time. And the model hears of
   an update when it has been made (`set_num_updates`), not only before the next one: what it keeps per
   update is then complete in a checkpoint that is saved in between.
9. A checkpoint whose optimizer is for other parameters than those being trained is refused with the
   remedy (the task's `optimizer_remedy`, where it has one), not with torch's ValueError.
10. `--sample-break-mode eos` and bucketed batches work with NumPy 2, which has no `numpy.compat.long`.
"""

import argparse
import functools
import os
import pickle
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any, Callable, Optional, Union

import numpy
import torch

from moa_fairseq import fairseq_workers
from moa_fairseq.errors import UserError
from moa_fairseq.files import DISK_FULL, as_user_error

ALLOWED_TYPES = (argparse.Namespace,)
_GLOBAL_PATTERN = re.compile(r"GLOBAL ([\w.]+)")


def load_checkpoint(path: Union[str, Path], map_location: str = "cpu") -> Any:
    """Load a fairseq checkpoint; only tensors, plain containers and ALLOWED_TYPES may be in it.

    Raises UserError if the file is missing or truncated, or if it holds anything else: the message
    names the offending type, and nothing of it was run.
    """
    if not os.path.exists(path):
        raise UserError(f"Checkpoint {path} does not exist: check the path, or train first.")
    with open(path, "rb") as stream:
        return _safe_load(stream, str(path), map_location=map_location)


def _safe_load(stream: Any, name: str, **options: Any) -> Any:
    options.pop("weights_only", None)
    try:
        if hasattr(torch.serialization, "safe_globals"):
            with torch.serialization.safe_globals(list(ALLOWED_TYPES)):
                return torch.load(stream, weights_only=True, **options)
        return torch.load(stream, pickle_module=restricted_pickle(), **options)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise _refusal(name, error) from error
        raise _damaged(name, "it is no file that torch.save wrote") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, OSError) as error:
        raise _damaged(name, _first_sentence(error)) from error


def _first_sentence(error: Exception) -> str:
    """What happened; the rest of torch's messages advises, for example to switch safety off."""
    return re.split(r"[.\n]", str(error))[0] or type(error).__name__


def _refusal(name: str, error: Exception) -> UserError:
    found = _GLOBAL_PATTERN.search(str(error))
    offender = found.group(1) if found else str(error).splitlines()[0]
    return UserError(
        f"Checkpoint {name} was refused: it holds {offender}, and a fairseq checkpoint needs nothing but "
        f"tensors, plain containers and argparse.Namespace. Loading it could run code of whoever wrote it; "
        f"nothing was run. Use a checkpoint from a source that you trust and that was saved by fairseq."
    )


def _damaged(name: str, reason: str) -> UserError:
    return UserError(
        f"Checkpoint {name} cannot be read ({reason}): the file is truncated or is no checkpoint. Copy it "
        f"again, or resume from an older one (for example with --restore-file checkpointN.pt)."
    )


def restricted_pickle() -> types.ModuleType:
    """A pickle module that finds only what a checkpoint needs, for torch older than 2.4.

    Those versions have no public allow-list for `weights_only=True`.
    """
    allowed = {(t.__module__, t.__qualname__): t for t in ALLOWED_TYPES}
    tensor_parts = {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_parameter"),
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            is_storage = module == "torch" and (name.endswith("Storage") or name.endswith("Tensor"))
            if (module, name) in tensor_parts or is_storage:
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")

    module = types.ModuleType("moa_fairseq_restricted_pickle")
    module.Unpickler = Unpickler
    module.load = lambda stream, **options: Unpickler(stream, **options).load()
    module.__dict__.update({name: getattr(pickle, name) for name in ("UnpicklingError", "HIGHEST_PROTOCOL")})
    return module


class _SafeTorch(types.ModuleType):
    """torch as fairseq's checkpoint code sees it: everything passes through but `load` and `save`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(source: Any, map_location: Optional[Any] = None, **options: Any) -> Any:
        name = str(getattr(source, "name", source))
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb") as stream:
                return _safe_load(stream, name, map_location=map_location, **options)
        return _safe_load(source, name, map_location=map_location, **options)

    @staticmethod
    def save(obj: Any, target: Any, **options: Any) -> None:
        try:
            torch.save(obj, target, **options)
        except (OSError, RuntimeError) as error:
            name = getattr(target, "name", target)
            raise UserError(
                f"{name} could not be written ({_first_sentence(error)}): is the disk full? Earlier "
                f"checkpoints are whole; free some space and start the same training again."
            ) from error


def _atomic_copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    temporary = f"{dst_path}.tmp"
    try:
        shutil.copyfile(src_path, temporary)
        os.replace(temporary, dst_path)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise as_user_error(error, Path(dst_path)) from error
    return True


def _bf16_means_gpu(override_module_args: Callable) -> Callable:
    """Wrap the step that turns arguments into a config: the last one before `tpu` is read."""

    @functools.wraps(override_module_args)
    def wrapped(args: argparse.Namespace) -> Any:
        if getattr(args, "bf16", False) and torch.cuda.is_available():
            args.tpu = False
        return override_module_args(args)

    return wrapped


def _keeping_the_last_batch(batch_by_size: Callable) -> Callable:
    """Wrap fairseq's batching: what it left off the end of `indices` becomes the last batch again."""

    @functools.wraps(batch_by_size)
    def wrapped(indices: Any, *args: Any, fixed_shapes: Any = None, **options: Any) -> Any:
        if not hasattr(indices, "__len__"):
            indices = list(indices)
        batches = batch_by_size(indices, *args, fixed_shapes=fixed_shapes, **options)
        batched = sum(len(batch) for batch in batches)
        if fixed_shapes is None and batched < len(indices):
            batches = [*batches, indices[batched:]]
        return batches

    return wrapped


def _batches_of_the_first_epoch(get_batch_iterator: Callable) -> Callable:
    """Wrap a task's batching: sentences are grouped by seed + 1 in whatever epoch the process starts."""

    @functools.wraps(get_batch_iterator)
    def wrapped(task: Any, dataset: Any, *args: Any, seed: int = 1, epoch: int = 1, **options: Any) -> Any:
        keeps = task.can_reuse_epoch_itr(dataset)
        if options.get("update_epoch_batch_itr") or options.get("disable_iterator_cache") or not keeps:
            return get_batch_iterator(task, dataset, *args, seed=seed, epoch=epoch, **options)
        # The task groups by seed + epoch; the iterator shuffles the batches of each epoch by its own seed.
        iterator = get_batch_iterator(task, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **options)
        iterator.seed = seed
        return iterator

    return wrapped


def _announcing_updates(train_step: Callable) -> Callable:
    """Wrap the trainer's update: the task hears of it before, and the model afterwards."""

    @functools.wraps(train_step)
    def wrapped(trainer: Any, samples: Any, *args: Any, **options: Any) -> Any:
        before_update = getattr(trainer.task, "before_update", None)
        if before_update is not None:
            before_update(trainer, samples)
        result = train_step(trainer, samples, *args, **options)
        model = trainer.get_model()
        if hasattr(model, "set_num_updates"):
            model.set_num_updates(trainer.get_num_updates())
        return result

    wrapped.announces_updates = True
    return wrapped


def _explaining_optimizers(load_checkpoint: Callable) -> Callable:
    """Wrap the trainer's loading of a checkpoint to resume from."""

    @functools.wraps(load_checkpoint)
    def wrapped(trainer: Any, filename: str, *args: Any, **options: Any) -> Any:
        try:
            result = load_checkpoint(trainer, filename, *args, **options)
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

    wrapped.explains_optimizers = True
    return wrapped


def _state_fits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of flattened parameters (--fp16) has their length: torch does not look."""
    return all(
        value.numel() in (1, parameter.numel())
        for parameter, state in optimizer.state.items()
        if parameter.dim() == 1
        for value in state.values()
        if torch.is_tensor(value)
    )


def _print_user_errors(kind: type, error: BaseException, trace: Optional[types.TracebackType]) -> None:
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        error = as_user_error(error, Path(str(error.filename or "the checkpoint")))
    if isinstance(error, UserError):
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def install() -> None:
    """Prepare fairseq, once per process. Raises ImportError with the remedy when it is missing."""
    try:
        from fairseq import checkpoint_utils
        from fairseq.data import data_utils
        from fairseq.dataclass import utils as dataclass_utils
        from fairseq.tasks.fairseq_task import FairseqTask
        from fairseq.trainer import Trainer
    except ImportError as error:
        raise ImportError(
            f"moa_fairseq is a plugin of fairseq, which cannot be imported ({error}). "
            f"`bash scripts/setup.sh` installs one that runs on Python 3.11 and 3.12 "
            f"(PyPI's own fairseq 0.12.2 does not)."
        ) from error
    if not isinstance(checkpoint_utils.torch, _SafeTorch):
        checkpoint_utils.torch = _SafeTorch("torch")
    path_manager = checkpoint_utils.PathManager
    if not path_manager.path_requires_pathmanager("checkpoint.pt"):
        path_manager.copy = staticmethod(_atomic_copy)
    if not hasattr(dataclass_utils.override_module_args, "__wrapped__"):
        dataclass_utils.override_module_args = _bf16_means_gpu(dataclass_utils.override_module_args)
    if not hasattr(FairseqTask.get_batch_iterator, "__wrapped__"):
        FairseqTask.get_batch_iterator = _batches_of_the_first_epoch(FairseqTask.get_batch_iterator)
    if not hasattr(data_utils.batch_by_size, "__wrapped__"):
        data_utils.batch_by_size = _keeping_the_last_batch(data_utils.batch_by_size)
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)
    fairseq_workers.install()
    if not hasattr(Trainer.train_step, "announces_updates"):
        Trainer.train_step = _announcing_updates(Trainer.train_step)
    if not hasattr(Trainer.load_checkpoint, "explains_optimizers"):
        Trainer.load_checkpoint = _explaining_optimizers(Trainer.load_checkpoint)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_user_errors
