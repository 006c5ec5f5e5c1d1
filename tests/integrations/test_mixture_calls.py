"""A decoding step calls few Python functions: on a fast machine they are its time."""

import dataclasses
import sys

import pytest
import torch
from integrations.tiny_models import VERSION  # skips where there is no transformers

from moa_fairseq.integrations.mixture_transformer import (
    MixtureTransformerConfig,
    MixtureTransformerForConditionalGeneration,
)
from moa_fairseq.layers.transformer_layer import StackSettings

WIDTH = 512
LAYERS = 6
HEADS = 8
VOCABULARY = 100
FAMILIES = {"moa": {"num_experts": 8, "experts_per_token": 4, "expert_dim": 128}, "dense": {}}


def base_model(family):
    sizes = (VOCABULARY, 1, WIDTH, 2048, LAYERS, HEADS)
    encoder = StackSettings(family, FAMILIES[family], *sizes)
    decoder = dataclasses.replace(encoder, causal=True, memory_dim=WIDTH)
    stacks = map(dataclasses.asdict, (encoder, decoder))
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    with torch.device("meta"):  # no number counts here
        model = MixtureTransformerForConditionalGeneration(
            MixtureTransformerConfig(*stacks, **ids)
        )
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model.eval()


def calls(model, source, steps):
    """The Python functions that a beam search of so many steps calls."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        model.generate(
            source, num_beams=4, max_new_tokens=steps, min_new_tokens=steps, early_stopping=True
        )
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("family", "most"), [("moa", 1193), ("dense", 935)])
def test_python_calls_of_a_step_of_base_size(family, most):
    model = base_model(family)
    source = torch.tensor([[*range(4, 23), 2]])
    calls(model, source, 3)  # what is computed once
    step = (calls(model, source, 15) - calls(model, source, 5)) / 10
    assert step <= (most if VERSION >= (5, 24) else 1200), step
