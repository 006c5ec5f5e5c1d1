"""What a model with MAE gates does beside its forward pass: keep the gates' statistics, on all workers."""

from typing import Any, Callable, Optional

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor

from moa_fairseq.attention.sequence_gate import absorb_statistics, gates_of
from moa_fairseq.errors import UserError


class GatedModel:
    """Mixed into a fairseq model: after each update, what its gates observed enters their statistics.

    The model is told the number of updates after every update, and once more before every micro-batch;
    only a new number ends an update. Every worker has observed something in it, if only to forget it, so
    all of them meet here.
    """

    _updates_seen: Optional[int] = None

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "GatedModel":
        """fairseq's hook. Raises UserError if --gate-norm batch would change no gate of the model."""
        model = super().build_model(args, task)
        gates = gates_of(model)
        wanted = getattr(args, "gate_norm", None)
        if wanted == "batch" and gates and all(gate.norm.statistics != wanted for gate in gates):
            raise UserError(
                "--gate-norm batch has no meaning for this model: all of its gates are causal, and a batch's "
                "own statistics would tell them about later tokens. Leave it out (--gate-norm earlier); it "
                "is for models with an encoder, whose gates see whole sentences."
            )
        return model

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
