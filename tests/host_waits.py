"""What the host of a GPU would wait for, counted on a CPU: all that asks for the content of a tensor."""

import contextlib
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moa_fairseq.layers.experts import every_expert, projection

aten = torch.ops.aten
# Below autograd, whoever asks: a number (`item`, `bool`, `float`), or a result as long as contents say.
ASKING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Where Python asks for memory of the host, which a tensor on the CPU gives without any operation.
COPYING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


def place():
    """The innermost line of fairseq or of this package: "file.py:12 code"."""
    for frame in reversed(traceback.extract_stack()):
        if "fairseq" in frame.filename and "tests" not in Path(frame.filename).parts:
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
    return "elsewhere"


class _Operations(TorchDispatchMode):
    def __init__(self, places):
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        by_mask = function in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if function in ASKING or by_mask:
            self.places[place()] += 1
        return function(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, places):
        super().__init__()
        self.places = places

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in COPYING:
            self.places[place()] += 1
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_waits():
    """A Counter of places that would have waited inside the block, filled when it ends."""
    places = Counter()
    with _Copies(places), _Operations(places):
        yield places


def listed(places):
    return "\n".join(f"{count} × {place}" for place, count in places.most_common())


def by_every_expert(rows, weight, bias, gates, order, sizes):
    is_up, per_row, per_sum = sizes
    fan = per_sum if is_up else per_row
    return every_expert.run(projection.Product(rows, weight, bias, gates, order, is_up, fan))


# Triton's kernels run on GPUs alone: what computes the same in their place asks for nothing either.
TRITON = SimpleNamespace(
    why_not=lambda: "", takes=lambda rows, weight: True, project=by_every_expert
)
