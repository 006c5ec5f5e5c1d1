"""Switches of torch's, each for a block: autocast, and the kernels of its attention."""

import contextlib
from typing import ContextManager, Optional

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype that autocast gives matmuls on "cpu" or "cuda" right now, or None when it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def full_precision(device_type: str) -> ContextManager:
    """A block in which autocast is off; entering it costs nothing where it is off already."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def without_cudnn_attention() -> ContextManager:
    """A block in which F.scaled_dot_product_attention takes no kernel of cuDNN's."""
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def without_fused_attention() -> ContextManager:
    """A block in which F.scaled_dot_product_attention is plain matrix products."""
    return sdpa_kernel(SDPBackend.MATH)
