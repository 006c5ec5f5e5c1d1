"""Controls of routing in whole models: generation, checkpointing, saving, resuming, autocast."""

import pytest
import torch
from whole_models import assert_incremental_equals_full, batch, build

from moa_fairseq.layers.losses import BALANCE_LOSSES
from moa_fairseq.plugin.forward_context import collect_routings

SMALL = ("--encoder-layers", 2, "--decoder-layers", 2)
CONTROLS = {
    "hash": ("--router-choice", "hash"),
    "hash, even": ("--router-choice", "hash", "--router-gates", "uniform"),
    "frozen": ("--router-choice", "frozen"),
    "even": ("--router-gates", "uniform"),
    "gates only": ("--expert-keys-values", "own", "--num-experts", 4, "--experts-per-token", 4),
    "straight-through": ("--router-gates", "straight-through"),
}
DENSE = ("--attention-head-dim", 20, "--dropped-heads", 1)
CASES = [
    *[("moa_transformer_tiny", flags) for flags in CONTROLS.values()],
    ("moa_lm_tiny", CONTROLS["hash"]),
    *[
        ("moh_transformer_tiny", flags)
        for name, flags in CONTROLS.items()
        if name in ("hash", "frozen")
    ],
    ("moh_transformer_lm_base", CONTROLS["hash"]),
    ("switchhead_transformer_tiny", CONTROLS["frozen"]),
    ("switchhead_transformer_tiny", ("--switchhead-experts", "o", "--num-experts", 1)),
    ("switchhead_lm_tiny", CONTROLS["frozen"]),
    *[
        (arch, ())
        for arch in ("moa_transformer_tiny", "switchhead_lm_tiny", "switchall_lm_tiny")
    ],
    *[(arch, ()) for arch in ("transformer_xl_lm_tiny", "moa_lm_tiny")],
    ("moa_transformer_tiny", ("--head-gate", "element")),
    ("moh_transformer_tiny", ("--head-gate", "head", "--moh-skip", "always")),
    (
        "dense_transformer_lm_base",
        ("--head-gate", "element", "--gated-feed-forward", "--rms-norm"),
    ),
    *[(arch, DENSE) for arch in ("dense_transformer_tiny", "dense_transformer_lm_base")],
    ("gqe_transformer_tiny", ()),
    ("gqe_transformer_tiny", ("--gqe-output", "experts", "--gqe-shared-heads", 0)),
    ("gqe_lm_base", ("--positions", "rope")),
    ("namoh_transformer_tiny", ()),
    ("namoh_lm_base", ()),
]


def flags_for(arch, flags):
    small = SMALL if "transformer_tiny" in arch else SMALL[2:]
    width = (
        ("--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 32)
        if arch.endswith("lm_base")
        else ()
    )
    return (*small, *width, *flags)


@pytest.mark.parametrize("arch, flags", CASES)
def test_incremental_decoding_equals_the_full_forward_in_any_beam_order(arch, flags):
    assert_incremental_equals_full(build(arch, *flags_for(arch, flags)).eval(), arch)


def decisions_of(model, inputs):
    with collect_routings() as decisions:
        model(**inputs)
    return dict(decisions)


@pytest.mark.parametrize("arch", ["moa_transformer_tiny", "moa_roberta_tiny", "moa_lm_tiny"])
def test_one_token_has_the_same_experts_wherever_it_stands(arch):
    inputs = batch(arch)
    decisions = decisions_of(build(arch, "--router-choice", "hash").eval(), inputs)
    tables = []
    for name, decision in decisions.items():
        source = name.startswith("encoder") or "prev_output_tokens" not in inputs
        ids = inputs["src_tokens" if source else "prev_output_tokens"].reshape(-1).tolist()
        experts = {}
        for token, chosen in zip(ids, decision.expert_ids.tolist()):
            assert experts.setdefault(token, chosen) == chosen and len(set(chosen)) == len(
                chosen
            )
        tables.append(
            tuple(sorted((token, tuple(chosen)) for token, chosen in experts.items()))
        )
    assert len(set(tables)) == len(tables) >= 4  # each module has a hash of its own


@pytest.mark.parametrize(
    "arch", ["moa_transformer_tiny", "moh_transformer_tiny", "moa_lm_tiny"]
)
@pytest.mark.parametrize("choice", ["learned", "hash"])
def test_checkpointed_layers_know_the_tokens_in_their_second_run_and_are_counted_once(
    arch, choice
):
    gradients = []
    counts = []
    still = ("--dropout", 0, "--attention-dropout", 0, "--router-choice", choice)
    for more in ((), ("--checkpoint-activations",)):
        model = build(arch, *still, *more).train()
        with collect_routings() as decisions:
            loss = model(**batch(arch))[0].square().mean()
        (loss + sum(BALANCE_LOSSES["moa"](decision) for _, decision in decisions)).backward()
        gradients.append([p.grad for p in model.parameters()])
        counts.append(len(decisions))
    assert counts[0] == counts[1] and sum(g is not None for g in gradients[0]) > 20
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arch, flags",
    [
        ("moa_transformer_tiny", CONTROLS["hash, even"]),
        ("moa_roberta_tiny", CONTROLS["frozen"]),
        ("moh_lm", CONTROLS["frozen"]),
        ("moa_lm_tiny", CONTROLS["straight-through"]),
        ("switchhead_roberta_listops", CONTROLS["frozen"]),
        ("dense_roberta_tiny", ("--dropped-heads", 1, "--attention-head-dim", 12)),
        ("dense_transformer_tiny", ("--head-gate", "element")),
        ("mae_transformer_base", ("--head-gate", "head")),
        ("switchhead_lm_tiny", ("--head-gate", "element")),
        ("dense_transformer_tiny", ("--dropped-heads", 1, "--attention-branch-scale", 0.25)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_autocast_moves_all_but_frozen_routers_and_a_checkpoint_restores_them(
    arch, flags, dtype
):
    arch = "moh_transformer_lm_base" if arch == "moh_lm" else arch
    flags = flags if "roberta" in arch else flags_for(arch, flags)
    model = build(arch, *flags).train()
    other = build(arch, *flags, seed=4)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == ("frozen" in flags) and all("router" in name for name in frozen)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(**batch(arch))[0].float().square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    inputs = batch(arch)
    assert not torch.allclose(model.eval()(**inputs)[0], other.eval()(**inputs)[0])
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(**inputs)[0], other(**inputs)[0])
