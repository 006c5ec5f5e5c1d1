"""Every family with K = E, even gates and equal weights is the attention of Llama, Qwen3 or Mistral."""

import contextlib

import pytest
import torch
from integrations.tiny_models import HEADS, cache_keyword, dense, tokens

from moa_fairseq.layers import (
    DenseAttention,
    GroupedQueryExperts,
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    MixtureOfHeads,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
)

# EXPERTS: of a head of SwitchHead
C = 32
D = 8
EXPERTS = 3
LENGTH = 13
STEPS = (4, 1, 1, 3, 1, 1, 1, 1)
# theirs has tables, norms and a softmax in float32
EXACT = 1e-12
AS_THEY_ARE = 1e-4
LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 60}
TRAINED = 6  # positions of dynamic, fewer than the text has


def rotary(base, scaling=None, **lengths):
    """Settings of a model of transformers, and of a layer here."""
    scaling = scaling or {}
    ours = {"rope_scaling": {**scaling, **lengths}} if scaling else {}
    return {"rope_parameters": {"rope_type": "default", **scaling, "rope_theta": base}}, {
        "rope_base": base,
        "positions": "rope",
        "self_attention": True,
        **ours,
    }


PLAIN, OURS = rotary(500_000.0)
# the model of transformers, its settings, and those of a layer here
DECODERS = {
    "Llama": ("llama", PLAIN, OURS),
    "Qwen3": ("qwen3", PLAIN, {**OURS, "query_key_norm": "head"}),
    "Mistral": ("mistral", {**PLAIN, "sliding_window": 5}, {**OURS, "window": 5}),
    "Llama, linear": ("llama", *rotary(500_000.0, LINEAR)),
    "Llama, yarn": ("llama", *rotary(100.0, YARN)),
    "Llama, dynamic": (
        "llama",
        *rotary(1e4, DYNAMIC, original_max_position_embeddings=TRAINED),
    ),
}
DECODERS["Llama, dynamic"][1]["max_position_embeddings"] = TRAINED


@contextlib.contextmanager
def in_float64(monkeypatch, wide):
    """Where `wide`, what transformers computes in float32 (tables, norms, softmax) is in float64."""
    with monkeypatch.context() as patch:
        if wide:
            for name in ("float", "float32"):
                patch.setattr(torch, name, torch.float64)
            torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def theirs(decoder, key_heads):
    """A model of one layer, weights of norms that matter, and settings of a layer here."""
    kind, settings, ours = DECODERS[decoder]
    sizes = {"num_key_value_heads": key_heads, "head_dim": D, "num_hidden_layers": 1}
    model = dense(kind, attn_implementation="eager", **sizes, **settings)
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return model, ours


# Each takes settings and the weights q and o [H, D, C], k and v [G, D, C]. Query head h of transformers
# reads key head h // (H / G), here h mod G.
def by_key_head(weight, key_heads):
    """[H, …] in the order of the heads here."""
    return weight.unflatten(0, (key_heads, -1)).transpose(0, 1).flatten(0, 1)


def as_dense(settings, q, k, v, o, make=DenseAttention, **more):
    module = make(C, HEADS, bias=False, **settings, **more).double()
    q, o = (by_key_head(weight, len(k)) for weight in (q, o))
    for name, weight in (("q", q), ("k", k), ("v", v), ("out", o)):
        rows = weight.flatten(0, 1)
        getattr(module, f"{name}_proj").weight.copy_(rows.t() if name == "out" else rows)
    return module


def as_moa(settings, q, k, v, o):
    """Even gates × K = 1, put into the output weights."""
    own = len(k) == HEADS
    experts = HEADS if own else HEADS // len(k)
    module = MixtureOfAttention(
        C,
        num_experts=experts,
        experts_per_token=experts,
        expert_dim=D,
        heads_per_expert=1 if own else len(k),
        expert_keys_values="own" if own else "shared",
        **settings,
    ).double()
    q, o = (by_key_head(weight, len(k)).view(experts, -1, C) for weight in (q, o))
    module.q_experts.weight.copy_(q)
    module.out_experts.weight.copy_(o * experts)
    module.k_proj.weight.copy_(k.flatten(0, 1))
    module.v_proj.weight.copy_(v.flatten(0, 1))
    module.router.projection.weight.zero_()
    return module


def as_gqe(settings, q, k, v, o):
    size = HEADS // len(k)
    sizes = {"num_experts": size, "experts_per_token": size, "expert_dim": D}
    groups = {"gqe_groups": len(k), "gqe_shared_heads": 0, "gqe_output": "experts"}
    module = GroupedQueryExperts(C, **groups, **sizes, **settings).double()
    module.q_experts.weight.copy_(q)
    module.out_experts.weight.copy_(o * HEADS)
    module.k_proj.weight.copy_(k.flatten(0, 1))
    module.v_proj.weight.copy_(v.flatten(0, 1))
    module.router.projection.weight.zero_()
    return module


def as_namoh(settings, q, k, v, o):
    sizes = {"num_experts": HEADS, "experts_per_token": HEADS, "expert_dim": D}
    module = NativeMixtureOfHeads(C, **sizes, **settings).double()
    projections = {"q_experts": q, "k_proj": k, "v_proj": v, "out_experts": o * HEADS}
    for name, weight in projections.items():
        getattr(module, name).weight.copy_(weight)
    module.router.projection.weight.zero_()
    return module


def as_switchhead(settings, q, k, v, o):
    """Each expert gets σ(0) = 1/2."""
    sizes = {"num_experts": EXPERTS, "experts_per_token": EXPERTS, "expert_dim": D}
    module = SwitchHeadAttention(C, switchhead_heads=HEADS, **sizes, **settings).double()
    module.q_proj.weight.copy_(q.flatten(0, 1))
    module.k_proj.weight.copy_(k.flatten(0, 1))
    module.v_proj.weight.copy_(v.repeat_interleave(EXPERTS, 0) * 2 / EXPERTS)
    module.out_proj.weight.copy_(o.repeat_interleave(EXPERTS, 0) * 2 / EXPERTS)
    for router in (module.router, module.source_router):
        router.projection.weight.zero_()
    return module


def as_moh(settings, q, k, v, o):
    heads = {
        "moh_shared_heads": 2,
        "experts_per_token": HEADS - 2,
        "moh_scaling": "released",
        "head_dim": D,
    }
    module = as_dense(settings, q, k, v, o, MixtureOfHeads, **heads)
    module.router.projection.weight.zero_()
    return module


def as_mae(settings, q, k, v, o):
    module = as_dense(settings, q, k, v, o, MixtureOfAttentiveExperts, causal=True, head_dim=D)
    for weight in module.gate.parameters():
        weight.zero_()
    return module


STATIC = {"NAMOH": {}, "MAE": {}}  # which have no cache of one size
# by family: how many key heads the model of transformers has, and the layer of its weights
FAMILIES = {
    "dense": (2, lambda *given: as_dense(*given, key_heads=2, attention_head_dim=D)),
    "MoA, one key head": (1, as_moa),
    "MoA, two heads each": (2, as_moa),
    "MoA, own keys": (HEADS, as_moa),
    "GQE": (2, as_gqe),
    "NAMOH": (HEADS, as_namoh),
    "SwitchHead": (HEADS, as_switchhead),
    "MoH": (HEADS, as_moh),
    "MAE": (HEADS, as_mae),
}


def copied(attention, make, settings):
    """A layer with the weights of an attention of transformers."""
    q, k, v = (
        getattr(attention, f"{name}_proj").weight.unflatten(0, (-1, D)) for name in "qkv"
    )
    o = attention.o_proj.weight.t().unflatten(0, (-1, D))
    module = make(settings, q, k, v, o).eval()
    if module.query_key_norm is not None:
        module.query_key_norm.queries.weight.copy_(attention.q_norm.weight)
        module.query_key_norm.keys.weight.copy_(attention.k_norm.weight)
    return module


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_whole_and_step_by_step(monkeypatch, decoder, family):
    """What their attention gets and gives, with their masks, is what a layer here gives for it."""
    key_heads, make = FAMILIES[family]
    ids = tokens(length=LENGTH)
    calls = []
    for wide, tolerance in ((True, EXACT), (False, AS_THEY_ARE)):
        with in_float64(monkeypatch, wide):
            model, settings = theirs(decoder, key_heads)
            attention = model.model.layers[0].self_attn
            attention.register_forward_hook(
                lambda _, args, given, out: calls.append((given["hidden_states"], out[0])),
                with_kwargs=True,
            )
            model(ids)
            keyword = cache_keyword(model)
            cache = {}
            start = 0
            for size in STEPS:
                step = model(ids[:, start : start + size], use_cache=True, **cache)
                cache = {keyword: step.past_key_values}
                start = start + size
        assert start == LENGTH and len(calls) == 1 + len(STEPS)
        module = copied(attention, make, settings)
        (x, expected), *steps = calls
        torch.testing.assert_close(module(x, causal=True), expected, rtol=0, atol=tolerance)
        cache = module.new_cache()
        for x, expected in steps:
            out = module(x, causal=True, cache=cache)
            torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
        calls.clear()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", ["Qwen3", "Mistral", "Llama, yarn"])
def test_adapters_of_linear_maps_are_what_merged_weights_are(decoder, family):
    """peft's LoRA on every linear map, the router's included; whole and step by step."""
    peft = pytest.importorskip("peft")
    key_heads, make = FAMILIES[family]
    model, settings = theirs(decoder, key_heads)
    module = copied(model.model.layers[0].self_attn, make, settings)
    x = torch.randn(2, LENGTH, C, dtype=torch.float64)
    before = module(x, causal=True)
    linear = [
        name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)
    ]
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=linear), module)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted = module(x, causal=True)
    cache = module.new_cache(**STATIC.get(family, {"batch": 2, "max_length": LENGTH}))
    assert (adapted - before).abs().max() > 1e-3
    steps = [module(x[:, t : t + 1], cache=cache) for t in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, 1), adapted, rtol=0, atol=EXACT)
    layers = [part for part in module.modules() if isinstance(part, peft.tuners.lora.LoraLayer)]
    assert len(layers) == len(linear)
    for layer in layers:
        layer.merge()
    torch.testing.assert_close(module(x, causal=True), adapted, rtol=0, atol=EXACT)
