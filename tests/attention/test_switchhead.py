"""SwitchHeadAttention against the paper's equations (float64 einsums) and against dense attention."""

import itertools
import math

import pytest
import torch
from torch import nn

from moa_fairseq.attention.collector import collect_decisions
from moa_fairseq.attention.initialization import draw_by_fan_in
from moa_fairseq.attention.routing import RoutingDecision
from moa_fairseq.attention.sigmoid_router import SigmoidTopKRouter
from moa_fairseq.attention.switchhead import SwitchHeadAttention, SwitchHeadSettings
from moa_fairseq.errors import UserError

C, H, D, E, K = 12, 2, 6, 4, 2
SUBSETS = ["".join(s) for size in range(1, 5) for s in itertools.combinations("vkqo", size)] + ["none"]


def build(seed=0, dtype=torch.float32, **settings):
    torch.manual_seed(seed)
    sizes = {"num_heads": H, "head_dim": D, "num_experts": E, "experts_per_token": K, **settings}
    module = SwitchHeadAttention(C, **sizes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module.to(dtype).eval()


def gates(router, x, experts, k):
    """Eq. 7-8, float64: x [B, T, C] → [B, T, H, E], zero where an expert is not chosen."""
    s = torch.sigmoid(x.double() @ router.projection.weight.double().t()).unflatten(-1, (-1, experts))
    return s * torch.zeros_like(s).scatter(-1, s.topk(k, -1).indices, 1.0)


def paper(module, query, key, key_padding=None, attn_mask=None):
    """Eq. 7-10 for every expert densely. query [T, B, C], key [S, B, C] → [T, B, C], float64."""
    x, y = query.transpose(0, 1).double(), key.transpose(0, 1).double()
    experts, k, heads = module.num_experts, module.experts_per_token, module.num_heads
    destination = gates(module.router, x, experts, k) if module.router is not None else None
    source = module.source_router or (module.router if module.shares_selection else None)
    source = gates(source, y, experts, k) if source is not None else None

    def into(letter, projection, inputs, gate):
        weight = projection.weight.double()
        if letter in module.experts:
            weight = weight.view(heads, experts, D, -1)
            return torch.einsum("bthe,btc,hedc->bhtd", gate, inputs, weight)  # Eq. 9
        return torch.einsum("btc,hdc->bhtd", inputs, weight.view(heads, D, -1))

    q = into("q", module.q_proj, x, destination)
    keys, values = into("k", module.k_proj, y, source), into("v", module.v_proj, y, source)
    scores = q @ keys.transpose(-1, -2) / math.sqrt(D)
    if attn_mask is not None:
        scores = scores + attn_mask.double()
    if key_padding is not None:
        scores = scores.masked_fill(key_padding[:, None, None, :], -math.inf)
    results = torch.softmax(scores, -1) @ values
    if "o" in module.experts:
        weight = module.out_proj.weight.double().view(heads, experts, D, C)
        out = torch.einsum("bthe,bhtd,hedc->btc", destination, results, weight)  # Eq. 10
    else:
        out = torch.einsum("bhtd,chd->btc", results, module.out_proj.weight.double().view(C, heads, D))
    return out.transpose(0, 1)


CASES = {
    "ordinary": {},
    "one token": dict(tgt=1, batch=1),
    "causal": dict(causal=True),
    "padding": dict(lengths=[7, 3, 1]),
    "cross-attention": dict(src=9, lengths=[9, 4, 1]),
    "k = E": dict(experts_per_token=E),
    "E = 1": dict(num_experts=1, experts_per_token=1),
    "one head": dict(num_heads=1),
    "three heads, k = 1": dict(num_heads=3, experts_per_token=1),
    "an expert that nobody chooses": dict(unchosen=True),
    "shared selection": dict(shared_selection=True),
}


def check(case, backend, experts):
    case = dict(case)
    tgt, batch, src = case.pop("tgt", 7), case.pop("batch", 3), case.pop("src", None)
    lengths, causal, unchosen = (case.pop(name, None) for name in ("lengths", "causal", "unchosen"))
    module = build(
        backend=backend,
        experts=experts,
        self_attention=src is None,
        encoder_decoder_attention=src is not None,
        **case,
    )
    g = torch.Generator().manual_seed(tgt)
    query = torch.randn(tgt, batch, C, generator=g)
    if unchosen:
        query[..., 0] = 3.0
        for router in (module.router, module.source_router):
            if router is not None:
                nn.init.constant_(router.projection.weight[:1, 0].detach(), -9.0)
    query.requires_grad_()
    key = query if src is None else torch.randn(src, batch, C, generator=g, requires_grad=True)
    padding = None
    if lengths:
        padding = torch.arange(key.size(0))[None] >= torch.tensor(lengths)[:, None]
    mask = torch.triu(torch.full((tgt, tgt), -math.inf), 1) if causal else None
    real = ~padding.t() if padding is not None and src is None else torch.ones(tgt, batch, dtype=torch.bool)
    out, _ = module(query, key, key, key_padding_mask=padding, attn_mask=mask, need_weights=False)
    exact = paper(module, query, key, padding, mask)
    upstream = torch.randn(out.shape, generator=g) * real.unsqueeze(-1)
    inputs = [query] + ([key] if src else []) + list(module.parameters())
    grads = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    exact_grads = torch.autograd.grad(exact, inputs, upstream.double(), allow_unused=True)
    torch.testing.assert_close(out[real].double(), exact[real], rtol=1e-4, atol=1e-5)
    names = ["query"] + (["key"] if src else []) + [name for name, _ in module.named_parameters()]
    for name, grad, exact_grad in zip(names, grads, exact_grads):
        torch.testing.assert_close(
            grad, exact_grad.to(grad.dtype), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_every_gradient_equal_the_paper(case, backend):
    check(case, backend, "vo")


@pytest.mark.parametrize("experts", SUBSETS)
def test_any_projection_may_be_a_mixture(experts):
    check({"lengths": [7, 3, 1], "causal": True}, "grouped", experts)


class UnitGates(nn.Module):
    """All experts of every head with gate 1."""

    def forward(self, x, padding_mask=None):
        index = torch.arange(H * E).expand(x.size(0), -1)
        ones = torch.ones(index.shape)
        return RoutingDecision(index, ones, ones, ones, H * E, groups=H, padding_mask=padding_mask)


@pytest.mark.parametrize("experts", ["vo", "vkqo", "qo", "k"])
def test_all_experts_with_unit_gates_are_dense_attention_of_the_summed_weights(experts):
    module = build(experts=experts, experts_per_token=E, self_attention=True)
    for side in ("router", "source_router"):
        if getattr(module, side) is not None:
            setattr(module, side, UnitGates())
    width = H * D
    dense = nn.MultiheadAttention(width, H, bias=False, kdim=C, vdim=C, batch_first=True)
    matrices = {}
    for letter in "qkvo":
        weight = getattr(module, "out_proj" if letter == "o" else f"{letter}_proj").weight.detach()
        if letter in experts:  # [H·E, D, C] → [H·D, C], or [C, H·D] out of the heads
            weight = weight.view(H, E, D, C).sum(1).reshape(width, C)
            weight = weight.t() if letter == "o" else weight
        matrices[letter] = weight
    assert width == C  # so torch's attention fits
    dense.q_proj_weight = nn.Parameter(matrices["q"])
    with torch.no_grad():
        for name, letter in (("in_proj_weight", "qkv"),):
            if getattr(dense, name) is not None:
                getattr(dense, name).copy_(torch.cat([matrices[one] for one in letter]))
        dense.out_proj.weight.copy_(matrices["o"])
    x = torch.randn(5, 3, C)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    expected = dense(*[x.transpose(0, 1)] * 3, attn_mask=causal, need_weights=True)
    out, weights = module(x, x, x, attn_mask=causal, need_weights=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected[1], rtol=1e-4, atol=1e-5)


def test_no_experts_is_dense_attention_without_any_decision():
    module = build(experts="none", self_attention=True)
    with collect_decisions() as decisions:
        module(*[torch.randn(4, 2, C)] * 3)
    assert decisions == [] and module.router is None and module.source_router is None


def test_two_decisions_leave_the_attention():
    module = build(self_attention=True)
    module.name = "layer"
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with collect_decisions() as decisions:
        module(*[torch.randn(4, 2, C)] * 3, key_padding_mask=padding)
    assert [name for name, _ in decisions] == ["layer", "layer.keys"]
    for (_, decision), side in zip(decisions, ("queries", "keys")):
        assert (decision.side, decision.groups, decision.num_experts) == (side, H, H * E)
        assert decision.expert_index.shape == (8, H * K) and not decision.auxiliary
        assert (decision.gate[decision.padding_mask] == 0).all() and decision.padding_mask.sum() == 2
        heads = decision.expert_index.view(8, H, K) // E
        assert (heads == torch.arange(H)[None, :, None]).all()


def test_shared_selection_makes_one_decision():
    module = build(self_attention=True, shared_selection=True)
    assert module.source_router is None
    with collect_decisions() as decisions:
        module(*[torch.randn(4, 2, C)] * 3)
    assert len(decisions) == 1
    cross = build(encoder_decoder_attention=True, shared_selection=True)
    assert cross.source_router is not None  # other tokens: there is no decision to share


def test_memory_does_not_grow_with_k():
    """What autograd saves: never a row of width C per slot."""

    def saved(k):
        module = build(num_experts=8, experts_per_token=k, self_attention=True)
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(64, 2, C, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = module(x, x, x, need_weights=False)
        assert out.requires_grad
        return sum(sizes.values())

    tokens = 128
    # k more choices: their indices (8 bytes) and gates (a few floats), for each head and side
    assert saved(6) - saved(2) < tokens * 4 * H * 2 * 64
    assert saved(6) - saved(2) < tokens * 4 * H * C * 4 * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(experts_per_token=5), "--experts-per-token 5"),
        (dict(experts="vx"), "--switchhead-experts 'vx'"),
        (dict(experts="vv"), "--switchhead-experts 'vv'"),
        (dict(experts=""), "--switchhead-experts ''"),
        (dict(num_heads=0), "--switchhead-heads"),
        (dict(experts="vk", shared_selection=True), "--switchhead-shared-selection.*experts vk"),
        (dict(experts="none", shared_selection=True, self_attention=True), "--switchhead-shared-selection"),
        (dict(kdim=8, vdim=9), "two inputs"),
        (
            dict(head_dim=3, self_attention=True, positions="rope-half"),
            "--positions rope-half .* dimension 3",
        ),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        build(**settings)


def test_initial_weights_are_the_papers():
    torch.manual_seed(0)
    scale, width = 0.5, 256
    module = SwitchHeadAttention(width, 2, 32, 5, 2, self_attention=True, positions="xl")
    draw_by_fan_in(module, scale)
    for weight in (module.q_proj.weight, module.v_proj.weight, module.positions.projection.weight):
        assert weight.std().item() == pytest.approx(scale / math.sqrt(width), rel=0.03)
    assert module.out_proj.weight.std().item() == pytest.approx(scale / math.sqrt(64), rel=0.03)
    for router in (module.router, module.source_router):
        torch.testing.assert_close(router.projection.weight.norm(dim=1), torch.full((10,), scale))
    assert (module.positions.content_bias == 0).all() and (module.positions.position_bias == 0).all()


def test_expert_dropout_hides_experts_in_training_only():
    torch.manual_seed(0)
    router = SigmoidTopKRouter(C, 4, 2, expert_dropout=0.5)
    x = torch.randn(400, C)
    best = router.eval()(x).expert_index
    trained = router.train()(x)
    assert torch.equal(router.eval()(x).expert_index, best)
    kept = (trained.expert_index.sort(1).values == best.sort(1).values).all(1).double().mean()
    assert 0.1 < kept < 0.45  # both survive in a quarter of the cases
    probs = trained.probs.gather(1, trained.expert_index)
    lacking = (trained.gate == 0).sum(1)  # fewer than two survive: what is missing has no gate
    assert (lacking > 0).double().mean() == pytest.approx(5 / 16, abs=0.08)
    assert torch.equal(trained.gate[lacking == 0], probs[lacking == 0])
    with pytest.raises(UserError, match="--sigma-moe-expert-dropout"):
        SigmoidTopKRouter(C, 4, 2, expert_dropout=1.0, flags="sigma-moe-")


def test_the_attentions_expert_dropout_is_a_setting():
    settings = SwitchHeadSettings(expert_dropout=0.5, num_experts=E, experts_per_token=K, expert_dim=D)
    module = settings.build(C, H, False, self_attention=True)
    x = torch.randn(9, 2, C)
    assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])
    assert not torch.allclose(module.train()(x, x, x)[0], module(x, x, x)[0])
    with pytest.raises(UserError, match="--expert-dropout 1"):
        SwitchHeadSettings(expert_dropout=1.0).build(C, H, False)


def test_saturated_sigmoids_are_ordered_by_their_logits():
    router = SigmoidTopKRouter(1, 3, 1)
    with torch.no_grad():
        router.projection.weight.copy_(torch.tensor([[30.0], [50.0], [40.0]]))
    assert router(torch.ones(1, 1)).expert_index.item() == 1
