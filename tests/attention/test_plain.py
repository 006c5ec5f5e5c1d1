"""Every attention as a plain module: batch first, compiled, exported; equal to fairseq's call."""

import pytest
import torch

from moa_fairseq.attention import (
    DenseAttention,
    GroupedQueryExperts,
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    MixtureOfHeads,
    NativeMixtureOfHeads,
    SwitchHeadAttention,
    collect_routings,
    load_balance_loss,
)
from moa_fairseq.attention.gqe import OUTPUTS
from moa_fairseq.errors import UserError

B, T, S, C = 3, 7, 5, 16
FAMILIES = {
    "dense": lambda **role: DenseAttention(C, 4, **role),
    "MoA": lambda **role: MixtureOfAttention(C, num_experts=6, experts_per_token=2, expert_dim=8, **role),
    "MAE": lambda **role: MixtureOfAttentiveExperts(C, 4, causal=True, **role),
    "MoH": lambda **role: MixtureOfHeads(C, 4, moh_shared_heads=1, experts_per_token=2, **role),
    **{
        f"GQE {output}": lambda gqe_output=output, **role: GroupedQueryExperts(
            C, gqe_groups=2, num_experts=4, experts_per_token=2, expert_dim=8, gqe_output=output, **role
        )
        for output in OUTPUTS
    },
    "NAMOH": lambda **role: NativeMixtureOfHeads(C, num_experts=6, experts_per_token=2, expert_dim=8, **role),
    "SwitchHead": lambda **role: SwitchHeadAttention(C, 2, 8, num_experts=4, experts_per_token=2, **role),
}
FUTURE = torch.ones(T, T).triu(1).bool()
PADDING = torch.arange(T) >= torch.tensor([[T], [4], [0]])  # a whole row, a part, none; [B, T]


@pytest.fixture(params=FAMILIES)
def attention(request):
    torch.manual_seed(1)
    return FAMILIES[request.param](self_attention=True).eval()


def fairseq_call(module, x, memory=None, padding=None, mask=None):
    keys = (x if memory is None else memory).transpose(0, 1)
    own = padding if memory is None else None
    out, _ = module(
        x.transpose(0, 1), keys, keys, padding, attn_mask=mask, need_weights=False, query_padding_mask=own
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize(
    ("mask", "causal", "whole"),
    [
        (None, False, None),
        (None, True, FUTURE),
        (FUTURE.T, False, FUTURE.T),
        (torch.eye(T).bool().roll(1), True, torch.eye(T).bool().roll(1) | FUTURE),
        (torch.full((T, T), 0.5), True, torch.full((T, T), 0.5).masked_fill(FUTURE, -torch.inf)),
    ],
)
def test_equal_to_fairseqs_call(attention, dtype, padding, mask, causal, whole):
    x, module = torch.randn(B, T, C, dtype=dtype, requires_grad=True), attention.to(dtype)
    out = module(x, mask=mask, padding=padding, causal=causal)
    expected = fairseq_call(module, x, padding=padding, mask=whole)
    assert out.shape == (B, T, C) and out.dtype == dtype
    real = slice(None) if padding is None else ~padding
    assert torch.equal(out[real], expected[real])
    (gradient,) = torch.autograd.grad(out[real].square().sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_makes_cross_attention(family):
    torch.manual_seed(2)
    module = FAMILIES[family](encoder_decoder_attention=True).eval()
    x, memory, padding = torch.randn(B, T, C), torch.randn(B, S, C), PADDING[:, :S]
    out = module(x, memory, padding=padding)
    assert torch.equal(out, fairseq_call(module, x, memory, padding))
    with pytest.raises(ValueError, match="self_attention=True"):
        FAMILIES[family](self_attention=True)(x, memory)


@pytest.mark.thorough(keep="[MoA]")
def test_compiled_without_a_break_and_exported(attention):
    """Forward and backward: fullgraph raises at the first break."""
    torch.compiler.reset()  # torch compiles one `forward` for few classes in a process
    x, options = torch.randn(B, T, C, requires_grad=True), {"padding": PADDING, "causal": True}
    expected = attention(x, **options)[~PADDING]
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)(x, **options)[~PADDING]
    exported = torch.export.export(attention, (x,), options).module()
    assert torch.equal(compiled, expected) and torch.equal(exported(x, **options)[~PADDING], expected)
    leaves, upstream = [x, *attention.parameters()], torch.randn_like(expected)
    grads = (torch.autograd.grad(out, leaves, upstream, allow_unused=True) for out in (compiled, expected))
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other)


@pytest.mark.thorough(keep="rope-MoA")
@pytest.mark.parametrize("family", ["dense", "MoA", "MoH", "SwitchHead"])
@pytest.mark.parametrize("positions", ["xl", "rope"])
def test_positions_compile_without_a_break(family, positions):
    torch.compiler.reset()
    module, x = FAMILIES[family](self_attention=True, positions=positions), torch.randn(B, T, C)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("head_gate", ["none", "head", "element"])
@pytest.mark.parametrize("shape", [(0, T, C), (B, 0, C)])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_comes_out_of_nothing(family, shape, head_gate):
    assert FAMILIES[family](self_attention=True, head_gate=head_gate)(torch.randn(shape)).shape == shape


@pytest.mark.thorough
def test_a_compiled_module_hands_out_its_decisions():
    torch.manual_seed(3)
    module, x = FAMILIES["MoA"](self_attention=True), torch.randn(B, T, C)
    with collect_routings() as eager:
        module(x)
    compiled = torch.compile(module, backend="aot_eager")
    with collect_routings() as decisions:
        compiled(x)
    ((_, one),), ((_, other),) = eager, decisions
    assert torch.equal(one.expert_ids, other.expert_ids)
    assert load_balance_loss(one) == load_balance_loss(other)


def test_masks_may_be_integers():
    torch.manual_seed(4)
    x, mask = torch.randn(B, T, C), FUTURE.T & ~torch.eye(T).bool()
    for build in FAMILIES.values():
        module = build(self_attention=True).eval()
        for causal in (False, True):
            expected = module(x, mask=mask, causal=causal)
            assert torch.equal(module(x, mask=mask.long(), causal=causal), expected)


@pytest.mark.parametrize(
    ("inputs", "options", "named"),
    [
        ((torch.zeros(B, T, C + 1),), {}, f"C = {C}"),
        ((torch.zeros(T, C),), {}, r"\[B, T, C\]"),
        ((torch.zeros(B, T, C),), {"mask": torch.zeros(T, T + 1)}, r"mask is \[7, 8\]"),
        ((torch.zeros(B, T, C),), {"padding": torch.zeros(B, T + 1)}, r"padding is \[3, 8\]"),
        ((torch.zeros(B, T, C), torch.zeros(B + 1, T, C)), {}, "memory is"),
    ],
)
def test_other_shapes_are_refused(inputs, options, named):
    module = FAMILIES["MoA"](**{"encoder_decoder_attention" if len(inputs) > 1 else "self_attention": True})
    with pytest.raises(ValueError, match=named):
        module(*inputs, **options)


def test_a_gate_over_the_whole_sequence_is_not_causal():
    module = MixtureOfAttentiveExperts(C, 4, self_attention=True)
    with pytest.raises(ValueError, match="causal=True"):
        module(torch.zeros(B, T, C), causal=True)


@pytest.mark.parametrize("family", ["MAE", "MoH"])
def test_heads_of_their_own_keys_do_not_share_them(family):
    with pytest.raises(UserError, match="key_heads=2"):
        FAMILIES[family](key_heads=2)
