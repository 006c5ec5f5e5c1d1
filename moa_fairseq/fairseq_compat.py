"""The one place that knows fairseq's versions: `PATCHES` is the table of all that is changed in fairseq.

Each thing changed is broken or unsafe with today's Python, torch and NumPy, or lacks a hook. `install()` runs
when the plugin is imported.
"""

import builtins
import fnmatch
import functools
import os
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple

from moa_fairseq.errors import UserError
from moa_fairseq.files import DISK_FULL, as_user_error

try:
    from moa_fairseq.fairseq_patches import (
        batches,
        checkpoint_files,
        collectives,
        cpu_autocast,
        foreign_settings,
        literals,
        malformed_checkpoints,
        save_on_sigterm,
        training,
    )
except ImportError as error:
    raise ImportError(
        f"moa_fairseq is a plugin of fairseq, which cannot be imported ({error}). `bash scripts/setup.sh` "
        "installs one that runs on Python 3.11 and 3.12 (PyPI's own fairseq 0.12.2 does not)."
    ) from error

load_checkpoint = checkpoint_files.load_checkpoint


def print_user_errors(kind: type, error: BaseException, trace: Optional[types.TracebackType]) -> None:
    """In place of `sys.excepthook`: an error meant for the user is printed as one paragraph."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        error = as_user_error(error, Path(str(error.filename or "the checkpoint")))
    if isinstance(error, FileNotFoundError):  # fairseq's own messages are enough: Dataset not found: …
        error = UserError(str(error))
    if isinstance(error, UserError):
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def around(original: Callable, change: Callable) -> Callable:
    """A function that calls change(original, …) with what it is given."""

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return change(original, *args, **options)

    return wrapped


def instead(original: Any, change: Callable) -> Any:
    """What `change` makes of the original, a module or a class for the most part."""
    return change(original)


class Patch(NamedTuple):
    """One thing that is changed.

    what: "module:name" or "module:Class.name"; modules with a * are those that are loaded and, but for a
    function of Python's own, have the name. way: how `change` is used; None: it needs no help. test:
    file::name under tests/.
    """

    what: str
    change: Callable
    reason: str
    test: str
    way: Optional[Callable[[Any, Callable], Any]] = around

    def places(self) -> Iterator[Tuple[Any, str]]:
        """(owner, name) of everything that this changes in this process."""
        modules, _, path = self.what.partition(":")
        *classes, name = path.split(".")
        if "*" not in modules:
            yield pkgutil.resolve_name(":".join([modules, *classes])), name
            return
        for module, owner in list(sys.modules.items()):
            if module == "__main__":  # the command that runs, with python -m
                module = getattr(getattr(owner, "__spec__", None), "name", None) or module
            fits = any(fnmatch.fnmatch(module, pattern) for pattern in modules.split(", "))
            if (
                fits
                and isinstance(owner, types.ModuleType)
                and hasattr(builtins, name) | hasattr(owner, name)
            ):
                yield owner, name

    def install(self) -> None:
        """Make the change."""
        if self.way is None:
            self.change()
            return
        for owner, name in self.places():
            changed = self.way(getattr(owner, name, None), self.change)
            static = isinstance(vars(owner).get(name), staticmethod)
            setattr(owner, name, staticmethod(changed) if static else changed)


_FILES = "fairseq_patches/test_checkpoint_files.py::"
_PLANTED = "fairseq_patches/test_planted_checkpoints.py::test_a_planted_checkpoint_does_nothing"
_MALFORMED = "fairseq_patches/test_malformed_checkpoints.py::test_a_malformed_checkpoint_gets_a_paragraph"
_CONTEXT = "tasks/test_resumed_context.py::test_a_resumed_context_equals_an_uninterrupted_one"
_COMPAT, _EPOCHS = "test_fairseq_compat.py::", "fairseq_patches/test_epochs.py::"
_STOPPED = "fairseq_patches/test_collectives.py::test_a_stopped_process_is_named"
# In this order: of two changes to one function the later one is the outer one.
PATCHES = (
    Patch(
        "fairseq.*, fairseq_cli.*:eval",
        lambda original: literals.literal,
        "fairseq runs settings as Python code, and they may come from a checkpoint that somebody else made: "
        "they are read as literals.",
        "fairseq_patches/test_literals.py::test_no_module_of_fairseq_has_the_real_eval",
        instead,
    ),
    Patch(
        "fairseq.checkpoint_utils:torch",
        lambda original: checkpoint_files.SafeTorch(malformed_checkpoints.check_checkpoint),
        "A checkpoint is a pickle, which can run any code: only tensors, containers and argparse.Namespace "
        "are loaded, and checksums are compared.",
        _COMPAT + "test_fairseqs_own_loader_cannot_be_told_to_switch_safety_off",
        instead,
    ),
    *(
        Patch(
            f"fairseq.{module}:torch",
            lambda original: checkpoint_files.SafeTorch(),
            "It loads a further file with torch, which a checkpoint's settings name.",
            _PLANTED,
            instead,
        )
        for module in (
            "data.codedataset",
            "models.speech_to_text.xm_transformer",
            "models.text_to_speech.vocoder",
            "modules.quantization.pq.em",
        )
    ),
    Patch(
        "fairseq.data.encoders.*:file_utils",
        foreign_settings.LocalFiles,
        "A tokenizer downloads its files from wherever a checkpoint's settings say: only fairseq's own are.",
        _PLANTED,
        instead,
    ),
    Patch(
        "fairseq.*:open",
        lambda original: foreign_settings.open_regular_files if original is None else original,
        "Embeddings and dictionaries are read from whatever a setting names: a pipe would hang, a device "
        "fill the memory.",
        _PLANTED,
        instead,
    ),
    Patch(
        "fairseq.data.fasta_dataset:FastaDataset._build_index",
        foreign_settings.quote_the_path,
        "fairseq puts the path of a data set into a shell command without quoting it.",
        _PLANTED,
    ),
    Patch(
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        checkpoint_files.load_regular_files,
        "Reading a named pipe that has a checkpoint's name would hang; reading a device would fill the "
        "memory.",
        _FILES + "test_what_is_no_file_is_refused_before_it_is_opened",
    ),
    Patch(
        "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        malformed_checkpoints.explain_loads,
        "fairseq relies on what a checkpoint should hold, and ends in a traceback where it does not.",
        _MALFORMED,
    ),
    Patch(
        "fairseq.checkpoint_utils:load_model_ensemble_and_task",
        malformed_checkpoints.explain_models,
        "fairseq builds whatever model the settings describe, and settings that it cannot build end in a "
        "traceback.",
        _MALFORMED,
    ),
    Patch(
        "fairseq.criterions:build_criterion",
        malformed_checkpoints.explain_criteria,
        "fairseq-validate builds whatever criterion a checkpoint's settings describe.",
        _MALFORMED,
    ),
    Patch(
        "fairseq.trainer:Trainer.load_checkpoint",
        checkpoint_files.resume_from_regular_files,
        "fairseq silently starts a new training if checkpoint_last.pt is not a regular file.",
        _FILES + "test_training_does_not_begin_anew_beside_what_is_no_file",
    ),
    Patch(
        "fairseq.trainer:Trainer.load_checkpoint",
        training.name_other_settings,
        "fairseq says that the architectures do not match, and not in which setting.",
        "test_resume.py::test_another_architecture_is_refused_and_overwrites_nothing",
    ),
    Patch(
        "fairseq.trainer:Trainer.load_checkpoint",
        training.name_other_optimizers,
        "A checkpoint whose optimizer had other parameters ends in torch's ValueError, or is loaded wrongly "
        "if the sizes happen to fit.",
        "test_resume.py::test_a_joint_run_that_gave_its_gates_to_adam_goes_on_so",
    ),
    Patch(
        "fairseq.trainer:Trainer.load_checkpoint",
        malformed_checkpoints.explain_resumption,
        "A damaged state of a training ends in a traceback, at once or after hours.",
        _MALFORMED,
    ),
    Patch(
        "fairseq.checkpoint_utils:torch_persistent_save",
        checkpoint_files.save_whole,
        "fairseq renames a new checkpoint without checking it or waiting for the disk; if writing fails, "
        "its second attempt appends to what the first one left.",
        _FILES + "test_a_disk_that_is_full_for_a_moment",
    ),
    Patch(
        "fairseq.file_io:PathManager.copy",
        checkpoint_files.copy_whole,
        "fairseq overwrites checkpoint_last.pt and checkpoint_best.pt in place: a full disk or a kill at "
        "that moment would leave half a checkpoint to resume from.",
        _FILES + "test_a_fault_while_a_checkpoint_is_copied",
    ),
    Patch(
        "fairseq.checkpoint_utils:save_checkpoint",
        checkpoint_files.save_at_once,
        "Asynchronous writing writes under the final name, and never writes checkpoint_last.pt.",
        _FILES + "test_asynchronous_writing_is_taken_back",
    ),
    Patch(
        "fairseq.checkpoint_utils:save_checkpoint",
        training.announce_saves,
        "fairseq asks the first process alone for a task's state; a carried context is spread over all.",
        _CONTEXT,
    ),
    Patch(
        "fairseq.checkpoint_utils:load_checkpoint",
        training.announce_restarts,
        "fairseq hands a task its saved state without the model or the place in the epoch.",
        _CONTEXT,
    ),
    Patch(
        "fairseq.distributed.utils:infer_init_method",
        collectives.refuse_separate_trainings,
        "Where fairseq takes the number of processes to be 1 (on a CPU, or with one GPU per machine), "
        "torchrun's processes train independent models that overwrite each other's files: refused, or "
        "joined on CPUs.",
        "fairseq_patches/test_epochs.py::test_independent_copies_are_refused",
    ),
    Patch(
        "fairseq.distributed.utils:torch",
        lambda original: collectives.PeerTorch("torch"),
        "A training of several processes cannot be resumed with torch >= 2.6: process 0 sends the others a "
        "config, whose type torch refuses.",
        _COMPAT + "test_workers_send_each_other_configs_but_load_no_file",
        instead,
    ),
    Patch(
        "fairseq.distributed.utils:dist",
        lambda original: collectives.TimedDist("torch.distributed"),
        "No group of processes has a time limit of the user's choice (--heartbeat-timeout).",
        _STOPPED,
        instead,
    ),
    Patch(
        "fairseq.distributed.utils:distributed_main",
        lambda original: collectives.distributed_main,
        "When a process hangs, the others wait for half an hour and never say for which one.",
        _STOPPED,
        instead,
    ),
    Patch(
        "fairseq.models.distributed_fairseq_model:DistributedTimeoutWrapper",
        collectives.watch_later,
        "Its timeout would interrupt the process just before the message that names the rank.",
        _STOPPED,
    ),
    Patch(
        "fairseq.dataclass.utils:override_module_args",
        training.take_bf16_for_a_gpu,
        "fairseq's command line takes --bf16 to mean a TPU.",
        _COMPAT + "test_bf16_is_a_gpu_dtype_when_there_is_a_gpu",
    ),
    Patch(
        "fairseq.tasks.fairseq_task:FairseqTask.train_step",
        cpu_autocast.autocast_on_the_cpu,
        "--amp is silently float32 on the CPU, and bfloat16 is faster where the processor has units for it.",
        "fairseq_patches/test_cpu_autocast.py::test_amp_on_the_cpu_is_bfloat16",
    ),
    Patch(
        "fairseq.tasks.fairseq_task:FairseqTask.train_step",
        training.observe_no_fillers,
        "A worker that has no micro-batch left runs an old one again, only to take part; routers and gates "
        "would count its tokens.",
        "tasks/test_observed_updates.py::test_routers_count_what_an_update_was_made_of",
    ),
    Patch(
        "fairseq.optim:AMPOptimizer.clip_grad_norm",
        cpu_autocast.stop_at_what_is_not_finite,
        "On the CPU torch's gradient scaler is off, and NaN in the gradients under --amp raised an "
        "AttributeError.",
        "fairseq_patches/test_cpu_autocast.py::test_nan_on_the_cpu_ends_a_training_as_without_amp",
    ),
    Patch(
        "fairseq.nan_detector:NanDetector.add_hooks",
        training.search_nan_without_encoders,
        "The search for the module that made a NaN ends in a StopIteration: an encoder returns lists of "
        "tensors, in which torch's backward hooks find no tensor.",
        _COMPAT + "test_the_module_that_made_a_nan_is_named",
    ),
    Patch(
        "fairseq.tasks.fairseq_task:FairseqTask.get_batch_iterator",
        batches.group_as_in_the_first_epoch,
        "Sentences are grouped into batches once, with the seed of the first epoch that a process runs: a "
        "restart in a later epoch groups them anew, repeats some and skips others.",
        "test_resume.py::test_killed_and_resumed_equals_uninterrupted",
    ),
    Patch(
        "fairseq.data.data_utils:batch_by_size",
        batches.keep_the_last_batch,
        "fairseq's main branch drops the last batch of a data set whenever its size is not a multiple of "
        "--required-batch-size-multiple (8), in validation and generation too.",
        _COMPAT + "test_the_last_batch_is_kept",
    ),
    Patch(
        "fairseq.data.bucket_pad_length_dataset:get_buckets",
        batches.bucket_sizes,
        "--num-batch-buckets asks NumPy for percentiles by a keyword, `interpolation`, that it no longer "
        "has.",
        _COMPAT + "test_batches_in_buckets",
    ),
    Patch(
        "numpy:compat",
        lambda original: original or types.SimpleNamespace(long=int),
        "--sample-break-mode eos asks for numpy.compat.long, which NumPy 2 no longer has.",
        _COMPAT + "test_a_sentence_is_a_block_of_a_language_model",
        instead,
    ),
    Patch(
        "fairseq.data.iterators:EpochBatchIterator.state_dict",
        batches.save_the_place_of_all_processes,
        "The place in an epoch is a number of batches of one process: a restart on half as many GPUs would "
        "see part of the epoch twice, and one on more GPUs would skip part of it.",
        _EPOCHS + "test_converted_place",
    ),
    Patch(
        "fairseq.data.iterators:EpochBatchIterator.load_state_dict",
        batches.restore_the_place_of_all_processes,
        "The same, where it is read.",
        _EPOCHS + "test_converted_place",
    ),
    Patch(
        "fairseq.data.iterators:GroupedIterator.__init__",
        batches.group_from_any_place,
        "--update-freq counts groups from the epoch's beginning, and finds one fewer than there are in an "
        "epoch that goes on inside a former group.",
        _EPOCHS + "test_groups_go_on_from_any_place",
    ),
    Patch(
        "fairseq.data.iterators:EpochBatchIterator.next_epoch_itr",
        batches.start_new_data_workers,
        "Data workers keep the data set of the epoch in which they were started: masks, noise and crops "
        "stay as in the first one.",
        _EPOCHS + "test_workers_load_the_epoch_that_is_trained",
    ),
    Patch(
        "fairseq.data:LRUCacheDataset.set_epoch",
        batches.forget_the_last_epoch,
        "A caching data set hands out items of the epoch before.",
        _EPOCHS + "test_no_masks_of_the_last_epoch_are_remembered",
    ),
    Patch(
        "fairseq.models.ema:EMA.__init__",
        training.average_no_counts,
        "--store-ema multiplies every tensor of a model by a fraction, and torch refuses that for integers: "
        "the number of batches that a batch normalisation has seen.",
        _COMPAT + "test_a_moving_average_of_a_model_with_counts",
    ),
    Patch(
        "fairseq.trainer:Trainer.train_step",
        training.announce_updates,
        "fairseq shows a task one micro-batch at a time; a task with `before_update(trainer, samples)` now "
        "sees a whole update before it begins. The model is told when an update has been made, so that a "
        "checkpoint saved between updates is complete and holds nothing of an update that overflowed.",
        "tasks/test_bcd.py::test_a_whole_update_is_a_g_step_and_then_an_f_step",
    ),
    Patch(
        "fairseq.trainer:Trainer._local_cumulative_training_time",
        save_on_sigterm.tell_the_others,
        "SIGTERM kills a training and what it did since its last checkpoint; now it saves one first. By "
        "this sum the processes tell each other.",
        "test_resume.py::test_a_terminated_training_saves_a_checkpoint",
    ),
    Patch(
        "fairseq_cli.train:validate_and_save",
        save_on_sigterm.install,
        "The same, after each update; SIGTERM has a handler of its own in fairseq-train.",
        "test_resume.py::test_a_terminated_training_saves_a_checkpoint",
        None,
    ),
    Patch(
        "sys:excepthook",
        lambda original: print_user_errors if original is sys.__excepthook__ else original,
        "An error that the user can put right ends in a traceback: it is printed as one paragraph.",
        _COMPAT + "test_user_errors_of_fairseq_train_are_one_paragraph",
        instead,
    ),
)


@functools.cache
def install() -> None:
    """Prepare fairseq, once per process."""
    for patch in PATCHES:
        patch.install()
