"""Beam search: the hypotheses of a sentence share the source's keys, and the results do not show it."""

import argparse

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator

import moa_fairseq
from moa_fairseq.attention.base import MixtureAttention
from moa_fairseq.attention.core import attend, is_causal, mark_causal

assert moa_fairseq.__version__


def model_and_dictionary():
    words = Dictionary()
    for i in range(30):
        words.add_symbol(f"w{i}")
    flags = ["data", "--arch", "moa_transformer_tiny", "--encoder-layers", "2", "--decoder-layers", "2"]
    args = options.parse_args_and_arch(options.get_training_parser(), flags)
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(2)
    return ARCH_MODEL_REGISTRY["moa_transformer_tiny"].build_model(args, task).eval(), words


def batch():
    g = torch.Generator().manual_seed(5)
    source = torch.randint(4, 30, (7, 9), generator=g)
    for row, padding in enumerate((0, 3, 5, 0, 1, 7, 0)):
        source[row, :padding] = 1
    return {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}


@pytest.mark.parametrize("alignment", [False, True])
def test_sharing_the_source_among_the_beam_changes_no_hypothesis(alignment, monkeypatch):
    model, words = model_and_dictionary()
    settings = dict(beam_size=4, max_len_a=0, max_len_b=12, temperature=0.3)

    def translate():
        generator = SequenceGenerator([model], words, **settings)
        if not alignment:
            model.make_generation_fast_()
        return generator.generate([model], batch())

    shared = translate()
    rows = {state.size(0) for state in last_cross_keys(model)}
    monkeypatch.setattr(MixtureAttention, "set_beam_size", lambda self, beam: None)
    for module in model.modules():
        if isinstance(module, MixtureAttention):
            module.beam_size = 1
    model.decoder._beam_size = -1
    separate = translate()
    assert len({len(sentence[0]["tokens"]) for sentence in separate}) > 1, (
        "sentences must end at different steps"
    )
    for with_sharing, without in zip(shared, separate):
        for a, b in zip(with_sharing, without):
            assert torch.equal(a["tokens"], b["tokens"])
            torch.testing.assert_close(a["score"], b["score"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a["attention"], b["attention"], rtol=1e-4, atol=1e-5)
    assert rows  # the search ran incrementally


def last_cross_keys(model):
    """Keys in a fresh incremental state of a beam of 4 over 7 sentences: 7 rows, not 28."""
    model.decoder.set_beam_size(4)
    source = batch()["net_input"]
    order = torch.arange(7).repeat_interleave(4)
    encoder_out = model.encoder.reorder_encoder_out(model.encoder(**source), order)
    state = {}
    model.decoder(torch.full((28, 1), 2), encoder_out, incremental_state=state)
    keys = [layer.encoder_attn._get_input_buffer(state)["prev_key"] for layer in model.decoder.layers]
    assert all(key.size(0) == 7 for key in keys)
    return keys


def test_a_sentence_that_leaves_the_batch_takes_its_keys_along():
    model, _ = model_and_dictionary()
    attention = model.decoder.layers[0].encoder_attn
    attention.set_beam_size(2)
    memory = torch.randn(5, 3, 128).repeat_interleave(2, dim=1)
    state = {}
    attention(torch.randn(1, 6, 128), memory, memory, incremental_state=state, static_kv=True)
    before = attention._get_input_buffer(state)["prev_key"].clone()
    attention.reorder_incremental_state(state, torch.tensor([1, 0, 3, 2, 4, 4]))
    assert torch.equal(attention._get_input_buffer(state)["prev_key"], before)
    attention.reorder_incremental_state(state, torch.tensor([0, 0, 5, 4]))
    assert torch.equal(attention._get_input_buffer(state)["prev_key"], before[[0, 2]])


def test_more_queries_than_keys_are_hypotheses_of_one_sentence():
    q, k, v = torch.randn(6, 3, 1, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    out, weights = attend(q, k, v, None, padding, need_weights=True)
    fast, _ = attend(q, k, v, None, padding)
    exact, exact_weights = attend(
        q,
        *(t.repeat_interleave(3, 0) for t in (k, v)),
        None,
        padding.repeat_interleave(3, 0),
        need_weights=True,
    )
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(fast, exact)
    torch.testing.assert_close(weights, exact_weights)


def test_the_decoder_says_that_its_mask_is_causal():
    model, _ = model_and_dictionary()
    mask = model.decoder.buffered_future_mask(torch.zeros(4, 1, 128))
    assert is_causal(mask) and torch.equal(mask.isinf(), torch.ones(4, 4).triu(1).bool())
    assert not is_causal(mask.clone()) and not is_causal(None)
    assert is_causal(mark_causal(torch.zeros(1)))
