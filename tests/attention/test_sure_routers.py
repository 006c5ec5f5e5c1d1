"""The mutual information of routers that are sure: its slope must not become infinite times zero."""

import pytest
import torch

from moa_fairseq.attention.losses import mutual_information_loss
from moa_fairseq.attention.routers import ACTIVATIONS, TopKRouter


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("padding", [None, [True, True, True], [False, False, True]])
def test_probabilities_of_zero_leave_finite_gradients(activation, padding):
    torch.manual_seed(0)
    router = TopKRouter(4, num_experts=3, experts_per_token=2, activation=activation)
    x = torch.randn(3, 4)
    x[2] *= 1e6  # its probabilities are 0 and 1 in float32
    x.requires_grad_()
    loss = mutual_information_loss(router(x, None if padding is None else torch.tensor(padding)))
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and router.projection.weight.grad.isfinite().all()
