"""Questions about torch's state, and blocks that change it: autocast, kernels of attention, hooks."""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast for matrix products on "cpu" or "cuda"; None: autocast is off."""
    # torch's function raises for "meta"
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def full_precision(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A block in which autocast is off."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


class _WithoutCudnn:
    """A block without cuDNN. torch's switch is global, so the last open block switches cuDNN on again."""

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
    """A block in which F.scaled_dot_product_attention uses no kernel of cuDNN."""
    compiles = is_dynamo_compiling()  # a graph cannot enter a lock
    if not torch.backends.cuda.cudnn_sdp_enabled() and (compiles or not _WITHOUT_CUDNN.blocks):
        return contextlib.nullcontext()
    if compiles:
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )
    return _WITHOUT_CUDNN


def without_fused_attention() -> contextlib.AbstractContextManager[Any]:
    """A block in which F.scaled_dot_product_attention consists of plain matrix products."""
    return sdpa_kernel(SDPBackend.MATH)


def is_readable(tensor: Tensor) -> bool:
    """Whether Python can read a tensor's numbers: not in a graph, in torch.func or on the meta device."""
    return not (
        is_compiling() or tensor.is_meta or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module only runs the `forward` of the class `kind`.

    The caller may then use the module's weight instead of calling it. This is not allowed for another module
    in its place, such as an adapter, nor if the module has hooks (those of all modules included) or its own
    `forward`.

    Args:
        module: the module that would be called.
        kind: the class that the module must have; a subclass is not enough.
    """
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )
