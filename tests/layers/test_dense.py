"""Dense attention whose heads are dropped, or ordered as elsewhere; the rest stands in test_equations.py."""

import equations
import pytest
import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from time_first import DenseAttention, MixtureOfAttentiveExperts

from moa_fairseq import layers as attention
from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.plugin.forward_context import forward_context

C = 12
H = 3


def build():
    torch.manual_seed(0)
    return (
        equations.drawn(DenseAttention(C, H, dropped_heads=1, self_attention=True))
        .double()
        .train()
    )


def test_dropped_heads_differ_by_sequence_and_all_work_in_evaluation():
    module = build()
    query = torch.randn(4, 40, C, dtype=torch.float64)
    out = module(query, query, query)[0].transpose(0, 1)
    rows = query.transpose(0, 1)
    # [H, H]: one head left out in each
    without = H / (H - 1) * (1 - torch.eye(H, dtype=torch.float64))
    expected = [
        equations.dense(module, rows, rows, None, None, None, w.expand(40, 1, H))
        for w in without
    ]
    dropped = torch.stack([torch.isclose(out, one).all(2).all(1) for one in expected])  # [H, B]
    assert (dropped.sum(0) == 1).all() and dropped.any(1).all()
    every = equations.dense(module, rows, rows, None, None, None)
    torch.testing.assert_close(module.eval()(query, query, query)[0].transpose(0, 1), every)


def test_multiplications_of_the_projections():
    module = attention.DenseAttention(C, H, key_heads=1, kdim=5, vdim=7)
    assert module.macs(7, 11)["projections"] == 2 * 7 * C * C + 11 * (5 + 7) * C // H


def test_one_dropped_head_is_an_f_step_of_uniform_mae():
    dense = build()
    uniform = (
        MixtureOfAttentiveExperts(C, H, mae_gate="uniform", self_attention=True)
        .double()
        .train()
    )
    uniform.load_state_dict(dense.state_dict())
    query = torch.randn(4, 1, C, dtype=torch.float64)
    by_draw = []
    for update in range(12):
        with forward_context(draw=ExpertDraw(torch.zeros(1, dtype=torch.int64), 1, update)):
            by_draw.append(uniform(query, query, query)[0])
    for _ in range(12):
        out, _ = dense(query, query, query)
        assert any(torch.allclose(out, drawn) for drawn in by_draw)
    torch.testing.assert_close(
        dense.eval()(query, query, query), uniform.eval()(query, query, query)
    )


@pytest.mark.parametrize(
    "widths", [{}, {"kdim": 8, "vdim": 8}, {"kdim": 8, "vdim": 20}], ids=str
)
def test_it_starts_as_fairseqs(widths):
    """Also where keys are of another width, as in a decoder beside a wider encoder."""
    starts = []
    for build in (MultiheadAttention, DenseAttention):
        torch.manual_seed(1)
        module = build(C, H, **widths)
        starts.append({name: (p.std(), p.abs().max()) for name, p in module.named_parameters()})
    assert starts[0].keys() == starts[1].keys()
    for name in ("k_proj.weight", "v_proj.weight", "q_proj.weight", "out_proj.weight"):
        fairseqs, ours = (torch.stack(start[name]) for start in starts)
        torch.testing.assert_close(ours, fairseqs, rtol=0.15, atol=0)


def test_weights_of_the_other_order_of_query_heads_fit_after_reordering():
    """torch's grouped-query attention lets query head h read key head h // (H / G)."""
    heads = 6
    groups = 2
    dim = 4
    module = equations.drawn(
        attention.DenseAttention(C, heads, attention_head_dim=dim, key_heads=groups, bias=False)
    ).double()
    x = torch.randn(3, 5, C, dtype=torch.float64)
    q, k, v = (
        equations.into_heads(x, getattr(module, f"{name}_proj").weight, None, number)
        for name, number in (("q", heads), ("k", groups), ("v", groups))
    )
    theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
    expected = module.out_proj(theirs)
    order = (
        torch.arange(heads * dim).view(groups, heads // groups, dim).transpose(0, 1).flatten()
    )
    with torch.no_grad():
        module.q_proj.weight.copy_(module.q_proj.weight[order])
        module.out_proj.weight.copy_(module.out_proj.weight[:, order])
    torch.testing.assert_close(module(x, x), expected)
