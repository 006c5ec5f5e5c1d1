"""Settings of MoA beyond the paper: heads inside an expert, keys and values of its own, other gates."""

import math

import pytest
import torch

from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.observers import observers_of, update_observers
from moa_fairseq.attention.routers import TopKRouter
from moa_fairseq.errors import UserError

C, D = 12, 6


def build(num_experts, per_token, **settings):
    torch.manual_seed(3)
    module = MixtureOfAttention(C, num_experts, per_token, D, bias=True, self_attention=True, **settings)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module.double().eval()


def inputs(length=5, batch=2):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, batch, C, generator=generator, dtype=torch.float64, requires_grad=True)


def literal(module, x, gate):
    """Σ_i gate_i · concat_p(head p of expert i) · W_i^o, one by one; gate [T, B, E]."""
    p, own = dict(module.named_parameters()), module.key_heads > module.heads_per_expert
    total = 0.0
    for i in range(module.num_experts):
        q = x @ p["q_experts.weight"][i].t() + p["q_experts.bias"][i]
        heads = []
        for n in range(module.heads_per_expert):
            rows = slice(n * D, (n + 1) * D)
            group = i * module.heads_per_expert + n if own else n
            keys = slice(group * D, (group + 1) * D)
            k, v = (
                x @ p[f"{name}.weight"][keys].t() + p[f"{name}.bias"][keys] for name in ("k_proj", "v_proj")
            )
            weights = torch.softmax(torch.einsum("tbd,sbd->bts", q[..., rows], k) / math.sqrt(D), -1)
            heads.append(torch.einsum("bts,sbd->tbd", weights, v))
        out = torch.cat(heads, -1) @ p["out_experts.weight"][i] + p["out_experts.bias"][i]
        total = total + gate[..., i : i + 1] * out
    return total


@pytest.mark.parametrize(
    "sizes, settings",
    [
        ((5, 2), {"heads_per_expert": 3}),
        ((4, 4), {"heads_per_expert": 2}),
        ((4, 4), {"keys_values": "own"}),
        ((3, 3), {"keys_values": "own", "heads_per_expert": 2}),
        ((4, 4), {"keys_values": "own", "activation": "sigmoid"}),
        ((6, 2), {"activation": "sigmoid"}),
    ],
)
def test_output_and_gradients_equal_the_sum_written_out(sizes, settings):
    module = build(*sizes, **settings)
    upstream = torch.randn(5, 2, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for written_out in (False, True):
        x = inputs()
        with collect_decisions() as decisions:
            out, _ = module(x, x, x, need_weights=False)
        if written_out:
            decision = module.router(x.transpose(0, 1).reshape(-1, C))
            gate = torch.zeros_like(decision.probs).scatter(1, decision.expert_index, decision.gate)
            out = literal(module, x, gate.view(2, 5, -1).transpose(0, 1))
        module.zero_grad()
        out.backward(upstream)
        results.append([out, x.grad, *(p.grad for p in module.parameters())])
    assert len(decisions) == 1
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


def test_gates_of_one_make_dense_attention_of_a_mixture_with_keys_of_its_own():
    """The control for routing: with equal gates nothing but multi-head attention is left."""
    module = build(4, 4, keys_values="own", activation="sigmoid")
    torch.nn.init.zeros_(module.router.projection.weight)  # every gate is σ(0) = 1/2
    dense = torch.nn.MultiheadAttention(4 * D, 4, kdim=C, vdim=C).double().eval()
    x = inputs().detach()
    with torch.no_grad():
        q = torch.einsum("tbc,edc->tbed", x, module.q_experts.weight) + module.q_experts.bias
        dense.q_proj_weight.copy_(torch.eye(4 * D))
        dense.k_proj_weight.copy_(module.k_proj.weight)
        dense.v_proj_weight.copy_(module.v_proj.weight)
        dense.in_proj_bias.copy_(torch.cat([torch.zeros(4 * D), module.k_proj.bias, module.v_proj.bias]))
        dense.out_proj.weight.copy_(torch.eye(4 * D))
        dense.out_proj.bias.zero_()
        heads, _ = dense(q.flatten(2), x, x)
        expected = heads @ module.out_experts.weight.flatten(0, 1) + module.out_experts.bias.sum(0)
        torch.testing.assert_close(module(x, x, x)[0], expected / 2)


def test_impossible_settings_are_refused_by_their_flags():
    for sizes, settings, message in (
        ((4, 2), {"keys_values": "own"}, "--expert-keys-values own"),
        ((4, 2), {"keys_values": "mine"}, "--expert-keys-values mine"),
        ((4, 2), {"heads_per_expert": 0}, "--heads-per-expert"),
        ((4, 2), {"activation": "relu"}, "--router-activation relu"),
        ((4, 4), {"routing_bias_rate": 0.1}, "--routing-bias-rate 0.1"),
    ):
        with pytest.raises(UserError, match=message):
            build(*sizes, **settings)


def test_a_selection_bias_evens_out_loads_without_a_gradient():
    torch.manual_seed(0)
    router = TopKRouter(8, 6, 2, bias_rate=0.002)
    with torch.no_grad():
        router.projection.weight.copy_(torch.randn(6, 8) * 0.3)
        router.projection.weight[0] += 1.0  # expert 0 is everybody's first
    x = torch.randn(600, 8) + 0.5
    first = router(x)
    assert observers_of(router) == [router] and router.has_pending
    before = [parameter.clone() for parameter in router.parameters()]
    for _ in range(600):
        decision = router(x)
        update_observers(observers_of(router))
    spread = [float(d.expert_counts.max() / d.expert_counts.mean()) for d in (first, decision)]
    assert spread[0] > 2.0 and spread[1] < 1.4
    assert all(torch.equal(one, other) for one, other in zip(before, router.parameters()))
    # the bias chooses, and weighs nothing
    chosen = decision.probs.gather(1, decision.expert_index)
    torch.testing.assert_close(decision.gate, chosen / chosen.sum(-1, keepdim=True))
    # an update by the rule, expert by expert
    bias, loads = router.selection_bias.clone(), torch.tensor([3.0, 1, 2, 2, 4, 0])
    router.update(loads)
    step = 0.002 * torch.tensor([-1.0, 1, 0, 0, -1, 1])
    torch.testing.assert_close(router.selection_bias, bias + step)
    router.eval()(x)
    assert not router.has_pending or router.pending.eq(0).all()
