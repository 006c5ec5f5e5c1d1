"""Many values of a forward pass for fairseq's log, in one tensor: the host waits for the device once.

fairseq adds up the logging outputs of micro-batches and workers entry by entry. An entry may be a tensor, so
each pass has one entry with all of its values, and with a 1, which counts the passes. The entry's key
consists of the values' names, which every process knows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def logged(prefix: str, names: Sequence[str], values: Tensor) -> dict[str, Any]:
    """An entry for the logging output of one forward pass.

    Args:
        prefix: the beginning of the entry's key, by which `mean_values` finds the entry.
        names: the names of the values, without spaces.
        values: [len(names)]; they stay on their device, and get no gradient.

    Returns:
        A dictionary of one entry: the key is the prefix and the names, the value a tensor [len(names) + 1] of
        the values and a 1.
    """
    return {prefix + " ".join(names): torch.cat([values.detach(), values.new_ones(1)])}


def mean_values(
    prefix: str, logging_outputs: Sequence[dict[str, Any]]
) -> tuple[dict[str, float], float]:
    """The means over forward passes of the values that were `logged` under a prefix.

    A pass may lack some names, because LayerDrop leaves modules out.

    Args:
        prefix: the prefix that `logged` was given.
        logging_outputs: the outputs of micro-batches and workers; fairseq may have added them up already.

    Returns:
        means: name → mean over the forward passes that logged it.
        passes: the number of passes that logged anything.
    """
    sums: dict[str, Tensor] = {}
    for log in logging_outputs:
        for key in log:
            if key.startswith(prefix):
                sums[key] = sums.get(key, 0) + log[key]
    numbers = iter(torch.cat(list(sums.values())).tolist() if sums else ())
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    passes = 0.0
    for key in sums:
        names = key[len(prefix) :].split(" ")
        values = [next(numbers) for _ in names]
        count = next(numbers)
        passes += count
        for name, value in zip(names, values):
            totals[name] = totals.get(name, 0.0) + value
            counts[name] = counts.get(name, 0.0) + count
    return {name: total / counts[name] for name, total in totals.items()}, passes
