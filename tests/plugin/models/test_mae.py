"""MAE's architectures: what they are made of, what they cost, and a language model step by step."""

import pytest
import torch
from whole_models import assert_incremental_equals_full, batch, build

from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.layers.expert_draw import random_expert
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.sequence_gate import gates_of
from moa_fairseq.plugin.forward_context import collect_routings


def build_lm(*flags):
    small = ("--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 32)
    small += ("--decoder-input-dim", 32, "--decoder-output-dim", 32, "--tokens-per-sample", 300)
    small += ("--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20")
    return build("mae_transformer_lm_wiki103", *small, *flags)


def test_every_attention_of_the_base_model_has_its_own_gate():
    with torch.device("meta"):
        model = build("mae_transformer_base")
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfAttentiveExperts)]
    assert len(mixtures) == 18 == len({id(gate) for gate in gates_of(model)})
    assert not any(type(m).__name__ == "MultiheadAttention" for m in model.modules())
    assert {m.causal for m in mixtures if m.name.startswith("encoder")} == {False}
    assert {m.causal for m in mixtures if m.name.startswith("decoder")} == {True}
    assert {(m.num_heads, m.num_experts, m.gate_window) for m in mixtures} == {(8, 8, None)}
    assert {tuple(gate.fc1.weight.shape) for gate in gates_of(model)} == {(256, 512)}


def test_flags_choose_the_experts_and_the_gate():
    model = build(
        "mae_transformer_tiny",
        "--mae-dropped-heads",
        2,
        "--gate-hidden-dim",
        7,
        "--gate-window",
        3,
    )
    attention = model.decoder.layers[3].encoder_attn
    assert (attention.num_experts, attention.gate_window) == (28, 3)
    assert attention.gate.fc1.weight.shape == (7, 128)
    assert not gates_of(build("mae_transformer_tiny", "--mae-gate", "uniform"))


def test_a_dense_checkpoint_fits_and_gives_the_same_output():
    dense = build("transformer", "--encoder-layers", 1, "--decoder-layers", 1).eval()
    model = build(
        "mae_transformer_base",
        "--encoder-layers",
        1,
        "--decoder-layers",
        1,
        "--mae-gate",
        "uniform",
    )
    model.eval().load_state_dict(dense.state_dict(), strict=True)
    source = torch.tensor([[5, 6, 7, 2], [1, 8, 9, 2]])
    batch = {
        "src_tokens": source,
        "src_lengths": torch.tensor([4, 3]),
        "prev_output_tokens": source.flip(1),
    }
    real = batch["prev_output_tokens"] != 1
    torch.testing.assert_close(
        model(**batch)[0][real], dense(**batch)[0][real], rtol=1e-4, atol=1e-4
    )


def test_a_gate_costs_an_encoder_one_row_and_a_decoder_one_per_token():
    cost = complexity("mae_transformer_base", 100, 9, 5)
    gate = 512 * 256 + 256 * 8
    assert cost.macs["router"] == 6 * gate + 12 * 5 * gate
    dense = complexity("transformer_wmt_en_de", 100, 9, 5)
    assert cost.total_macs - cost.macs["router"] == dense.total_macs
    uniform = complexity("mae_transformer_base", 100, model_flags=["--mae-gate", "uniform"])
    assert cost.total_parameters - uniform.total_parameters == cost.parameters["router"]
    assert cost.not_counted == []


def with_sure_gates(model):
    for gate in gates_of(model):
        torch.nn.init.normal_(gate.fc2.weight, std=2.0)
    return model


@pytest.mark.parametrize("how", ["mixture", "top-expert", "random-expert"])
def test_translation_step_by_step_with_one_expert_in_each_module(how):
    arch = "mae_transformer_tiny"
    flags = ("--mae-evaluate-with", how, "--mae-evaluate-seed", 3)
    model = with_sure_gates(
        build(arch, "--encoder-layers", 2, "--decoder-layers", 2, *flags)
    ).eval()
    assert_incremental_equals_full(model, arch)
    with collect_routings() as decisions:
        model(**batch(arch))
    chosen = {name: decision.expert_ids for name, decision in decisions}
    assert {index.size(1) for index in chosen.values()} == ({8} if how == "mixture" else {1})
    if how == "random-expert":
        assert all(
            index.unique().tolist() == [random_expert(name, 3, 8)]
            for name, index in chosen.items()
        )


def test_a_language_model_step_by_step_with_the_window():
    # The paper's
    assert {layer.self_attn.gate_window for layer in build_lm().decoder.layers} == {100}
    model = with_sure_gates(build_lm("--gate-window", 3)).eval()
    assert {layer.self_attn.gate_window for layer in model.decoder.layers} == {3}
    assert_incremental_equals_full(model, "mae_transformer_lm_wiki103")
