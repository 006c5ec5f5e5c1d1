"""--fp16 and --bf16: a GPU's precisions, on a command line that takes --bf16 to mean a TPU."""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.table import patch

_COMPAT = "plugin/test_fairseq_compat.py::"


@patch(
    "fairseq.dataclass.utils:override_module_args",
    f"{_COMPAT}test_bf16_is_a_gpu_dtype_when_there_is_a_gpu",
)
def take_bf16_for_a_gpu(override_module_args: Callable, args: argparse.Namespace) -> Any:
    """Switch the setting `tpu` off if --bf16 is given on a machine with a GPU.

    fairseq's command line takes --bf16 to mean a TPU.

    fairseq reads `tpu` after this step, which turns arguments into a config.
    """
    if getattr(args, "bf16", False) and torch.cuda.is_available():
        args.tpu = False
    return override_module_args(args)


@patch("fairseq.dataclass.utils:override_module_args", f"{_COMPAT}test_half_precision_needs_a_gpu")
def refuse_half_precision_on_a_cpu(override_module_args: Callable, args: argparse.Namespace) -> Any:
    """Refuse --fp16 and --bf16 in a training on a CPU.

    --fp16 and --bf16 end in tracebacks of CUDA and of TPUs in a training on a CPU.

    An evaluation on a CPU accepts both flags, and so does a training with --fp16-no-flatten-grads.

    Raises:
        UserError: if a training on a CPU has one of the flags.
    """
    precision = next((name for name in ("fp16", "bf16") if getattr(args, name, False)), "")
    on_gpu = torch.cuda.is_available() and not getattr(args, "cpu", False)
    on_tpu = precision == "bf16" and importlib.util.find_spec("torch_xla")
    works_on_cpu = precision == "fp16" and getattr(args, "fp16_no_flatten_grads", False)
    is_training = hasattr(args, "lr_scheduler")
    if precision and is_training and not (on_gpu or on_tpu or works_on_cpu):
        raise UserError(
            f"--{precision} needs a GPU, but this training is on the CPU: leave it out, or give --amp, "
            "which uses bfloat16 on a CPU."
        )
    return override_module_args(args)
