"""The weights and settings that a conversion takes over, fills in or refuses."""

import argparse

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert.models import _symbols, settings_for
from moa_fairseq.experiments.convert.weights import (
    dense_weights,
    fill,
    moh_defaults,
    refuse_what_fairseq_lacks,
)
from moa_fairseq.layers import MixtureOfAttentiveExperts, MixtureOfHeads


@pytest.mark.parametrize(
    "heads, shared, routed", [(8, 4, 2), (5, 2, 1), (7, 3, 2), (3, 1, 1), (2, 1, 1), (1, 0, 1)]
)
def test_half_of_the_heads_are_shared_and_half_of_the_rest_chosen(heads, shared, routed):
    """Halves of odd numbers are rounded down, but one head is chosen at least."""
    settings = argparse.Namespace(encoder_attention_heads=heads, decoder_attention_heads=99)
    found = moh_defaults(settings, "masked LM", {})
    assert (found["moh_shared_heads"], found["experts_per_token"]) == (shared, routed)


def test_the_side_with_fewer_heads_decides():
    settings = argparse.Namespace(encoder_attention_heads=8, decoder_attention_heads=4)
    assert moh_defaults(settings, "translation", {})["moh_shared_heads"] == 2
    assert moh_defaults(settings, "causal LM", {})["experts_per_token"] == 1
    for shared in (4, 7):
        with pytest.raises(UserError, match="at most 3"):
            moh_defaults(settings, "translation", {"moh_shared_heads": shared})


def test_symbols_of_adaptive_inputs_are_those_of_all_bands():
    bands = {
        f"decoder.embed_tokens.embeddings.{band}.0.weight": rows
        for band, rows in enumerate((5, 7, 9))
    }
    weights = {name: torch.zeros(rows, 4) for name, rows in bands.items()}
    weights["decoder.embed_tokens.embeddings.1.1.weight"] = torch.zeros(
        8, 4
    )  # a band's projection
    assert _symbols(weights, ("encoder.", "decoder.")) == 5 + 7 + 9
    assert (
        _symbols({"decoder.embed_tokens.weight": torch.zeros(6, 4), **weights}, ("decoder.",))
        == 6
    )


def test_learned_positions_of_a_language_model_are_taken_over():
    """The architecture of the mixture may have others by default."""
    settings = argparse.Namespace(arch="transformer_lm", decoder_learned_pos=True)
    for learned, expected in ((True, "learned"), (False, "sinusoidal")):
        settings.decoder_learned_pos = learned
        assert settings_for(settings, "mae", "causal LM", {}).positions == expected
    settings.positions = "rope"
    assert settings_for(settings, "mae", "causal LM", {}).positions == "rope"


@pytest.mark.parametrize(
    "part, flag", [("q_proj", "--attention-head-dim"), ("k_proj", "--key-heads")]
)
def test_heads_of_other_widths_or_fewer_keys_are_refused_by_their_flag(part, flag):
    model = torch.nn.ModuleList(
        [MixtureOfHeads(8, num_heads=4, moh_shared_heads=2, experts_per_token=1)]
    )
    model[0].name = "0"
    dense = {f"0.{name}.weight": torch.zeros(8, 8) for name in ("q_proj", "k_proj")}
    dense[f"0.{part}.weight"] = torch.zeros(2, 8)
    with pytest.raises(UserError, match=flag):
        fill(model, dense)


@pytest.mark.parametrize(
    "chosen, reason", [((1, 2), "3 of 4"), ((2, 1), "3 of 4"), ((2, 2), None)]
)
def test_any_layer_that_leaves_heads_out_computes_another_function(chosen, reason):
    sizes = [dict(num_heads=4, moh_shared_heads=2, experts_per_token=count) for count in chosen]
    model = torch.nn.ModuleList(
        [MixtureOfHeads(8, self_attention=True, **size) for size in sizes]
    )
    for name, attention in model.named_children():
        attention.name = name
    dense = {name: value for name, value in model.state_dict().items() if "router" not in name}
    found = fill(model, dense)
    assert found is None if reason is None else found.startswith(reason)


def test_a_gate_that_prefers_an_expert_for_every_input_is_not_dense():
    model = torch.nn.ModuleDict({"x": MixtureOfAttentiveExperts(8, 4, self_attention=True)})
    model["x"].name = "x"
    last = model["x"].gate.fc2
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 3.0)
    assert not [name for name in dense_weights(model) if ".gate." in name]
    with torch.no_grad():
        last.bias[0] = 4.0
    with pytest.raises(UserError, match="x has a gate"):
        dense_weights(model)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("head-gate", "head"),
        ("query-key-norm", "head"),
        ("window", 3),
        ("gated-feed-forward", True),
        ("rms-norm", True),
    ],
)
def test_a_part_that_fairseqs_transformer_lacks_is_refused_by_its_flag(flag, value):
    settings = argparse.Namespace(head_gate="none", window=None, rms_norm=False)
    refuse_what_fairseq_lacks(settings)
    setattr(settings, flag.replace("-", "_"), value)
    with pytest.raises(UserError, match=f"--{flag}"):
        refuse_what_fairseq_lacks(settings)
