"""Many values of a forward pass in fairseq's log: one tensor on the device, one wait of the host for it.

fairseq adds the logging outputs of micro-batches and workers up entry by entry, and every metric looks at
its own sum. A tensor is an entry as good as a number, so a pass has one with all of its values; their
names, which every process knows, are its key.
"""

from typing import Any, Dict, Sequence, Tuple

import torch
from torch import Tensor

_PASSES = "passes"


def logged(prefix: str, names: Sequence[str], values: Tensor) -> Dict[str, Any]:
    """Entries for the logging output of one forward pass: values [len(names)]; names have no spaces."""
    return {prefix + " ".join(names): values.detach(), prefix + _PASSES: 1}


def mean_values(prefix: str, logging_outputs: Sequence[Dict[str, Any]]) -> Tuple[Dict[str, float], float]:
    """What was `logged` under prefix: name → mean over forward passes, and how many these were."""
    sums: Dict[str, Any] = {}
    for log in logging_outputs:
        for key in log:
            if key.startswith(prefix):
                sums[key] = sums[key] + log[key] if key in sums else log[key]
    # Between workers fairseq makes tensors of numbers too: the passes.
    tensors = {key: value.reshape(-1) for key, value in sums.items() if torch.is_tensor(value)}
    numbers = iter(torch.cat(list(tensors.values())).tolist() if tensors else ())
    totals: Dict[str, float] = {}
    for key, value in sums.items():
        for name in key[len(prefix) :].split(" "):
            totals[name] = totals.get(name, 0) + (next(numbers) if key in tensors else value)
    passes = totals.pop(_PASSES, 0)
    return ({name: total / passes for name, total in totals.items()} if passes else {}), passes
