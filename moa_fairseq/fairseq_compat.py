"""The one place that knows fairseq and torch versions.

`install()` runs when the plugin is imported. `patches()` is the table of the functions that it changes in
fairseq: each is broken or unsafe with today's Python, torch and NumPy, or lacks a hook. Besides:

- `eval` reads literals in all of fairseq's modules: see `fairseq_patches.literals`.
- fairseq's code loads files with torch through `fairseq_patches.checkpoint_files`, and its tokenizers
  download only fairseq's own files: see `fairseq_patches.foreign_settings`.
- Training with several processes is changed in `fairseq_workers`.
- `--sample-break-mode eos` works with NumPy 2, which has no `numpy.compat.long`.
- An error meant for the user (`UserError`) is printed as one paragraph, not as a traceback.
"""

import argparse
import contextlib
import functools
import os
import sys
import types
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional

import numpy
import torch

from moa_fairseq import fairseq_workers
from moa_fairseq.attention.observers import forgetting, observers_of
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.checkpoint_files import SafeTorch, load_checkpoint
from moa_fairseq.fairseq_patches.malformed_checkpoints import check_checkpoint
from moa_fairseq.files import DISK_FULL, as_user_error

__all__ = ["Patch", "install", "load_checkpoint", "patches"]


def _bf16_means_gpu(override_module_args: Callable) -> Callable:
    """Wrap the step that turns arguments into a config: the last one before `tpu` is read."""

    @functools.wraps(override_module_args)
    def wrapped(args: argparse.Namespace) -> Any:
        if getattr(args, "bf16", False) and torch.cuda.is_available():
            args.tpu = False
        return override_module_args(args)

    return wrapped


def _keeping_the_last_batch(batch_by_size: Callable) -> Callable:
    """Wrap fairseq's batching: what it dropped from the end of `indices` becomes the last batch."""

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
    """Wrap a task's batching: sentences are grouped with seed + 1, whichever epoch the process starts in."""

    @functools.wraps(get_batch_iterator)
    def wrapped(task: Any, dataset: Any, *args: Any, seed: int = 1, epoch: int = 1, **options: Any) -> Any:
        keeps = task.can_reuse_epoch_itr(dataset)
        if options.get("update_epoch_batch_itr") or options.get("disable_iterator_cache") or not keeps:
            return get_batch_iterator(task, dataset, *args, seed=seed, epoch=epoch, **options)
        # The task groups with seed + epoch; the iterator shuffles the batches of each epoch with a seed of
        # its own.
        iterator = get_batch_iterator(task, dataset, *args, seed=seed + 1 - epoch, epoch=epoch, **options)
        iterator.seed = seed
        return iterator

    return wrapped


def _buckets_of_sizes(get_buckets: Callable) -> Callable:
    """Replace the choice of bucket sizes, which asks NumPy for percentiles by a keyword of old versions."""

    @functools.wraps(get_buckets)
    def wrapped(sizes: Any, num_buckets: int) -> Any:
        percentages = numpy.linspace(0, 100, num_buckets + 1)[1:]
        return numpy.unique(numpy.percentile(sizes, percentages, method="lower"))

    return wrapped


def _averaging_no_counts(init: Callable) -> Callable:
    """Wrap the construction of a moving average: integers of the model are copied, not averaged."""

    @functools.wraps(init)
    def wrapped(ema: Any, model: Any, config: Any, device: Any = None, skip_keys: Any = None) -> None:
        integers = {
            key
            for key, value in model.state_dict().items()
            if torch.is_tensor(value) and not value.is_floating_point()
        }
        init(ema, model, config, device, integers.union(skip_keys or ()))

    return wrapped


def _announcing_updates(train_step: Callable) -> Callable:
    """Wrap the trainer's update: the task is told before it, and the model after it."""

    @functools.wraps(train_step)
    def wrapped(trainer: Any, samples: Any, *args: Any, **options: Any) -> Any:
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

    return wrapped


def _not_observing_fillers(train_step: Callable) -> Callable:
    """Wrap a task's micro-batch: nothing observes one that a worker runs only to take part."""

    @functools.wraps(train_step)
    def wrapped(
        task: Any, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad=False
    ) -> Any:
        with forgetting(observers_of(model)) if ignore_grad else contextlib.nullcontext():
            return train_step(task, sample, model, criterion, optimizer, update_num, ignore_grad)

    return wrapped


def _skipping_encoders(add_hooks: Callable) -> Callable:
    """Wrap the hooks that find the module which made a NaN: encoders get no backward hook."""

    @functools.wraps(add_hooks)
    def wrapped(detector: Any, module: Any) -> None:
        from fairseq.models import FairseqEncoder

        backward = detector.backward
        detector.backward = backward and not isinstance(module, FairseqEncoder)
        add_hooks(detector, module)
        detector.backward = backward

    return wrapped


def _explaining_optimizers(load_checkpoint: Callable) -> Callable:
    """Wrap the trainer's loading of a checkpoint: an optimizer of other parameters is a UserError."""

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

    return wrapped


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


def _print_user_errors(kind: type, error: BaseException, trace: Optional[types.TracebackType]) -> None:
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        error = as_user_error(error, Path(str(error.filename or "the checkpoint")))
    if isinstance(error, FileNotFoundError):  # fairseq's own messages are enough: Dataset not found: …
        error = UserError(str(error))
    if isinstance(error, UserError):
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class Patch(NamedTuple):
    """One function of fairseq that is changed."""

    owner: Any  # the module or class that holds it
    name: str
    change: Callable[[Any], Any]  # takes fairseq's function, returns ours
    reason: str
    test: str  # file::name under tests/


def patches() -> List[Patch]:
    """The functions of fairseq that are changed. Raises ImportError without fairseq."""
    from fairseq import checkpoint_utils, criterions
    from fairseq.data import bucket_pad_length_dataset, data_utils
    from fairseq.data.fasta_dataset import FastaDataset
    from fairseq.dataclass import utils as dataclass_utils
    from fairseq.distributed import utils as distributed_utils
    from fairseq.models import distributed_fairseq_model
    from fairseq.models.ema import EMA
    from fairseq.nan_detector import NanDetector
    from fairseq.optim import AMPOptimizer
    from fairseq.tasks.fairseq_task import FairseqTask
    from fairseq.trainer import Trainer

    from moa_fairseq.fairseq_patches import (
        architectures,
        checkpoint_files,
        checkpoint_hooks,
        collectives,
        cpu_autocast,
        foreign_settings,
        malformed_checkpoints,
        save_on_sigterm,
    )

    compat, files = "test_fairseq_compat.py::", "fairseq_patches/test_checkpoint_files.py::"
    malformed = "fairseq_patches/test_malformed_checkpoints.py::test_a_malformed_checkpoint_gets_a_paragraph"
    return [
        Patch(
            *(checkpoint_utils, "load_checkpoint_to_cpu", checkpoint_files.from_regular_files),
            "Reading a named pipe that has a checkpoint's name would hang; reading a device would fill the "
            "memory.",
            files + "test_what_is_no_file_is_refused_before_it_is_opened",
        ),
        Patch(
            *(checkpoint_utils, "load_checkpoint_to_cpu", malformed_checkpoints.explaining_loads),
            "fairseq relies on what a checkpoint should hold, and ends in a traceback where it does not.",
            malformed,
        ),
        Patch(
            *(checkpoint_utils, "load_model_ensemble_and_task", malformed_checkpoints.explaining_models),
            "fairseq builds whatever model the settings describe, and settings that it cannot build end in a "
            "traceback.",
            malformed,
        ),
        Patch(
            *(Trainer, "load_checkpoint", checkpoint_files.resuming_from_regular_files),
            "fairseq silently starts a new training if checkpoint_last.pt is not a regular file.",
            files + "test_training_does_not_begin_anew_beside_what_is_no_file",
        ),
        Patch(
            *(checkpoint_utils, "torch_persistent_save", checkpoint_files.writing_whole),
            "fairseq renames a new checkpoint without checking it or waiting for the disk; if writing fails, "
            "its second attempt appends to what the first one left.",
            files + "test_a_disk_that_is_full_for_a_moment",
        ),
        Patch(
            *(checkpoint_utils.PathManager, "copy", checkpoint_files.copying_whole),
            "fairseq overwrites checkpoint_last.pt and checkpoint_best.pt in place: a full disk or a kill at "
            "that moment would leave half a checkpoint to resume from.",
            files + "test_a_fault_while_a_checkpoint_is_copied",
        ),
        Patch(
            *(checkpoint_utils, "save_checkpoint", checkpoint_files.never_asynchronous),
            "Asynchronous writing writes under the final name, and never writes checkpoint_last.pt.",
            files + "test_asynchronous_writing_is_taken_back",
        ),
        Patch(
            *(checkpoint_utils, "save_checkpoint", checkpoint_hooks.announcing_saves),
            "fairseq asks the first process alone for a task's state; a carried context is spread over all.",
            "tasks/test_resumed_context.py::test_a_resumed_context_equals_an_uninterrupted_one",
        ),
        Patch(
            *(checkpoint_utils, "load_checkpoint", checkpoint_hooks.announcing_restarts),
            "fairseq hands a task its saved state without the model or the place in the epoch.",
            "tasks/test_resumed_context.py::test_a_resumed_context_equals_an_uninterrupted_one",
        ),
        Patch(
            *(FastaDataset, "_build_index", foreign_settings.quoting_the_path),
            "fairseq puts the path of a data set into a shell command without quoting it.",
            "fairseq_patches/test_planted_checkpoints.py::test_a_planted_checkpoint_does_nothing",
        ),
        Patch(
            *(distributed_utils, "distributed_main", collectives.with_a_time_limit),
            "When a process hangs, the others wait for half an hour and never say for which one.",
            "fairseq_patches/test_collectives.py::test_a_stopped_process_is_named",
        ),
        Patch(
            *(distributed_fairseq_model, "DistributedTimeoutWrapper", collectives.watching_later),
            "Its timeout would interrupt the process just before the message that names the rank.",
            "fairseq_patches/test_collectives.py::test_a_stopped_process_is_named",
        ),
        Patch(
            *(dataclass_utils, "override_module_args", _bf16_means_gpu),
            "fairseq's command line takes --bf16 to mean a TPU.",
            compat + "test_bf16_is_a_gpu_dtype_when_there_is_a_gpu",
        ),
        Patch(
            *(FairseqTask, "train_step", cpu_autocast.autocasting_on_the_cpu),
            "--amp is silently float32 on the CPU, and bfloat16 is faster where the processor has "
            "units for it.",
            "fairseq_patches/test_cpu_autocast.py::test_amp_on_the_cpu_is_bfloat16",
        ),
        Patch(
            *(AMPOptimizer, "clip_grad_norm", cpu_autocast.stopping_at_what_is_not_finite),
            "On the CPU torch's gradient scaler is off, and NaN in the gradients under --amp raised an "
            "AttributeError.",
            "fairseq_patches/test_cpu_autocast.py::test_nan_on_the_cpu_ends_a_training_as_without_amp",
        ),
        Patch(
            *(NanDetector, "add_hooks", _skipping_encoders),
            "The search for the module that made a NaN ends in a StopIteration: an encoder returns lists of "
            "tensors, in which torch's backward hooks find no tensor.",
            compat + "test_the_module_that_made_a_nan_is_named",
        ),
        Patch(
            *(FairseqTask, "get_batch_iterator", _batches_of_the_first_epoch),
            "Sentences are grouped into batches once, with the seed of the first epoch that a process "
            "runs: a restart in a later epoch groups them anew, repeats some and skips others.",
            "test_resume.py::test_killed_and_resumed_equals_uninterrupted",
        ),
        Patch(
            *(data_utils, "batch_by_size", _keeping_the_last_batch),
            "fairseq's main branch drops the last batch of a data set whenever its size is not a multiple of "
            "--required-batch-size-multiple (8), in validation and generation too.",
            compat + "test_the_last_batch_is_kept",
        ),
        Patch(
            *(bucket_pad_length_dataset, "get_buckets", _buckets_of_sizes),
            "--num-batch-buckets asks NumPy for percentiles by a keyword, `interpolation`, that it no longer "
            "has.",
            compat + "test_batches_in_buckets",
        ),
        Patch(
            *(EMA, "__init__", _averaging_no_counts),
            "--store-ema multiplies every tensor of a model by a fraction, and torch refuses that for "
            "integers: the number of batches that a batch normalisation has seen.",
            compat + "test_a_moving_average_of_a_model_with_counts",
        ),
        Patch(
            *(Trainer, "train_step", _announcing_updates),
            "fairseq shows a task one micro-batch at a time; a task with `before_update(trainer, samples)` "
            "now sees a whole update before it begins. The model is told when an update has been made, so "
            "that a checkpoint saved between updates is complete and holds nothing of an update that "
            "overflowed.",
            "tasks/test_bcd.py::test_a_whole_update_is_a_g_step_and_then_an_f_step",
        ),
        Patch(
            *(FairseqTask, "train_step", _not_observing_fillers),
            "A worker that has no micro-batch left runs an old one again, only to take part; routers and "
            "gates would count its tokens.",
            "tasks/test_observed_updates.py::test_routers_count_what_an_update_was_made_of",
        ),
        Patch(
            *(Trainer, "_local_cumulative_training_time", save_on_sigterm.telling_the_others),
            "SIGTERM kills a training and what it did since its last checkpoint; now it saves one first.",
            "test_resume.py::test_a_terminated_training_saves_a_checkpoint",
        ),
        Patch(
            *(Trainer, "load_checkpoint", architectures.naming_what_differs),
            "fairseq says that the architectures do not match, and not in which setting.",
            "test_resume.py::test_another_architecture_is_refused_and_overwrites_nothing",
        ),
        Patch(
            *(Trainer, "load_checkpoint", _explaining_optimizers),
            "A checkpoint whose optimizer had other parameters ends in torch's ValueError, or is loaded "
            "wrongly if the sizes happen to fit.",
            "test_resume.py::test_a_joint_run_that_gave_its_gates_to_adam_goes_on_so",
        ),
        Patch(
            *(criterions, "build_criterion", malformed_checkpoints.explaining_criteria),
            "fairseq-validate builds whatever criterion a checkpoint's settings describe.",
            malformed,
        ),
        Patch(
            *(Trainer, "load_checkpoint", malformed_checkpoints.explaining_resumption),
            "A damaged state of a training ends in a traceback, at once or after hours.",
            malformed,
        ),
    ]


@functools.cache
def install() -> None:
    """Prepare fairseq, once per process. Raises ImportError with the remedy when it is missing."""
    try:
        table = patches()
    except ImportError as error:
        raise ImportError(
            f"moa_fairseq is a plugin of fairseq, which cannot be imported ({error}). "
            f"`bash scripts/setup.sh` installs one that runs on Python 3.11 and 3.12 "
            f"(PyPI's own fairseq 0.12.2 does not)."
        ) from error
    from moa_fairseq.fairseq_patches import foreign_settings, literals, save_on_sigterm

    for patch in table:
        setattr(patch.owner, patch.name, patch.change(getattr(patch.owner, patch.name)))
    literals.install()
    save_on_sigterm.install()
    foreign_settings.install(SafeTorch("torch"), SafeTorch("torch", check_checkpoint))
    fairseq_workers.install()
    if not hasattr(numpy, "compat"):
        vars(numpy)["compat"] = types.SimpleNamespace(long=int)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_user_errors
