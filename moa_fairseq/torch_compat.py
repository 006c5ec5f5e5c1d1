"""What differs between torch versions in the parts that this package calls."""

import contextlib
from typing import ContextManager, Iterator, Optional

import torch


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype that autocast gives matmuls on "cpu" or "cuda" right now, or None when it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch ≥ 2.4: one call for every device
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


def full_precision(device_type: str) -> ContextManager:
    """A block in which autocast is off; entering it costs nothing where it is off already."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def without_cudnn_attention() -> ContextManager:
    """A block in which F.scaled_dot_product_attention takes no kernel of cuDNN's."""
    if not getattr(torch.backends.cuda, "cudnn_sdp_enabled", bool)():  # a torch without it, or switched off
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextlib.contextmanager
def without_fused_attention() -> Iterator[None]:
    """A block in which F.scaled_dot_product_attention on the CPU is plain matrix products.

    The switch stands under `cuda`, but torch asks it on the CPU, too; torch.nn.attention is younger (2.3).
    """
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(enabled)


def is_compiling() -> bool:
    """Whether this code is being traced by `torch.compile`; an old torch does not say."""
    compiler = getattr(torch, "compiler", None)
    asks = getattr(compiler, "is_compiling", None)
    return asks is not None and bool(asks())
