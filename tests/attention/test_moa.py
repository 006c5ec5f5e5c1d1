"""MixtureOfAttention against the paper's equations, written as float64 einsums."""

import math

import pytest
import torch

from moa_fairseq.attention import moa
from moa_fairseq.attention.collector import collect_decisions, query_padding
from moa_fairseq.attention.core import attend
from moa_fairseq.attention.moa import MixtureOfAttention
from moa_fairseq.errors import UserError

C, E, K, D = 24, 6, 3, 8


def build(seed=0, dtype=torch.float32, **settings):
    torch.manual_seed(seed)
    sizes = {"num_experts": E, "experts_per_token": K, "expert_dim": D, "bias": True, **settings}
    module = MixtureOfAttention(C, **sizes)
    with torch.no_grad():
        for parameter in module.parameters():  # biases and small routers too must matter
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.to(dtype).eval()


def paper(module, query, key, value, key_padding=None, attn_mask=None):
    """Eq. 6-12 for every expert densely, in float64. query [T, B, C] → [T, B, C], weights [B, T, E, S]."""
    p = {name: parameter.double() for name, parameter in module.named_parameters()}
    q, k, v = query.double(), key.double(), value.double()
    probs = torch.softmax(torch.einsum("tbc,ec->tbe", q, p["router.projection.weight"]), -1)  # Eq. 7
    chosen = torch.zeros_like(probs).scatter(
        -1, probs.topk(module.experts_per_token, -1).indices, 1.0
    )  # Eq. 8
    gate = probs * chosen
    gate = gate / gate.sum(-1, keepdim=True).detach()  # Eq. 9
    kw = torch.einsum("sbc,dc->sbd", k, p["k_proj.weight"]) + p.get("k_proj.bias", 0)
    vw = torch.einsum("sbc,dc->sbd", v, p["v_proj.weight"]) + p.get("v_proj.bias", 0)
    qw = torch.einsum("tbc,edc->tbed", q, p["q_experts.weight"]) + p.get("q_experts.bias", 0)
    scores = torch.einsum("tbed,sbd->btes", qw, kw) / math.sqrt(module.expert_dim)  # Eq. 10
    if attn_mask is not None:
        scores = scores + attn_mask.double()[None, :, None, :]
    if key_padding is not None:
        scores = scores.masked_fill(key_padding[:, None, None, :], -math.inf)
    weights = torch.softmax(scores, -1)
    heads = torch.einsum("btes,sbd->tbed", weights, vw)  # Eq. 11
    outputs = torch.einsum("tbed,edc->tbec", heads, p["out_experts.weight"])  # Eq. 12
    if "out_experts.bias" in p:
        outputs = outputs + p["out_experts.bias"]
    return torch.einsum("tbe,tbec->tbc", gate, outputs), weights  # Eq. 6


CASES = {
    "self-attention": dict(tgt=7, batch=3),
    "one token": dict(tgt=1, batch=1),
    "causal": dict(tgt=6, batch=2, causal=True),
    "padding": dict(tgt=6, batch=3, lengths=[6, 3, 1]),
    "causal and padding": dict(tgt=6, batch=3, lengths=[6, 2, 4], causal=True),
    "cross-attention": dict(tgt=5, src=9, batch=2, lengths=[9, 4]),
    "K = E": dict(tgt=7, batch=3, experts_per_token=E),
    "K = 1": dict(tgt=7, batch=3, experts_per_token=1),
    "without biases": dict(tgt=7, batch=3, bias=False),
}


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_every_gradient_equal_the_paper(case, backend):
    case = dict(case)
    tgt, batch, src = case.pop("tgt"), case.pop("batch"), case.pop("src", None)
    lengths, causal = case.pop("lengths", None), case.pop("causal", False)
    module = build(
        backend=backend, self_attention=src is None, encoder_decoder_attention=src is not None, **case
    )
    g = torch.Generator().manual_seed(tgt)
    query = torch.randn(tgt, batch, C, generator=g, requires_grad=True)
    key = query if src is None else torch.randn(src, batch, C, generator=g, requires_grad=True)
    padding = None
    if lengths:
        padding = torch.arange(key.size(0))[None] >= torch.tensor(lengths)[:, None]
    mask = torch.triu(torch.full((tgt, tgt), -math.inf), 1) if causal else None
    # Padding queries of a self-attention give zeros by design; compare the others.
    real = ~padding.t() if padding is not None and src is None else torch.ones(tgt, batch, dtype=torch.bool)

    out, _ = module(query, key, key, key_padding_mask=padding, attn_mask=mask, need_weights=False)
    upstream = torch.randn(out.shape, generator=g) * real.unsqueeze(-1)
    inputs = [query] + ([key] if src else []) + list(module.parameters())
    grads = torch.autograd.grad(out, inputs, upstream)
    exact, _ = paper(module, query, key, key, padding, mask)
    exact_grads = torch.autograd.grad(exact, inputs, upstream.double())

    torch.testing.assert_close(out[real].double(), exact[real], rtol=1e-4, atol=1e-5)
    assert (out[~real] == 0).all()
    names = ["query"] + (["key"] if src else []) + [name for name, _ in module.named_parameters()]
    for name, grad, exact_grad in zip(names, grads, exact_grads):
        torch.testing.assert_close(
            grad, exact_grad.to(grad.dtype), rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_sentence_of_padding_only_gives_zeros_and_finite_gradients():
    module = build(self_attention=True)
    x = torch.randn(4, 2, C, requires_grad=True)
    padding = torch.tensor([[True] * 4, [False] * 4])
    out, _ = module(x, x, x, key_padding_mask=padding)
    out.square().sum().backward()
    assert (out[:, 0] == 0).all()
    assert torch.isfinite(x.grad).all() and (x.grad[:, 0] == 0).all()


def test_weights_are_those_of_the_chosen_experts():
    module = build(self_attention=True)
    x = torch.randn(5, 2, C)
    with collect_decisions() as decisions:
        out, mean = module(x, x, x, need_weights=True)
    _, per_head = module(x, x, x, need_head_weights=True)
    no_weights, nothing = module(x, x, x, need_weights=False)
    _, exact = paper(module, x, x, x)
    index = decisions[0][1].expert_index.view(2, 5, K)  # [B, T, K]
    chosen = exact.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, 5))  # [B, T, K, S]
    assert per_head.shape == (K, 2, 5, 5) and mean.shape == (2, 5, 5) and nothing is None
    torch.testing.assert_close(per_head.permute(1, 2, 0, 3).double(), chosen, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean, per_head.mean(0))
    torch.testing.assert_close(out, no_weights)


def test_attention_dropout_acts_in_training_only_and_keeps_the_mean():
    module = build(self_attention=True, dropout=0.5)
    x = torch.randn(4, 2, C)
    quiet, _ = module(x, x, x)
    module.train()
    noisy = torch.stack([module(x, x, x, need_weights=False)[0] for _ in range(600)])
    assert not torch.allclose(noisy[0], noisy[1])
    torch.testing.assert_close(noisy.mean(0), quiet, rtol=0.3, atol=0.12)


def test_ambient_query_padding_reaches_a_cross_attention():
    module = build(encoder_decoder_attention=True)
    query, memory = torch.randn(3, 2, C), torch.randn(4, 2, C)
    padding = torch.tensor([[False, False, True], [False] * 3])
    with collect_decisions() as decisions, query_padding(padding):
        out, _ = module(query, memory, memory)
    assert torch.equal(decisions[0][1].padding_mask, padding.reshape(-1))
    assert (out[2, 0] == 0).all() and (out[2, 1] != 0).any()


@pytest.mark.parametrize(
    "settings, flag",
    [
        ({"experts_per_token": 7}, "--experts-per-token 7"),
        ({"experts_per_token": 0}, "--experts-per-token 0"),
        ({"expert_dim": 0}, "--expert-dim"),
        ({"expert_dim": None}, "--expert-dim"),
        ({"renormalize": "sometimes"}, "--router-renormalize sometimes"),
        ({"backend": "turbo"}, "--expert-backend turbo"),
    ],
)
def test_impossible_settings_name_the_flag(settings, flag):
    with pytest.raises(UserError, match=flag):
        build(**settings)


@pytest.mark.parametrize("per_token, backend", [(E, "grouped"), (K, "reference")], ids=["K = E", "K < E"])
def test_torch_compile_takes_the_layer_whole(per_token, backend):
    """No graph break in what it computes, forward and backward: fullgraph raises at the first one.

    What is known beside the pass (`collector`) is left out: torch.compile cannot look into context variables.
    """
    module = build(experts_per_token=per_token, backend=backend, self_attention=True)
    x = torch.randn(3, 7, C, requires_grad=True)

    def layer(x):
        decision = module.route(x, None, None)
        k, v = module.project_keys_values(x, x, decision, None)
        heads, _ = attend(module.project_queries(x, decision), k, v)
        return module.project_output(heads, decision)

    expected, got = layer(x), torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected)
    leaves, upstream = [x, *module.parameters()], torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    ):
        torch.testing.assert_close(a, b)


def test_torch_compile_takes_chosen_experts_in_parts():
    """Where K < E the slots' places are made once and kept, which no graph of a Function may do."""
    module = build(experts_per_token=K, backend="grouped", self_attention=True)
    x = torch.randn(7, 3, C, requires_grad=True)

    def layer(x):
        return module(x, x, x, need_weights=False)[0]

    expected, got = layer(x), torch.compile(layer, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected)
    leaves, upstream = [x, *module.parameters()], torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    ):
        torch.testing.assert_close(a, b)


def test_keys_and_values_in_one_product_are_those_of_two(monkeypatch):
    module = build(self_attention=True, dtype=torch.float64)
    x = torch.randn(5, 2, C, dtype=torch.float64, requires_grad=True)
    outcomes, calls = [], []
    module.v_proj.register_forward_hook(lambda *_: calls.append(1))
    for least in (10, 11):
        monkeypatch.setattr(moa, "_ROWS_OF_ONE_PRODUCT", least)
        calls.clear()
        out, _ = module(x, x, x, need_weights=False)
        assert len(calls) == (least == 11)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for one, two in zip(*outcomes):
        torch.testing.assert_close(one, two)
    monkeypatch.setattr(moa, "_ROWS_OF_ONE_PRODUCT", 0)
    module.joint_keys_values = False
    module(x, x, x, need_weights=False)
    assert len(calls) == 2, "a hook is passed by"


def test_keys_and_values_of_cross_attention_are_one_input(monkeypatch):
    """`project_keys_values` then makes one product of them, where that pays."""
    module, seen = build(encoder_decoder_attention=True), []
    project = module.project_keys_values
    monkeypatch.setattr(
        module, "project_keys_values", lambda k, v, *rest: (seen.append(k is v), project(k, v, *rest))[1]
    )
    module(torch.randn(3, 2, C), torch.randn(5, 2, C), torch.randn(5, 2, C))
    assert seen == [True]
