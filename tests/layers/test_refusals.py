"""Settings that an attention cannot have: the error names the flag."""

from functools import partial

import pytest
from time_first import (
    DenseAttention,
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
        (dict(key_heads=4), "--key-heads 4 .* 6 "),
        (dict(key_heads=0), "--key-heads 0"),
    ],
    partial(LatentAttention, 24, num_heads=6): [
        (dict(latent_dim=0), "--latent-dim .*0"),
        (dict(attention_head_dim=0), "--attention-head-dim .*0"),
        (dict(rotary_key_dim=1, self_attention=True, positions="rope"), "--rotary-key-dim 1"),
        (dict(rotary_key_dim=4, self_attention=True), "--rotary-key-dim 4 .*--positions rope"),
        (dict(self_attention=True, positions="xl"), "--positions xl"),
        (dict(self_attention=True, positions="rope-half"), "--positions rope-half"),
        (dict(kdim=8, vdim=9), "kdim.* 8 .*vdim.* 9"),
        (dict(num_heads=5), "24 .* 5 attention heads"),
        (dict(key_heads=2), "key_heads=2"),
    ],
    partial(MixtureOfAttention, 24, num_experts=6, experts_per_token=3, expert_dim=8): [
        (dict(experts_per_token=7), "--experts-per-token 7"),
        (dict(experts_per_token=0), "--experts-per-token 0"),
        (dict(expert_dim=0), "--expert-dim"),
        (dict(expert_dim=None), "--expert-dim"),
        (dict(router_renormalize="sometimes"), "--router-renormalize sometimes"),
        (dict(expert_backend="turbo"), "--expert-backend turbo"),
        (dict(expert_keys_values="own"), "--expert-keys-values own"),
        (dict(expert_keys_values="mine"), "--expert-keys-values mine"),
        (dict(heads_per_expert=0), "--heads-per-expert"),
        (dict(router_activation="relu"), "--router-activation relu"),
        (dict(experts_per_token=6, routing_bias_rate=0.1), "--routing-bias-rate 0.1"),
        (dict(router_choice="hash", experts_per_token=6), "--router-choice hash .*--experts-per-token"),
        (dict(router_choice="hash", routing_bias_rate=0.1), "--routing-bias-rate 0.1"),
        (dict(router_choice="frozen", routing_noise=True), "--routing-noise"),
        (dict(router_choice="fixed"), "--router-choice fixed is unknown"),
        (dict(router_gates="even"), "--router-gates even is unknown"),
    ],
    partial(MixtureOfHeads, 24, num_heads=6, moh_shared_heads=2, experts_per_token=2): [
        (dict(moh_shared_heads=7), "--moh-shared-heads 7"),
        (dict(moh_shared_heads=-1), "--moh-shared-heads -1"),
        (dict(experts_per_token=0), "--experts-per-token 0"),
        (dict(experts_per_token=5), "--experts-per-token 5"),
        (dict(moh_shared_heads=6, experts_per_token=1), "--experts-per-token 1"),
        (dict(num_heads=5), "24 .* 5 attention heads"),
        (dict(moh_scaling="none"), "--moh-scaling none"),
        (dict(moh_router="random"), "--moh-router random"),
        (dict(moh_skip="sometimes"), "--moh-skip sometimes"),
        (dict(moh_router="query-norm", router_choice="frozen"), "--moh-router query-norm"),
        (dict(moh_router="query-norm", moh_straight_through="all"), "--moh-straight-through all"),
        (dict(moh_straight_through="chosen"), "--moh-straight-through chosen"),
        (dict(experts_per_token=4, router_choice="hash"), "--router-choice hash .*--experts-per-token"),
    ],
    partial(MixtureOfAttentiveExperts, 24, 8): [
        (dict(mae_dropped_heads=8), "--mae-dropped-heads 8 .* 1 and 7"),
        (dict(mae_dropped_heads=0), "--mae-dropped-heads 0"),
        (dict(mae_gate="oracle"), "--mae-gate oracle is unknown"),
        (dict(gate_window=0), "--gate-window 0"),
        (dict(gate_norm="layer"), "--gate-norm layer is unknown"),
        (dict(mae_evaluate_with="best"), "--mae-evaluate-with best is unknown"),
        (
            dict(mae_evaluate_with="top-expert", mae_gate="uniform"),
            "--mae-evaluate-with top-expert .*random-expert",
        ),
    ],
    partial(SwitchHeadAttention, 12, **SWITCHHEAD): [
        (dict(experts_per_token=5), "--experts-per-token 5"),
        (dict(switchhead_experts="vx"), "--switchhead-experts .*'vx'"),
        (dict(switchhead_experts="vv"), "--switchhead-experts .*'vv'"),
        (dict(switchhead_experts=""), "--switchhead-experts .*''"),
        (dict(switchhead_heads=0), "--switchhead-heads"),
        (
            dict(switchhead_experts="vk", switchhead_shared_selection=True),
            "--switchhead-shared-selection.*experts vk",
        ),
        (dict(switchhead_experts="none", switchhead_shared_selection=True), "--switchhead-shared-selection"),
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
