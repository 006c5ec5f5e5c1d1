"""What a model with MAE gates does beside its forward pass: keep the gates' statistics, on all workers."""

from typing import Callable, Optional

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor

from moa_fairseq.attention.sequence_gate import absorb_statistics, gates_of


class GatedModel:
    """Mixed into a fairseq model: after each update, what its gates observed enters their statistics.

    The model is told the number of updates after every update, and once more before every micro-batch;
    only a new number ends an update. Nothing is pending after one in which the gates were
    frozen, and in one in which they learn all workers have something, so all of them meet here.
    """

    _updates_seen: Optional[int] = None

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq's hook."""
        super().set_num_updates(num_updates)
        if num_updates != self._updates_seen:
            self._updates_seen = num_updates
            gates = gates_of(self)
            if any(gate.norm.has_pending for gate in gates):
                absorb_statistics(gates, sum_over_workers())


def sum_over_workers() -> Optional[Callable[[Tensor], None]]:
    """A function that adds up a tensor over the data-parallel workers in place; None where there is one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) == 1:
        return None
    return lambda tensor: distributed.all_reduce(tensor, group)
