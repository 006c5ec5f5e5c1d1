"""Questions about a batch's token ids, answered on the host that made the batch.

A question to a GPU waits for all work that the GPU has been given, and nothing that waits can be part of a
CUDA graph. `Trainer._prepare_sample` moves a batch to its device; the patch remembers the ids that it moved.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moa_fairseq.plugin.patches.table import patch

# Token ids on a device → (version of that tensor when it was copied, the same ids on the host)
_copies = WeakTensorKeyDictionary()


@patch(
    "fairseq.trainer:Trainer._prepare_sample",
    "plugin/test_host_waits.py::test_no_model_waits_for_the_device",
)
def remember_token_ids(prepare: Callable, trainer: Any, sample: Any, is_dummy: bool = False) -> Any:
    """Move a batch to the device, and remember its token ids on the host (`on_host`).

    Every layer waits for the GPU to learn whether a batch is padded, although the CPU made the batch.
    """
    prepared, is_filler = prepare(trainer, sample, is_dummy)
    before: dict[str, Any] = (sample.get("net_input") if isinstance(sample, dict) else None) or {}
    after: dict[str, Any] = (prepared or {}).get("net_input") or {}
    for name, source in before.items():
        moved = after.get(name)
        if not isinstance(moved, Tensor) or moved is source or moved.is_floating_point():
            continue
        if source.device.type == "cpu":
            _copies[moved] = (moved._version, source)
    return prepared, is_filler


def on_host(tokens: Tensor) -> Tensor | None:
    """The same ids in the host's memory; None if only the device has them in their present state."""
    copied: tuple[int, Tensor] | None = _copies.get(tokens)
    if copied is not None and copied[0] == tokens._version:
        return copied[1]
    return tokens if tokens.device.type == "cpu" else None


def is_padded(tokens: Tensor, padding_idx: int) -> bool:
    """Whether any of the ids [B, T] is padding. Waits for the device if the host does not have them."""
    return bool(_padding(tokens, padding_idx).any())


def is_right_padded(tokens: Tensor, padding_idx: int) -> bool:
    """Whether padding only follows real tokens in ids [B, T]. Waits as `is_padded`."""
    padding = _padding(tokens, padding_idx)
    left_padded = (padding[:, :-1] & ~padding[:, 1:]).any() | padding[:, :1].any()
    return not bool(left_padded)


def _padding(tokens: Tensor, padding_idx: int) -> Tensor:
    host_copy = on_host(tokens)
    return (tokens if host_copy is None else host_copy).eq(padding_idx)
