"""--amp on the CPU: torch's autocast to bfloat16, where fairseq only asks for a GPU's."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from fairseq.optim import AMPOptimizer

from moa_fairseq.layers.torch_compat import without_fused_attention
from moa_fairseq.plugin.patches.table import patch

# Up to this length torch's fused attention in bfloat16 loses to plain products on a CPU: it pays for each
# head of each sentence. Measured on a Xeon with AMX, one thread, forward and backward in ms, fused against
# plain: 240 sentences of 17 tokens 69 / 10 (float32: 7), 16 of 128 tokens 49 / 36, 8 of 256 tokens 80 / 132.
_PLAIN_ATTENTION_UP_TO = 128
_TESTS = "plugin/patches/test_cpu_autocast.py::"


@patch(
    "fairseq.tasks.fairseq_task:FairseqTask.train_step", f"{_TESTS}test_amp_on_the_cpu_is_bfloat16"
)
def autocast_on_the_cpu(
    train_step: Callable,
    task: Any,
    sample: Any,
    model: Any,
    criterion: Any,
    optimizer: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Compute the criterion of a training with --amp under the CPU's autocast to bfloat16.

    --amp is silently float32 on the CPU, and bfloat16 is faster if the processor has units for it.

    The backward pass stays outside, as torch asks. Gradients are float32, as the parameters are.
    """
    if not isinstance(optimizer, AMPOptimizer) or next(model.parameters()).device.type != "cpu":
        return train_step(task, sample, model, criterion, optimizer, *args, **options)

    # Tasks of fairseq may have no tokens, or several inputs.
    inputs = sample.get("net_input", {}).values()
    lengths = [x.size(1) for x in inputs if torch.is_tensor(x) and x.dim() == 2]
    short = bool(lengths) and max(lengths) <= _PLAIN_ATTENTION_UP_TO

    def in_bfloat16(*inputs: Any, **named: Any) -> Any:
        with (
            torch.autocast("cpu"),
            without_fused_attention() if short else contextlib.nullcontext(),
        ):
            return criterion(*inputs, **named)

    with warnings.catch_warnings():  # the warning that there is no CUDA
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        return train_step(task, sample, model, in_bfloat16, optimizer, *args, **options)


@patch(
    "fairseq.optim:AMPOptimizer.clip_grad_norm",
    f"{_TESTS}test_nan_on_the_cpu_ends_a_training_as_without_amp",
)
def stop_at_what_is_not_finite(
    clip_grad_norm: Callable, optimizer: AMPOptimizer, max_norm: float, *args: Any, **options: Any
) -> Any:
    """On the CPU, clip the gradients without a scaler, and end a training whose gradients are not finite.

    On the CPU torch's gradient scaler is off, and NaN in the gradients under --amp raised an AttributeError.

    A scaler that is off neither skips the step nor lowers its scale, so the training ends, as it does in
    float32.

    Raises:
        FloatingPointError: if gradients on the CPU are NaN or infinite.
    """
    if optimizer.scaler.is_enabled():
        return clip_grad_norm(optimizer, max_norm, *args, **options)
    norm = optimizer.fp32_optimizer.clip_grad_norm(max_norm, *args, **options)
    if not torch.isfinite(norm).all():
        raise FloatingPointError("gradients are Nan/Inf")
    return norm
