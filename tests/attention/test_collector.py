import torch

from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.attention.expert_draw import ExpertDraw, drawing_experts
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention


def test_nested_collectors_all_hear():
    module, x = MixtureOfAttention(8, 3, 2, 4, self_attention=True), torch.randn(2, 1, 8)
    with collect_decisions() as outer:
        module(x, x, x)
        with collect_decisions() as inner:
            module(x, x, x)
        module(x, x, x)
    module(x, x, x)
    assert (len(outer), len(inner)) == (3, 1)
    assert outer[1][1] is inner[0][1]


def test_unnamed_attentions_have_names_and_draws_of_their_own():
    modules = [MixtureOfAttentiveExperts(8, 8, self_attention=True).train() for _ in range(2)]
    assert modules[0].name != modules[1].name
    x, draw = torch.randn(3, 64, 8), ExpertDraw(torch.arange(64), seed=1, update=1)
    with drawing_experts(draw), collect_decisions() as decisions:
        for module in modules:
            module(x, x, x)
    one, other = (decision.expert_index for _, decision in decisions)
    assert not torch.equal(one, other)
