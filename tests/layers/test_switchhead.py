"""SwitchHeadAttention: decisions, dropped experts, refusals. test_equations.py has its equations."""

import pytest
import torch
from equations import drawn
from time_first import SwitchHeadAttention

from moa_fairseq.errors import UserError
from moa_fairseq.layers.sigmoid_router import SigmoidTopKRouter
from moa_fairseq.layers.switchhead import SwitchHeadSettings
from moa_fairseq.plugin.forward_context import collect_routings

C = 12
H = 2
D = 6
E = 4
K = 2


def build(seed=0, dtype=torch.float32, **settings):
    torch.manual_seed(seed)
    sizes = {
        "switchhead_heads": H,
        "expert_dim": D,
        "num_experts": E,
        "experts_per_token": K,
        **settings,
    }
    return drawn(SwitchHeadAttention(C, **sizes), 0.5).to(dtype).eval()


def test_no_experts_is_dense_attention_without_any_decision():
    module = build(switchhead_experts="none", self_attention=True)
    with collect_routings() as decisions:
        module(*[torch.randn(4, 2, C)] * 3)
    assert decisions == [] and module.router is None and module.source_router is None


def test_two_decisions_leave_the_attention():
    module = build(self_attention=True)
    module.name = "layer"
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with collect_routings() as decisions:
        module(*[torch.randn(4, 2, C)] * 3, key_padding_mask=padding)
    assert [name for name, _ in decisions] == ["layer", "layer.keys"]
    for (_, decision), side in zip(decisions, ("queries", "keys")):
        assert (decision.side, decision.groups, decision.num_experts) == (side, H, H * E)
        assert decision.expert_ids.shape == (8, H * K) and not decision.auxiliary
        assert (decision.gates[decision.padding] == 0).all() and decision.padding.sum() == 2
        heads = decision.expert_ids.view(8, H, K) // E
        assert (heads == torch.arange(H)[None, :, None]).all()


def test_shared_selection_makes_one_decision():
    module = build(self_attention=True, switchhead_shared_selection=True)
    assert module.source_router is None
    with collect_routings() as decisions:
        module(*[torch.randn(4, 2, C)] * 3)
    assert len(decisions) == 1
    cross = build(encoder_decoder_attention=True, switchhead_shared_selection=True)
    assert cross.source_router is not None  # other tokens: there is no decision to share
    gated = build(
        switchhead_experts="o", num_experts=1, experts_per_token=1, self_attention=True
    )
    assert gated.source_router is None and gated.router.projection.weight.shape == (H, C)


def test_expert_dropout_hides_experts_in_training_only():
    torch.manual_seed(0)
    router = SigmoidTopKRouter(C, 4, 2, expert_dropout=0.5)
    x = torch.randn(400, C)
    best = router.eval()(x).expert_ids
    trained = router.train()(x)
    assert torch.equal(router.eval()(x).expert_ids, best)
    kept = (trained.expert_ids.sort(1).values == best.sort(1).values).all(1).double().mean()
    assert 0.1 < kept < 0.45  # both survive in a quarter of the cases
    probs = trained.probs.gather(1, trained.expert_ids)
    lacking = (trained.gates == 0).sum(1)  # fewer than two survive: what is missing has no gate
    assert (lacking > 0).double().mean() == pytest.approx(5 / 16, abs=0.08)
    assert torch.equal(trained.gates[lacking == 0], probs[lacking == 0])
    with pytest.raises(UserError, match="sigma_moe_expert_dropout"):
        SigmoidTopKRouter(C, 4, 2, expert_dropout=1.0, prefix="sigma_moe_")


def test_the_attentions_expert_dropout_is_a_setting():
    settings = SwitchHeadSettings(
        expert_dropout=0.5, num_experts=E, experts_per_token=K, expert_dim=D
    )
    module = SwitchHeadAttention(C, settings, self_attention=True)
    x = torch.randn(9, 2, C)
    assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])
    assert not torch.allclose(module.train()(x, x, x)[0], module(x, x, x)[0])
    with pytest.raises(UserError, match="expert_dropout 1"):
        SwitchHeadAttention(C, SwitchHeadSettings(expert_dropout=1.0))


def test_saturated_sigmoids_are_ordered_by_their_logits():
    router = SigmoidTopKRouter(1, 3, 1)
    with torch.no_grad():
        router.projection.weight.copy_(torch.tensor([[30.0], [50.0], [40.0]]))
    assert router(torch.ones(1, 1)).expert_ids.item() == 1
