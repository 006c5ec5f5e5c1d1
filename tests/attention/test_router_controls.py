"""Routers whose choice or gates are not learned: against float64 loops, their gradients, what is saved."""

import copy

import pytest
import torch

from moa_fairseq.attention.collector import collect_decisions, tokens_of_queries
from moa_fairseq.attention.expert_draw import scramble
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.attention.moh import MixtureOfHeads
from moa_fairseq.attention.routers import TopKRouter
from moa_fairseq.attention.switchhead import SwitchHeadAttention
from moa_fairseq.errors import UserError

C, E, K = 12, 5, 2
IDS = torch.tensor([[7, 4, 7, 9], [4, 8, 11, 7]])
HASH_BITS = 2**64


def as_signed(number):
    number %= HASH_BITS
    return number - HASH_BITS if number >= HASH_BITS // 2 else number


def splitmix(number):
    """splitmix64 in Python's unbounded integers; the sign is the leading bit."""
    number = (number + 0x9E3779B97F4A7C15) % HASH_BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % HASH_BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % HASH_BITS
    return as_signed(number ^ (number >> 31))


def hashed(token, salt, experts, per_token):
    """The experts with the largest scrambled numbers, the largest first."""
    numbers = [splitmix(splitmix(token + salt) + expert) for expert in range(experts)]
    return sorted(range(experts), key=lambda expert: -numbers[expert])[:per_token]


def moa(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": 4, **settings}
    module = MixtureOfAttention(C, **sizes, self_attention=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module.to(dtype)


def loop(module, x, experts_of, gates_of):
    """MoA Eq. 6 token by token. experts_of(b, t, probs) → K experts; gates_of(chosen probs) → K gates."""
    p = dict(module.named_parameters())
    out = torch.zeros_like(x)
    for b in range(x.size(1)):
        keys, values = (x[:, b] @ p[f"{name}.weight"].t() for name in ("k_proj", "v_proj"))
        for t in range(x.size(0)):
            probs = torch.softmax(p["router.projection.weight"] @ x[t, b], -1)
            experts = experts_of(b, t, probs)
            for expert, gate in zip(experts, gates_of(probs[experts])):
                q = p["q_experts.weight"][expert] @ x[t, b]
                head = torch.softmax(keys @ q / 2.0, -1) @ values
                out[t, b] = out[t, b] + gate * (head @ p["out_experts.weight"][expert])
    return out


def learned(b, t, probs):
    return probs.topk(K).indices.tolist()


def detached(chosen):
    return chosen / chosen.sum().detach()


def compare(module, out, expected, x):
    torch.testing.assert_close(out, expected)
    tensors = [x, *(p for p in module.parameters() if p.requires_grad)]
    upstream = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, tensors, upstream, retain_graph=True, allow_unused=True),
        torch.autograd.grad(expected, tensors, upstream, allow_unused=True),
    ):
        torch.testing.assert_close(one, other)


def rows():
    return torch.randn(4, 2, C, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("per_token", [K, E])
def test_uniform_gates_are_one_kth_and_the_router_has_no_gradient(backend, per_token):
    module, x = moa(router_gates="uniform", experts_per_token=per_token, backend=backend), rows()
    with collect_decisions() as decisions:
        out, _ = module(x, x, x)
    assert torch.equal(decisions[0][1].gate, torch.full((8, per_token), 1 / per_token, dtype=torch.float64))
    assert not decisions[0][1].gate.requires_grad and decisions[0][1].probs.requires_grad
    choose = (lambda b, t, probs: list(range(E))) if per_token == E else learned
    expected = loop(module, x, choose, lambda chosen: [1 / per_token] * per_token)
    compare(module, out, expected, x)
    out.sum().backward()
    assert module.router.projection.weight.grad is None


def test_straight_through_gates_are_even_and_have_the_learned_gradient():
    module, x = moa(router_gates="straight-through"), rows()
    out, _ = module(x, x, x)
    expected = loop(module, x, learned, lambda chosen: 1 / K + detached(chosen) - detached(chosen).detach())
    compare(module, out, expected, x)
    out.square().sum().backward()
    assert module.router.projection.weight.grad.abs().sum() > 0


def test_even_gates_are_those_of_equal_logits_for_other_settings_too():
    x = torch.randn(6, C)
    gate = lambda **settings: TopKRouter(C, E, K, gates="uniform", **settings)(x).gate  # noqa: E731
    assert torch.equal(gate(renormalize="none"), torch.full((6, K), 1 / E))
    assert torch.equal(gate(activation="sigmoid"), torch.full((6, K), 1 / K))
    padding = torch.arange(6) > 3
    router = TopKRouter(C, E, K, gates="uniform")
    assert router(x, padding).gate.sum(1).tolist() == [1, 1, 1, 1, 0, 0]


def test_a_frozen_router_routes_as_a_learned_one_but_stays_random():
    module, x = moa(router_choice="frozen"), rows()
    assert [n for n, p in module.named_parameters() if not p.requires_grad] == ["router.projection.weight"]
    out, _ = module(x, x, x)
    compare(module, out, loop(module, x, learned, detached), x)
    before = module.router.projection.weight.clone()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    out.sum().backward()
    optimizer.step()
    assert module.router.projection.weight.grad is None
    assert torch.equal(module.router.projection.weight, before)
    assert "router.projection.weight" in module.state_dict()
    assert not torch.equal(module.q_experts.weight, moa().q_experts.weight)


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_a_hash_chooses_by_token_and_the_gates_are_learned(backend):
    module, x = moa(router_choice="hash", backend=backend), rows()
    salt = int(module.router.token_hash.salt)
    with tokens_of_queries(IDS), collect_decisions() as decisions:
        out, _ = module(x, x, x)
    index = decisions[0][1].expert_index.view(2, 4, K)
    for b in range(2):
        for t in range(4):
            assert index[b, t].tolist() == hashed(int(IDS[b, t]), salt, E, K)
    expected = loop(module, x, lambda b, t, probs: hashed(int(IDS[b, t]), salt, E, K), detached)
    compare(module, out, expected, x)
    out.square().sum().backward()
    assert module.router.projection.weight.grad.abs().sum() > 0


def test_all_sets_of_experts_are_equally_likely_and_modules_differ():
    one, other = (TopKRouter(C, E, K, choice="hash").token_hash for _ in range(2))
    ids = torch.arange(20_000).view(100, 200)
    with tokens_of_queries(ids):
        first, second = one(20_000), other(20_000)
    assert (first[:, 0] != first[:, 1]).all()
    pairs = torch.bincount(first[:, 0] * E + first[:, 1], minlength=E * E).view(E, E)
    off_diagonal = pairs[~torch.eye(E, dtype=torch.bool)]
    assert (off_diagonal - 1000).abs().max() < 5 * 1000**0.5  # 20 ordered pairs, 1,000 each
    same = (first[:, 0] == second[:, 0]).double().mean()
    assert abs(float(same) - 1 / E) < 0.02


def test_a_hash_is_saved_and_copied_with_its_module():
    module, fresh = moa(router_choice="hash"), moa(router_choice="hash")
    fresh.router.reset_parameters()
    x = rows()
    fresh.load_state_dict(module.state_dict())
    with tokens_of_queries(IDS):
        expected = module(x, x, x)[0]
        assert torch.equal(fresh(x, x, x)[0], expected)
        assert torch.equal(copy.deepcopy(module)(x, x, x)[0], expected)
    assert module.half().router.token_hash.salt.dtype == torch.int64
    assert torch.equal(scramble(torch.tensor([5])), torch.tensor([splitmix(5)]))


def test_a_hash_needs_the_ids():
    module, x = moa(router_choice="hash"), rows()
    with pytest.raises(UserError, match="--router-choice hash needs the ids"):
        module(x, x, x)
    with (
        tokens_of_queries(IDS[:, :0].new_zeros(3, 4)),
        pytest.raises(UserError, match="--router-choice hash"),
    ):
        module(x, x, x)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"choice": "hash", "experts_per_token": E}, "--router-choice hash .*nothing to choose"),
        ({"choice": "hash", "bias_rate": 0.1}, "--routing-bias-rate 0.1"),
        ({"choice": "frozen", "noise": True}, "--routing-noise"),
        ({"choice": "fixed"}, "--router-choice fixed is unknown"),
        ({"gates": "even"}, "--router-gates even is unknown"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        TopKRouter(C, E, settings.pop("experts_per_token", K), **settings)


H, SHARED = 6, 2


def moh(**settings):
    torch.manual_seed(1)
    module = MixtureOfHeads(C, H, SHARED, K, self_attention=True, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return module.double()


def heads_loop(module, x, routed_of):
    """MoH Eq. 4-6 token by token. routed_of(b, t, probs) → the K chosen of the H − SHARED routed heads."""
    p, dim = dict(module.named_parameters()), C // H
    out = torch.zeros_like(x)
    project = lambda name: x @ p[f"{name}.weight"].t() + p[f"{name}.bias"]  # noqa: E731
    q, k, v = project("q_proj"), project("k_proj"), project("v_proj")
    for b in range(x.size(1)):
        for t in range(x.size(0)):
            logits = p["router.projection.weight"] @ x[t, b]
            routed, shared, stage = logits.split([H - SHARED, SHARED, 2])
            routed, shared, stage = (torch.softmax(part, -1) for part in (routed, shared, stage))
            gates = {i: stage[0] * shared[i] for i in range(SHARED)}
            gates.update({SHARED + i: stage[1] * routed[i] for i in routed_of(b, t, routed)})
            total = p["out_proj.bias"]
            for head, gate in gates.items():
                part = slice(head * dim, (head + 1) * dim)
                weights = torch.softmax(k[:, b, part] @ q[t, b, part] / dim**0.5, -1)
                total = total + gate * (p["out_proj.weight"][:, part] @ (weights @ v[:, b, part]))
            out[t, b] = total
    return out


@pytest.mark.parametrize("skip", ["always", "never"])
@pytest.mark.parametrize("choice", ["frozen", "hash"])
def test_mohs_routed_heads_at_random_and_by_hash(choice, skip):
    module, x = moh(router_choice=choice, skip=skip), rows()
    with tokens_of_queries(IDS):
        out, _ = module(x, x, x)
    if choice == "hash":
        salt = int(module.router.token_hash.salt)
        routed_of = lambda b, t, probs: hashed(int(IDS[b, t]), salt, H - SHARED, K)  # noqa: E731
    else:
        routed_of = learned
    compare(module, out, heads_loop(module, x, routed_of), x)
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    assert frozen == (["router.projection.weight"] if choice == "frozen" else [])


def test_moh_refuses_what_cannot_be_frozen_or_hashed():
    with pytest.raises(UserError, match="--moh-router query-norm"):
        moh(router="query-norm", router_choice="frozen")
    with pytest.raises(UserError, match="nothing to choose"):
        MixtureOfHeads(C, H, SHARED, H - SHARED, router_choice="hash")


def switchhead(**settings):
    torch.manual_seed(2)
    return SwitchHeadAttention(C, 2, 4, self_attention=True, **settings).double()


def switchhead_loop(module, x, gated_values=True):
    """SwitchHead Eq. 7-10 head by head and token by token; gated_values: whether values are experts, too."""
    p, experts, per_token = dict(module.named_parameters()), module.num_experts, module.experts_per_token
    sigmoids = {
        side: torch.sigmoid(x @ p[f"{side}.projection.weight"].t())
        for side in ("router", "source_router")
        if f"{side}.projection.weight" in p
    }
    out = torch.zeros_like(x)
    for b in range(x.size(1)):
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            q, k = (x[:, b] @ p[f"{name}.weight"][part].t() for name in ("q_proj", "k_proj"))
            mine = range(h * experts, (h + 1) * experts)
            chosen = {
                (side, t): sorted(mine, key=lambda e, s=s, t=t: -float(s[t, b, e].detach()))[:per_token]
                for side, s in sigmoids.items()
                for t in range(x.size(0))
            }
            if gated_values:
                values = torch.stack(
                    [
                        sum(
                            sigmoids["source_router"][t, b, e] * (p["v_proj.weight"][e] @ x[t, b])
                            for e in chosen["source_router", t]
                        )
                        for t in range(x.size(0))
                    ]
                )
            else:
                values = x[:, b] @ p["v_proj.weight"][part].t()
            heads = torch.softmax(q @ k.t() / 2.0, -1) @ values
            for t in range(x.size(0)):
                for e in chosen["router", t]:
                    out[t, b] = out[t, b] + sigmoids["router"][t, b, e] * (heads[t] @ p["out_proj.weight"][e])
    return out


def test_switchheads_frozen_routers():
    module, x = switchhead(num_experts=3, experts_per_token=2, router_choice="frozen"), rows()
    out, _ = module(x, x, x)
    compare(module, out, switchhead_loop(module, x), x)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert (
        frozen == {"router.projection.weight", "source_router.projection.weight"} <= set(module.state_dict())
    )


def test_switchhead_with_one_expert_gated_at_the_output_alone():
    module, x = switchhead(experts="o"), rows()
    assert module.source_router is None and module.router.projection.weight.shape == (2, C)
    out, _ = module(x, x, x)
    compare(module, out, switchhead_loop(module, x, gated_values=False), x)
