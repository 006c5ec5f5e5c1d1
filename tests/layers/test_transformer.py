"""A whole decoder as a plain module: step by step as in one pass, also with padding on the left."""

import pytest
import torch

from moa_fairseq.layers.transformer import TransformerStack
from moa_fairseq.layers.transformer_layer import StackSettings

PAD = 1
SYMBOLS = 20
MOA = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 4}


def decoder(family, fields, **more):
    torch.manual_seed(0)
    sizes = (SYMBOLS, PAD, 12, 16, 2, 2)
    settings = StackSettings(family, fields, *sizes, causal=True, **more)
    return TransformerStack(settings, own_output=True).double().eval()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    "positions", [{}, {"position_embedding": "learned", "position_rows": 12}], ids=str
)
@pytest.mark.parametrize(("family", "fields"), [("moa", MOA), ("dense", {})])
def test_steps_have_the_positions_of_the_whole_text(family, fields, positions, is_padded):
    """The padding of a step is that of all positions so far, as transformers gives it."""
    stack = decoder(family, fields, **positions)
    ids = torch.randint(4, SYMBOLS, (3, 7))
    padding = torch.arange(7) < torch.tensor([[0], [2], [4]])
    ids[padding] = PAD
    whole, _ = stack(ids, padding if is_padded else None)
    caches = stack.new_caches()
    start = 0
    for size in (3, 1, 2, 1):
        end = start + size
        step = padding[:, :end] if is_padded else None
        out, _ = stack(ids[:, start:end], step, caches=caches)
        real = ~padding[:, start:end]
        torch.testing.assert_close(out[real], whole[:, start:end][real])
        start = end
