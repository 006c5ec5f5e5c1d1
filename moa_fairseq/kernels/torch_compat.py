"""What differs between versions of torch, as far as the kernels meet it."""

from typing import Optional

import torch


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype that autocast gives matmuls on "cpu" or "cuda" right now, or None when it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # torch ≥ 2.4: one call for every device
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
