"""Adding up what a model's modules observe, over all workers."""

from typing import Callable, Optional

import torch
from fairseq.distributed import utils as distributed
from torch import Tensor


def sum_over_workers() -> Optional[Callable[[Tensor], None]]:
    """A function that adds up a tensor over the data-parallel workers in place; None where there is one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) == 1:
        return None
    return lambda tensor: distributed.all_reduce(tensor, group)
