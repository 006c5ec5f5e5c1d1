"""Decoders as mixtures of heads: the dense model where all heads work, and one result for all ways to it."""

import copy
import inspect
import re

import pytest
import torch
from integrations.tiny_models import (
    HEADS,
    KINDS,
    SEPARATE,
    VERSION,
    cache_keyword,
    dense,
    mixture,
    mixtures_of,
    reload,
    tokens,
)

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.heads import collect_routings
from moa_fairseq.integrations.hf import to_mixture_of_heads

EVERY = [(kind, "learned") for kind in KINDS] + [(kind, "query-norm") for kind in SEPARATE]
both = pytest.mark.parametrize("kind, router", EVERY)
routers = pytest.mark.parametrize("router", ("query-norm", "learned"))


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs).logits


EXACT = 1e-12
EAGER = 1e-5  # transformers computes the softmax of "eager" attention in float32


def close(found, wanted, tolerance=EXACT):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@both
def test_all_heads_with_neutral_gates_are_the_dense_model(kind, router):
    model = dense(kind)
    ids = tokens()
    wanted = logits(model, ids)
    for shared in (2, HEADS):
        moh = to_mixture_of_heads(copy.deepcopy(model), shared, HEADS, router=router)
        for each in mixtures_of(moh):
            for weight in each.parameters():
                torch.nn.init.zeros_(weight)
        close(logits(moh, ids), wanted)
    few = to_mixture_of_heads(copy.deepcopy(model), 2, 4, router=router)
    assert (logits(few, ids) - wanted).abs().max() > 1e-3


# where the values of each head lie in a projection of values, or of queries, keys and values
ROWS = {
    "gpt_neox": ("query_key_value", lambda h: slice(12 * h + 8, 12 * h + 12)),
    "phi3": ("qkv_proj", lambda h: slice(64 + 4 * h, 68 + 4 * h)),
    "gpt2": ("c_attn", lambda h: slice(64 + 4 * h, 68 + 4 * h)),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "falcon"])
def test_a_head_changes_the_tokens_that_chose_it_alone(kind):
    model = dense(
        kind,
        num_hidden_layers=1,
        **({} if kind in ("opt", "phi", "gpt_neox", "gpt2") else ALONE),
    )
    to_mixture_of_heads(model, 2, 4, router="learned")
    (each,) = mixtures_of(model)
    torch.nn.init.normal_(each.router.projection.weight)
    attention = next(module for module in model.modules() if hasattr(module, "mixture"))
    name, rows = ROWS.get(kind, ("v_proj", lambda h: slice(4 * h, 4 * h + 4)))
    weight = getattr(attention, name).weight.data
    ids = tokens()
    chosen = []
    weight = weight.T if kind == "gpt2" else weight
    each.router.register_forward_hook(lambda module, args, out: chosen.append(out.expert_ids))
    before = logits(model, ids)
    for head in range(2, HEADS):
        saved = weight.clone()
        weight[rows(head)] *= -3
        moved = (logits(model, ids) - before).abs().amax(-1).flatten()
        weight.copy_(saved)
        works = (chosen[0] == head).any(-1)
        assert not moved[~works].any()
        assert not works.any() or moved[works].max() > 1e-6


ALONE = {"num_key_value_heads": HEADS}


@pytest.mark.parametrize("kind", ("BitNet", "DiffLlama"))
def test_what_is_no_head_before_the_output_projection_is_refused(kind):
    model = dense(kind)
    for router in ("learned", "query-norm"):
        with pytest.raises(UserError):
            to_mixture_of_heads(model, 2, 4, router=router)
    assert type(model).__name__ == f"{kind}ForCausalLM" and not mixtures_of(model)


@pytest.mark.parametrize(
    "router, scaling",
    [("query-norm", "released"), ("learned", "released"), ("learned", "paper")],
)
def test_a_layer_is_the_sum_of_equation_4(router, scaling):
    model = mixture(router=router, scaling=scaling)
    ids = tokens()
    attention = model.model.layers[0].self_attn
    seen = {}
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(x=kwargs["hidden_states"]), with_kwargs=True
    )
    attention.q_proj.register_forward_hook(lambda module, args, out: seen.update(q=out))
    attention.o_proj.register_forward_pre_hook(
        lambda module, args: seen.update(heads=args[0]), prepend=True
    )
    attention.register_forward_hook(lambda module, args, out: seen.update(out=out[0]))
    logits(model, ids)
    dim = 4
    shared = 2
    routed = 3
    weight = attention.o_proj.weight
    for b in range(2):
        for t in range(ids.size(1)):
            if router == "query-norm":
                norms = seen["q"][b, t].view(HEADS, dim)[shared:].norm(dim=-1)
                gates = torch.ones(HEADS, dtype=torch.float64)
                chosen = norms.topk(routed).indices
            else:
                raw = mixtures_of(model)[0].router.projection.weight @ seen["x"][b, t]
                scores, first, stage = (
                    part.softmax(0) for part in raw.split((HEADS - shared, shared, 2))
                )
                chosen = scores.topk(routed).indices
                if scaling == "released":
                    first = shared * first
                    stage = 2 * stage
                    scores = routed * scores / scores[chosen].sum()
                gates = torch.cat([stage[0] * first, stage[1] * scores])
            works = torch.zeros(HEADS, dtype=torch.bool)
            works[:shared] = True
            works[chosen + shared] = True
            out = torch.zeros(32, dtype=torch.float64)
            for head in range(HEADS):
                if works[head]:
                    cut = slice(head * dim, (head + 1) * dim)
                    out += gates[head] * (weight[:, cut] @ seen["heads"][b, t, cut])
            close(seen["out"][b, t], out)


@pytest.mark.parametrize("reading", ("routed", "chosen"))
def test_gates_of_one_or_zero_have_the_gradient_of_equation_10(reading):
    """The task's gradient of the queries' weights, by the softmax of every routed head or the chosen ones."""
    model = mixture(straight_through=reading)
    ids = tokens()
    attention = model.model.layers[1].self_attn
    seen = {}
    attention.q_proj.register_forward_hook(lambda module, args, out: seen.update(q=out))
    attention.o_proj.register_forward_pre_hook(
        lambda module, args: seen.update(heads=args[0]), prepend=True
    )
    attention.register_forward_hook(lambda module, args, out: seen.update(out=out[0]))
    model(ids)
    norms = seen["q"].unflatten(-1, (HEADS, -1))[..., 2:, :].norm(dim=-1)
    probs = torch.softmax(norms / norms.std(-1, keepdim=True).detach(), -1)
    chosen = torch.zeros_like(probs).scatter(-1, norms.topk(3).indices, 1.0)
    learning = {"routed": torch.ones_like(chosen), "chosen": chosen}[reading]
    gates = torch.cat(
        [torch.ones_like(probs[..., :2]), chosen + learning * (probs - probs.detach())], -1
    )
    heads = seen["heads"].unflatten(-1, (HEADS, -1)) * gates.unsqueeze(-1)
    out = heads.flatten(-2) @ attention.o_proj.weight.t()
    close(seen["out"], out)
    leaves = [attention.q_proj.weight, attention.o_proj.weight, attention.v_proj.weight]
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype
    )
    found = torch.autograd.grad(seen["out"], leaves, upstream, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(out, leaves, upstream)):
        close(one, other)


@both
def test_stepwise_is_whole(kind, router):
    if kind == "gemma2" and VERSION < (4, 50):
        pytest.skip("the dense model fails, too: IndexError in its mask")
    model = mixture(kind, router=router)
    ids = tokens()
    whole = logits(model, ids)
    cache = None
    steps = []
    with torch.no_grad():
        for t in range(ids.size(1)):
            out = model(ids[:, t : t + 1], use_cache=True, **{cache_keyword(model): cache})
            cache = out.past_key_values
            steps.append(out.logits)
    close(torch.cat(steps, 1), whole, EAGER if kind == "gemma2" else EXACT)


@both
def test_generation_is_the_same_with_every_cache(kind, router):
    if kind == "gemma2" and VERSION < (4, 50):
        pytest.skip("the dense model fails, too: its own warning cannot be formatted")
    model = mixture(kind, router=router)
    ids = tokens(length=7)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    for beams in (1, 3):
        plain = model.generate(ids, num_beams=beams, use_cache=False, **options)
        assert plain.shape == (2, 15)
        assert torch.equal(model.generate(ids, num_beams=beams, **options), plain)
    static = getattr(
        model, "_can_compile_fullgraph", getattr(model, "_supports_static_cache", False)
    )
    if static:
        greedy = model.generate(ids, **options)
        assert torch.equal(
            model.generate(ids, cache_implementation="static", **options), greedy
        )


@both
def test_left_padding_changes_nothing(kind, router):
    if kind == "gemma2":
        pytest.skip("the dense model's numbers change, too")
    if kind in ("gpt2", "opt") and VERSION < (4, 50):
        pytest.skip("the dense model fails, too: its mask does not fit into float64")
    model = mixture(kind, router=router)
    ids = tokens(1, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    mask = (padded != 0).long()
    places = (mask.cumsum(1) - 1).clamp_min(0)
    inputs = {"attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = places
    found = logits(model, padded, **inputs)[:, 3:]
    close(found, logits(model, ids), EAGER if kind == "falcon" else EXACT)


@both
def test_what_is_saved_is_what_is_read(kind, router, tmp_path):
    model = mixture(kind, router=router)
    ids = tokens()
    model.save_pretrained(tmp_path)
    found = reload(tmp_path, attn_implementation=model.config._attn_implementation)
    assert type(found) is type(model) and type(found).__name__.startswith("MoH")
    assert found.config.model_type.startswith("moh_") and found.config.moh == model.config.moh
    close(logits(found, ids), logits(model, ids))


@routers
def test_a_copy_has_mixtures_of_its_own(router):
    model = mixture(router=router)
    ids = tokens()
    wanted = logits(model, ids)
    copied = copy.deepcopy(model)
    close(logits(copied, ids), wanted, 0)
    calls = []
    for each in mixtures_of(copied):
        each.router.register_forward_hook(lambda *_: calls.append("copy"))
    for each in mixtures_of(model):
        each.router.register_forward_hook(lambda *_: calls.append("first"))
    logits(copied, ids)
    assert calls == ["copy", "copy"]
    logits(model, ids)
    assert calls == ["copy", "copy", "first", "first"]


def test_layers_may_have_numbers_of_their_own(tmp_path):
    ids = tokens()
    model = to_mixture_of_heads(dense(), layers=[None, (3, 5)])
    assert [each.sizes.tolist() for each in mixtures_of(model)] == [[3, 5, 1]]
    model.save_pretrained(tmp_path)
    found = reload(tmp_path)
    assert not hasattr(found.model.layers[0].self_attn, "mixture")
    close(logits(found, ids), logits(model, ids))


def test_layers_with_linear_attention_stay_as_they_are():
    kinds = ["linear_attention", "full_attention"]
    heads = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    sizes = {"head_dim": 4, "layer_types": kinds, "linear_num_key_heads": 2, **heads}
    model = dense("Qwen3Next", num_experts=0, mlp_only_layers=[0, 1], **sizes)
    with pytest.raises(UserError):
        to_mixture_of_heads(model, 2, 5, router="learned")
    assert len(mixtures_of(to_mixture_of_heads(model, layers=[(2, 5)], router="learned"))) == 1


def test_qwen3_chooses_before_its_norm_of_queries():
    """After it the queries' norms are all but equal."""
    model = mixture("qwen3")
    ids = tokens()
    norms = {}
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, out: norms.update(before=out))
    attention.q_norm.register_forward_hook(lambda module, args, out: norms.update(after=out))
    with collect_routings(model) as routings:
        model(ids)
    before = norms["before"].view(-1, HEADS, 4).norm(dim=-1)
    after = norms["after"].reshape(-1, HEADS, 4).norm(dim=-1)
    assert (before.std(1) / before.mean(1)).min() > 0.05 > (after.std(1) / after.mean(1)).max()
    wanted = before[:, 2:].topk(3).indices.sort().values + 2
    assert torch.equal(routings[0].expert_ids[:, 2:].sort().values, wanted)


def neox():
    return dense("gpt_neox")


def twice():
    return mixture()


def alone():
    return dense(**ALONE)


def tiny(name, **sizes):
    """A model of a few weights, of a kind that is no mixture."""
    import transformers

    config, kind = (getattr(transformers, name + end) for end in ("Config", "ForCausalLM"))
    return kind(config(vocab_size=9, num_hidden_layers=2, hidden_size=8, **sizes))


BY_LAYER = {"shared_heads": None, "active": None}
# the models and the settings, and what the sentence has to name
REFUSED = {
    "already": (twice, {}, "already"),
    "without a language model": (lambda: dense().model, {}, "AutoModelForCausalLM"),
    "another module": (lambda: torch.nn.Linear(2, 2), {}, "Linear"),
    "Mamba": (lambda: tiny("Mamba", state_size=2), {}, "MambaForCausalLM has no attention"),
    "RWKV": (lambda: tiny("Rwkv"), {}, "RwkvForCausalLM has no attention"),
    "fused queries": (neox, {"router": "query-norm"}, "queries='q_proj'"),
    "no such output": (dense, {"output": "nothing"}, "nothing .*o_proj, q_proj"),
    "queries as output": (alone, {"output": "q_proj"}, "output='q_proj'"),
    "all three as output": (
        lambda: dense("gpt2"),
        {"output": "c_attn", "router": "learned"},
        "output='c_attn'",
    ),
    "no such queries": (dense, {"queries": "nothing"}, "queries='nothing'"),
    "output as queries": (alone, {"queries": "o_proj"}, "queries='o_proj'"),
    "queries not read": (dense, {"queries": "q", "router": "learned"}, "queries='q'"),
    "no name of output": (dense, {"output": 3}, "output=3"),
    "too many shared": (dense, {"shared_heads": 9, "active": 9}, "shared_heads 9"),
    "both": (dense, {"layers": [(2, 5)] * 2}, "shared_heads=2"),
    "neither": (dense, {"active": None}, "active=None"),
    "too few layers": (
        dense,
        {**BY_LAYER, "layers": [(2, 5)]},
        r"layers=\[\(2, 5\)\] .*2 entries",
    ),
    "unknown scaling": (dense, {"scaling": "none"}, "none"),
    "scaling not read": (dense, {"scaling": "paper"}, "scaling='paper'"),
    "no rule of gates": (dense, {"straight_through": "all"}, "straight_through all"),
    "gates that are learned": (
        dense,
        {"router": "learned", "straight_through": "chosen"},
        "straight_through='chosen'",
    ),
}
for value in (True, 4.0, -1):
    REFUSED[f"active {value}"] = (dense, {"active": value}, f"active={value} .*whole number")
for value in (-0.1, float("nan"), "0.1"):
    REFUSED[f"balance {value!r}"] = (dense, {"balance": value}, f"balance={value!r} .*number")
for value in ([4, 6], [None] * 2, "25", [(2, 5, 1)] * 2, [(2.0, 5)] * 2, {0: (2, 5)}):
    settings = {**BY_LAYER, "layers": value}
    REFUSED[f"layers {value}"] = (dense, settings, re.escape(f"layers={value!r} ") + ".*list")


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_one_is_refused_and_unchanged(reason):
    make, settings, named = REFUSED[reason]
    model = make()
    modules = [*model.modules()]
    kind = type(model)
    with pytest.raises(UserError, match=named):
        to_mixture_of_heads(model, **{"shared_heads": 2, "active": 5, **settings})
    assert type(model) is kind and [*model.modules()] == modules
    assert not any(each._forward_pre_hooks for each in modules) or reason == "already"


def test_what_reads_no_heads_is_refused_at_its_first_call():
    """By a name that says nothing: a gate of the heads, as large as the output projection."""
    model = dense(**ALONE)
    for layer in model.model.layers:
        layer.self_attn.gate = layer.self_attn.v_proj
    to_mixture_of_heads(model, 2, 5, output="gate")
    with pytest.raises(UserError, match="output='gate'"):
        logits(model, tokens())


def test_models_with_images_are_refused():
    if VERSION < (4, 52):
        pytest.skip("Gemma3ForConditionalGeneration is no AutoModelForCausalLM there")
    import transformers

    text = {**KINDS["gemma3"][1]}
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28}
    )
    with pytest.raises(UserError):
        to_mixture_of_heads(transformers.Gemma3ForConditionalGeneration(config), 1, 2)


BART = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4}
BART.update(decoder_attention_heads=8, decoder_ffn_dim=16, encoder_ffn_dim=16, vocab_size=50)


@pytest.mark.parametrize("kind", ("T5", "Bart"))
def test_encoder_decoders_stay_dense(kind):
    import transformers

    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 9,
    }
    config = getattr(transformers, kind + "Config")(**(sizes if kind == "T5" else BART))
    model = getattr(transformers, kind + "ForConditionalGeneration")(config)
    with pytest.raises(UserError, match="leave it dense"):
        to_mixture_of_heads(model, 1, 2)


def test_the_remedy_for_barts_decoder_is_true():
    """Two attentions a layer; its config has the encoder's number of heads."""
    from transformers import BartConfig, BartForCausalLM

    torch.manual_seed(0)
    model = BartForCausalLM(BartConfig(init_std=0.3, **BART)).double().eval()
    ids = tokens()
    with pytest.raises(UserError, match="layers, 4 entries"):
        to_mixture_of_heads(model, 2, 5)
    wanted = logits(model, ids)
    few = to_mixture_of_heads(copy.deepcopy(model), layers=[(2, 5)] * 4)
    assert [each.num_heads for each in mixtures_of(few)] == [8] * 4
    assert (logits(few, ids) - wanted).abs().max() > 1e-3
    for layers in ([(2, 8)] * 4, [(2, 8), None] * 2):
        close(logits(to_mixture_of_heads(copy.deepcopy(model), layers=layers), ids), wanted)


def test_a_layer_that_is_refused_leaves_the_others_dense():
    model = dense()
    with pytest.raises(UserError):
        to_mixture_of_heads(model, layers=[(1, 2), (9, 9)])
    assert mixtures_of(model) == []


def test_the_mixture_is_in_the_mode_of_its_attention():
    assert not any(each.training for each in mixtures_of(to_mixture_of_heads(dense(), 2, 5)))
    assert all(
        each.training for each in mixtures_of(to_mixture_of_heads(dense().train(), 2, 5))
    )


def test_fewer_heads_than_the_projection_reads_are_refused():
    """Tensor parallelism leaves a rank its own heads."""
    model = mixture()
    projection = model.model.layers[0].self_attn.o_proj
    projection.register_forward_pre_hook(
        lambda module, args: (args[0][..., :16],), prepend=True
    )
    with pytest.raises(UserError):
        logits(model, tokens())


@pytest.mark.parametrize("names", [("o_proj",), ("o_proj", "q_proj")])
def test_a_call_that_passes_over_projections_is_refused(names):
    model = mixture()
    attention = model.model.layers[0].self_attn
    assert attention.mixture.router.reads_queries
    for name in names:
        product = {"__call__": lambda self, x: x @ self.weight.T}
        getattr(attention, name).__class__ = type("Fused", (torch.nn.Linear,), product)
    with pytest.raises(UserError):
        logits(model, tokens())
