"""A data set run through a model with teacher forcing, and what its routers decided."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Tuple

import torch
from torch import nn

from moa_fairseq.attention.collector import NamedDecisions, collect_decisions
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import batches


def forward_passes(
    task: Any, model: nn.Module, subset: str, max_tokens: int, device: torch.device
) -> Iterator[Tuple[Dict[str, Any], NamedDecisions]]:
    """(batch, decisions of all routers in forward order) for every batch of a subset.

    The model is put in evaluation mode on `device`. Raises UserError if the model routes nothing, or if
    the subset does not exist or is empty.
    """
    model = model.to(device).eval()
    empty = True
    for sample in batches(task, model, subset, max_tokens, device):
        with torch.no_grad(), collect_decisions() as decisions:
            model(**sample["net_input"], features_only=True)  # the output layer routes nothing
        if not decisions:
            raise UserError(f"This model routes nothing: {type(model).__name__} has no mixture of experts.")
        yield sample, decisions
        empty = False
    if empty:
        raise UserError(f"The subset {subset} has no sentence of at most {max_tokens} tokens.")
