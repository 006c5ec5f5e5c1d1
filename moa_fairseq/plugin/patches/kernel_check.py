"""The Triton kernels are checked before the first training with a mixture on a GPU of a new kind.

The check happens before fairseq-train makes its processes, none of which could wait so long for another. It
runs in a process of its own, which leaves nothing on the GPU. If several trainings begin at once on a
machine, or torchrun starts several processes, one of them checks and the others wait for it. No training
fails because of the check: where it cannot be done the kernels stay off.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.layers.experts import triton, validation
from moa_fairseq.plugin.patches import save_on_sigterm
from moa_fairseq.plugin.patches.table import patch
from moa_fairseq.process import environment_of_a_child, locked
from moa_fairseq.process.signals import die_with_parent, signals_held

logger = logging.getLogger(__name__)
PATIENCE_SECONDS = 1800.0  # of waiting for another process that checks
# These signals stop a check from outside. Any other that ends it tells something about the machine.
_OUTSIDE_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


@patch(
    "fairseq.distributed.utils:call_main",
    "plugin/patches/test_kernel_check.py::test_the_first_training_on_a_gpu_checks_its_kernels",
)
def check_before(call_main: Callable, cfg: Any, main: Callable, **options: Any) -> Any:
    """Check the Triton kernels before the first training of a mixture on a GPU, in the first process.

    The Triton kernels are off on a GPU until they are checked: the first training of a mixture checks them,
    before there are several processes.
    """
    dtype = multiplied_dtype(cfg)
    if takes_kernels(cfg) and validation.is_open(dtype):
        try:
            _check(dtype)
        except UserError as error:
            # The cache folder cannot be written, or the check of another process does not end.
            logger.warning(f"the Triton kernels were not checked and stay off: {error}")
    return call_main(cfg, main, **options)


def takes_kernels(cfg: Any) -> bool:
    """Whether a run trains a mixture on a GPU with the backend `auto`, and may check the kernels.

    The settings of an evaluation have no model: its model comes from the checkpoint.
    """
    backend = getattr(cfg.model, "expert_backend", None)
    # The layers of sigma-MoE need no --expert-backend to have a backend, `auto`.
    if not backend and getattr(cfg.model, "sigma_moe_num_experts", None):
        backend = "auto"
    if backend != "auto" or getattr(cfg.model, "no_kernel_check", False) or cfg.common.cpu:
        return False
    # Asked last: Triton's import, and the look at the GPU, are for runs with its kernels alone
    return torch.cuda.is_available() and not triton.why_not()


def multiplied_dtype(cfg: Any) -> str:
    """The dtype of a training's matrix products on a GPU, by its name in `validation.DTYPES`."""
    if cfg.common.bf16:
        return "bfloat16"
    if cfg.common.fp16 or cfg.common.amp:
        return "float16"
    return "float32"


def _check(dtype: str) -> None:
    """Check the kernels in a dtype, unless another process does so meanwhile. Raises UserError."""
    with locked(validation.path().parent, PATIENCE_SECONDS):
        save_on_sigterm.exit_if_told()
        if not validation.is_open(dtype):
            return
        gpu = validation.machine()["gpu"]
        log = validation.path().with_suffix(".log")
        logger.info(
            f"checking the Triton kernels in {dtype} on {gpu}: once for this kind of GPU, about two minutes "
            f"with 16 cores, longer with fewer (--no-kernel-check: train without the kernels; log: {log})"
        )
        status = _run(dtype, log)
        if status < 0 and -status not in _OUTSIDE_SIGNALS:
            outcome, _ = validation.read()
            outcome.failed[f"{dtype}, the check itself"] = [f"ended by signal {-status}, see {log}"]
            validation.write(outcome)
        trusted, reason = validation.verdict()
        if dtype in trusted:
            logger.info(f"checked the Triton kernels: {reason}")
        else:
            if validation.is_open(dtype):
                reason += f"; the check ended with status {status}, see {log}"
            logger.warning(f"the Triton kernels stay off: {reason}")


def _run(dtype: str, log: Path) -> int:
    """Run the check to its end and return its exit status; SIGTERM to this process ends the check early."""
    words = [sys.executable, "-u", "-m", "moa_fairseq.layers.experts.validate", "--dtypes", dtype]
    with open(log, "ab") as stream:
        with signals_held() as received:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment_of_a_child(),
                preexec_fn=die_with_parent(),
            )
        try:
            for number in received:
                signal.raise_signal(number)
            while process.poll() is None:
                save_on_sigterm.exit_if_told()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode
