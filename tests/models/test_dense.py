"""Dense models with the controls of a study, against fairseq's own models and float64 loops."""

import math

import pytest
import torch
from whole_models import PAD, batch, build

from moa_fairseq.attention.base import name_attentions
from moa_fairseq.attention.dense import DenseAttention
from moa_fairseq.attention.expert_draw import ExpertDraw, drawing_experts
from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.complexity import complexity

TINY = ["--encoder-layers", "4", "--decoder-layers", "4", "--encoder-embed-dim", "128"]
TINY += ["--encoder-ffn-embed-dim", "256", "--decoder-ffn-embed-dim", "256", "--decoder-embed-dim", "128"]
TINY += ["--encoder-attention-heads", "4", "--decoder-attention-heads", "4"]


SMALL_LM = ["--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-attention-heads", 4]
SMALL_LM += ["--decoder-ffn-embed-dim", 64, "--activation-fn", "gelu"]
NORMS = ["--encoder-normalize-before", "--decoder-normalize-before"]


@pytest.mark.parametrize(
    "arch, fairseqs, flags, size",
    [
        ("dense_transformer_tiny", "transformer", [], TINY),
        ("dense_transformer_tiny", "transformer", NORMS, TINY),
        ("dense_roberta_tiny", "roberta_tiny", [], []),
        ("dense_transformer_lm_base", "transformer_lm_gpt", SMALL_LM, []),
    ],
)
def test_it_is_fairseqs_model_by_its_weights(arch, fairseqs, flags, size):
    ours, theirs = build(arch, *flags), build(fairseqs, *size, *flags)
    ours.load_state_dict(theirs.state_dict())
    inputs = batch(fairseqs)
    real = inputs.get("prev_output_tokens", inputs["src_tokens"]).ne(PAD)
    outputs = [model.eval()(**inputs)[0][real] for model in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def branch_of(attention):
    module = attention.out_experts if hasattr(attention, "out_experts") else attention.out_proj
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize(
    "arch, attentions",
    [
        ("dense_transformer_tiny", 12),
        ("moa_transformer_tiny", 12),
        ("moh_transformer_tiny", 12),
        ("switchhead_transformer_tiny", 12),
        ("dense_roberta_tiny", 4),
        ("moa_roberta_tiny", 4),
        ("switchhead_roberta_listops", 6),
        ("transformer_xl_lm_tiny", 4),
        ("moa_lm_tiny", 4),
    ],
)
def test_the_branch_of_every_attention_starts_smaller_and_nothing_else_does(arch, attentions):
    plain, small = build(arch), build(arch, "--attention-branch-scale", 0.25)
    scaled = set()
    for one, other in zip(name_attentions(plain), name_attentions(small)):
        for before, after in zip(branch_of(one), branch_of(other)):
            torch.testing.assert_close(after, before / 4, rtol=0, atol=0)
        output = "out_experts" if hasattr(one, "out_experts") else "out_proj"
        scaled |= {f"{one.name}.{output}.{name}" for name, _ in getattr(one, output).named_parameters()}
    assert len({name.rsplit(".", 2)[0] for name in scaled}) == attentions
    rest = [{k: v for k, v in m.state_dict().items() if k not in scaled} for m in (plain, small)]
    torch.testing.assert_close(*rest, rtol=0, atol=0)
    small.load_state_dict(plain.state_dict())  # a checkpoint's values stay as they are
    torch.testing.assert_close(small.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_branch_of_no_size_is_refused():
    with pytest.raises(UserError, match="--attention-branch-scale 0"):
        build("dense_transformer_tiny", "--attention-branch-scale", 0)


C, H, D = 12, 3, 5


def attention(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    module = DenseAttention(C, H, **settings)
    with torch.no_grad():
        for parameter in module.parameters():  # biases too must matter
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.to(dtype)


def loop(p, query, key, dim, mask=None, weight=None):
    """Σ_j w_bj · softmax(q_j · k_jᵀ / √D) v_j · W_O^j, sequence by sequence and head by head."""
    out = torch.zeros_like(query)
    for b in range(query.size(1)):
        total = p["out_proj.bias"].expand(query.size(0), -1)
        for j in range(H):
            rows = slice(j * dim, (j + 1) * dim)
            q = query[:, b] @ p["q_proj.weight"][rows].t() + p["q_proj.bias"][rows]
            k = key[:, b] @ p["k_proj.weight"][rows].t() + p["k_proj.bias"][rows]
            v = key[:, b] @ p["v_proj.weight"][rows].t() + p["v_proj.bias"][rows]
            scores = q @ k.t() / math.sqrt(dim)
            scores = scores if mask is None else scores + mask
            head = torch.softmax(scores, -1) @ v @ p["out_proj.weight"][:, rows].t()
            total = total + head * (1.0 if weight is None else weight[b, j])
        out[:, b] = total
    return out


@pytest.mark.parametrize("dim", [4, 1, 7])
@pytest.mark.parametrize("src", [None, 6])
def test_heads_of_their_own_width_by_a_loop(dim, src):
    role = {"self_attention": True} if src is None else {"encoder_decoder_attention": True}
    module = attention(head_dim=dim, **role)
    query = torch.randn(4, 2, C, dtype=torch.float64, requires_grad=True)
    key = query if src is None else torch.randn(src, 2, C, dtype=torch.float64)
    mask = torch.triu(torch.full((4, 4), -math.inf, dtype=torch.float64), 1) if src is None else None
    out, _ = module(query, key, key, attn_mask=mask)
    expected = loop(dict(module.named_parameters()), query, key, dim, mask)
    torch.testing.assert_close(out, expected)
    tensors = [query, *module.parameters()]
    upstream = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, tensors, upstream), torch.autograd.grad(expected, tensors, upstream)
    )
    assert module.k_proj.weight.shape == (H * dim, C)


def test_dropped_heads_differ_by_sequence_and_all_work_in_evaluation():
    module = attention(dropped_heads=1, self_attention=True).train()
    query = torch.randn(4, 40, C, dtype=torch.float64)
    parameters = dict(module.named_parameters())
    out, _ = module(query, query, query)
    dropped = []
    for b in range(40):
        one = query[:, b : b + 1]
        for j in range(H):
            weight = torch.full((1, H), H / (H - 1), dtype=torch.float64)
            weight[0, j] = 0.0
            if torch.allclose(out[:, b : b + 1], loop(parameters, one, one, 4, weight=weight)):
                dropped.append(j)
    assert len(dropped) == 40 and set(dropped) == set(range(H))
    torch.testing.assert_close(module.eval()(query, query, query)[0], loop(parameters, query, query, 4))


def test_one_dropped_head_is_an_f_step_of_uniform_mae():
    dense = attention(dropped_heads=1, self_attention=True).train()
    uniform = MixtureOfAttentiveExperts(C, H, gate="uniform", self_attention=True).double().train()
    uniform.load_state_dict(dense.state_dict())
    query = torch.randn(4, 1, C, dtype=torch.float64)
    by_draw = []
    for update in range(12):
        with drawing_experts(ExpertDraw(torch.zeros(1, dtype=torch.int64), 1, update)):
            by_draw.append(uniform(query, query, query)[0])
    for _ in range(12):
        out, _ = dense(query, query, query)
        assert any(torch.allclose(out, drawn) for drawn in by_draw)
    torch.testing.assert_close(dense.eval()(query, query, query), uniform.eval()(query, query, query))


def test_equal_macs_and_equal_parameters_are_settings_of_one_architecture():
    moa = complexity("moa_transformer_tiny")
    macs = complexity("dense_transformer_tiny", model_flags=["--attention-head-dim", "31"])
    same = complexity("dense_transformer_tiny", model_flags=["--attention-head-dim", "54"])
    assert macs.total_macs == pytest.approx(moa.total_macs, rel=0.01)
    assert same.total_parameters == pytest.approx(moa.total_parameters, rel=0.01)
    assert complexity("dense_transformer_tiny").total_parameters == (
        complexity("transformer", model_flags=TINY).total_parameters
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--dropped-heads", 4), "--dropped-heads 4 must lie between 0 and 3"),
        (("--attention-head-dim", 0), "--attention-head-dim must be a positive number"),
        (("--encoder-attention-heads", 3), "--attention-head-dim says how wide"),
    ],
)
def test_impossible_flags_are_refused_by_name(flags, message):
    with pytest.raises(UserError, match=message):
        build("dense_transformer_tiny", *flags)
