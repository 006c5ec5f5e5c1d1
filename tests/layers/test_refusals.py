"""Settings that an attention cannot have: the error names the flag."""

from functools import partial

import pytest
from time_first import (
    DenseAttention,
    GroupedQueryExperts,
    LatentAttention,
    MixtureOfAttention,
    MixtureOfAttentiveExperts,
    MixtureOfHeads,
    SwitchHeadAttention,
)

from moa_fairseq.errors import UserError

SWITCHHEAD = dict(switchhead_heads=2, expert_dim=6, num_experts=4, experts_per_token=2)
REFUSED = {
    partial(DenseAttention, 24, 6): [
        (dict(key_heads=4), "key_heads 4 .* 6 "),
        (dict(key_heads=0), "key_heads 0"),
    ],
    partial(LatentAttention, 24, num_heads=6): [
        (dict(latent_dim=0), "latent_dim .*0"),
        (dict(attention_head_dim=0), "attention_head_dim .*0"),
        (dict(rotary_key_dim=1, self_attention=True, positions="rope"), "rotary_key_dim 1"),
        (dict(rotary_key_dim=4, self_attention=True), "rotary_key_dim 4 .*positions='rope'"),
        (dict(self_attention=True, positions="xl"), "positions='xl'"),
        (dict(self_attention=True, positions="rope-half"), "positions='rope-half'"),
        (dict(kdim=8, vdim=9), "kdim.* 8 .*vdim.* 9"),
        (dict(num_heads=5), "24 .* 5 attention heads"),
        (dict(key_heads=2), "key_heads=2"),
    ],
    partial(MixtureOfAttention, 24, num_experts=6, experts_per_token=3, expert_dim=8): [
        (dict(experts_per_token=7), "experts_per_token 7"),
        (dict(experts_per_token=0), "experts_per_token 0"),
        (dict(expert_dim=0), "expert_dim"),
        (dict(expert_dim=None), "expert_dim"),
        (dict(router_renormalize="sometimes"), "router_renormalize sometimes"),
        (dict(expert_backend="turbo"), "expert_backend turbo"),
        (dict(expert_keys_values="own"), "expert_keys_values own"),
        (dict(expert_keys_values="mine"), "expert_keys_values mine"),
        (dict(heads_per_expert=0), "heads_per_expert"),
        (dict(router_activation="relu"), "router_activation relu"),
        (dict(experts_per_token=6, routing_bias_rate=0.1), "routing_bias_rate 0.1"),
        (
            dict(router_choice="hash", experts_per_token=6),
            "router_choice hash .*experts_per_token",
        ),
        (dict(router_choice="hash", routing_bias_rate=0.1), "routing_bias_rate 0.1"),
        (dict(router_choice="frozen", routing_noise=True), "routing_noise"),
        (dict(router_choice="fixed"), "router_choice fixed is unknown"),
        (dict(router_gates="even"), "router_gates even is unknown"),
    ],
    partial(MixtureOfHeads, 24, num_heads=6, moh_shared_heads=2, experts_per_token=2): [
        (dict(moh_shared_heads=7), "moh_shared_heads 7"),
        (dict(moh_shared_heads=-1), "moh_shared_heads -1"),
        (dict(experts_per_token=0), "experts_per_token 0"),
        (dict(experts_per_token=5), "experts_per_token 5"),
        (dict(moh_shared_heads=6, experts_per_token=1), "experts_per_token 1"),
        (dict(num_heads=5), "24 .* 5 attention heads"),
        (dict(moh_scaling="none"), "moh_scaling none"),
        (dict(moh_router="random"), "moh_router random"),
        (dict(moh_skip="sometimes"), "moh_skip sometimes"),
        (dict(moh_router="query-norm", router_choice="frozen"), "moh_router query-norm"),
        (dict(moh_router="query-norm", moh_straight_through="all"), "moh_straight_through all"),
        (dict(moh_straight_through="chosen"), "moh_straight_through chosen"),
        (
            dict(experts_per_token=4, router_choice="hash"),
            "router_choice hash .*experts_per_token",
        ),
    ],
    partial(MixtureOfAttentiveExperts, 24, 8): [
        (dict(mae_dropped_heads=8), "mae_dropped_heads 8 .* 1 and 7"),
        (dict(mae_dropped_heads=0), "mae_dropped_heads 0"),
        (dict(mae_gate="oracle"), "mae_gate oracle is unknown"),
        (dict(gate_window=0), "gate_window 0"),
        (dict(gate_norm="layer"), "gate_norm layer is unknown"),
        (dict(mae_evaluate_with="best"), "mae_evaluate_with best is unknown"),
        (
            dict(mae_evaluate_with="top-expert", mae_gate="uniform"),
            "mae_evaluate_with top-expert .*random-expert",
        ),
    ],
    partial(SwitchHeadAttention, 12, **SWITCHHEAD): [
        (dict(experts_per_token=5), "experts_per_token 5"),
        (dict(switchhead_experts="vx"), "switchhead_experts .*'vx'"),
        (dict(switchhead_experts="av"), "switchhead_experts .*'av'"),
        (dict(switchhead_experts="vv"), "switchhead_experts .*'vv'"),
        (dict(switchhead_experts=""), "switchhead_experts .*''"),
        (dict(switchhead_heads=0), "switchhead_heads"),
        (
            dict(switchhead_experts="vk", switchhead_shared_selection=True),
            "switchhead_shared_selection.*experts vk",
        ),
        (
            dict(switchhead_experts="none", switchhead_shared_selection=True),
            "switchhead_shared_selection",
        ),
        (dict(kdim=8, vdim=9), "kdim.* 8 .*vdim.* 9"),
        (
            dict(expert_dim=3, self_attention=True, positions="rope-half"),
            "positions='rope-half' .* 3",
        ),
    ],
}
CASES = [(build, *case) for build, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize("build, settings, flag", CASES)
def test_impossible_settings_name_their_flag(build, settings, flag):
    build()
    with pytest.raises(UserError, match=flag):
        build(**settings)


UNKNOWN = [
    (
        partial(MixtureOfAttention, windows=4),
        ["MixtureOfAttention", "windows", "window", "num_experts"],
    ),
    (partial(MixtureOfAttention, num_expert=4), ["num_expert ", "num_experts"]),
    (partial(MixtureOfAttention, rope_theta=1e6), ["rope_theta", "rope_base"]),
    (partial(MixtureOfAttention, key_heads=1), ["key_heads", "heads_per_expert"]),
    (partial(MixtureOfAttention, num_kv_heads=1), ["take num_kv_heads."]),
    (
        partial(SwitchHeadAttention, key_heads=2),
        ["SwitchHeadAttention", "key_heads", "switchhead_heads"],
    ),
    (partial(GroupedQueryExperts, router=None), ["GroupedQueryExperts", "router "]),
    (partial(DenseAttention, num_heads=4, head_dim=3), ["head_dim", "attention_head_dim"]),
    (partial(DenseAttention, num_heads=4, num_kv_heads=2), ["num_kv_heads (here key_heads)"]),
]


@pytest.mark.parametrize("build, words", UNKNOWN)
def test_an_unknown_keyword_is_named_with_those_that_there_are(build, words):
    with pytest.raises(TypeError) as raised:
        build(24)
    for word in words:
        assert word in str(raised.value)


NUMBERS = {
    "rope_base": "5e5",
    "window": 1.5,
    "experts_per_token": 2.0,
    "routing_bias_rate": "0.1",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_texts_and_fractions_in_place_of_numbers_are_refused(name):
    options = {"self_attention": True, "positions": "rope", name: NUMBERS[name]}
    with pytest.raises(UserError, match=f"{name}=.*number"):
        MixtureOfAttention(24, **options)


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_embeddings_of_positions_are_refused(kind):
    with pytest.raises(UserError, match=f"positions='{kind}'.*embedding.*input"):
        MixtureOfAttention(24, positions=kind, self_attention=True)


def test_the_remedy_for_heads_that_do_not_divide_the_width_works():
    with pytest.raises(UserError) as raised:
        MixtureOfHeads(64, 7)
    assert "attention_head_dim" not in str(raised.value)
    with pytest.raises(UserError, match="attention_head_dim"):
        DenseAttention(64, 7)
    DenseAttention(64, 7, attention_head_dim=8)
