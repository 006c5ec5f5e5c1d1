"""What torch has switched on: autocast and the kernels of its attention, each for a block, and hooks."""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast gives matmuls on "cpu" or "cuda" right now, or None when it is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # which knows no "meta"
        return None
    return torch.get_autocast_dtype(device_type)


def full_precision(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A block in which autocast is off; entering it costs nothing where it is off already."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


class _WithoutCudnn:
    """torch's switch is the process's: the last block of any thread that ends switches cuDNN on again."""

    def __init__(self) -> None:
        self.blocks = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.blocks += 1
            torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.blocks -= 1
            if not self.blocks:
                torch.backends.cuda.enable_cudnn_sdp(True)


_WITHOUT_CUDNN = _WithoutCudnn()


def without_cudnn_attention() -> contextlib.AbstractContextManager[Any]:
    """A block in which F.scaled_dot_product_attention takes no kernel of cuDNN's."""
    compiles = is_dynamo_compiling()  # a graph enters no lock
    if not torch.backends.cuda.cudnn_sdp_enabled() and (compiles or not _WITHOUT_CUDNN.blocks):
        return contextlib.nullcontext()
    if compiles:
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )
    return _WITHOUT_CUDNN


def without_fused_attention() -> contextlib.AbstractContextManager[Any]:
    """A block in which F.scaled_dot_product_attention is plain matrix products."""
    return sdpa_kernel(SDPBackend.MATH)


def is_readable(tensor: Tensor) -> bool:
    """Whether the host can ask for its numbers: not in a graph, under torch.func, or on the meta device."""
    return not (
        is_compiling() or tensor.is_meta or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module is the `forward` of class `kind` and nothing more.

    Its weight may then be read in place of the call. Not so of an adapter or another module in its place, or
    where hooks (those of all modules included) or a `forward` of its own would be passed over.

    Args:
        module: the one that would be called.
        kind: the class that it must be of, a subclass not being enough.
    """
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )
