"""Beam search: the hypotheses of a sentence share the source's keys, and the results do not show it."""

import functools

import pytest
import torch
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_models import build, dictionary

from moa_fairseq.layers import Attention, MixtureOfAttention
from moa_fairseq.plugin.encoder_decoder import MixtureEncoder
from moa_fairseq.plugin.forward_context import forward_context

WORDS = dictionary(symbols=34)


def model_of(arch="moa_transformer_tiny"):
    model = build(arch, "--encoder-layers", 2, "--decoder-layers", 2, seed=2, symbols=34).eval()
    model.decoder.output_projection.weight.data[WORDS.eos()] *= 3  # some sentences end early
    return model


def batch():
    g = torch.Generator().manual_seed(5)
    source = torch.randint(4, 30, (7, 9), generator=g)
    for row, padding in enumerate((0, 3, 5, 0, 1, 7, 0)):
        source[row, :padding] = 1
    return {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}


@pytest.mark.parametrize(
    "arch", ["moa_transformer_tiny", "mae_transformer_tiny", "namoh_transformer_tiny"]
)
@pytest.mark.parametrize("alignment", [False, True])
def test_sharing_the_source_among_the_beam_changes_no_hypothesis(arch, alignment, monkeypatch):
    model = model_of(arch)
    rows = set()  # of the cross-attentions' keys, over a search

    def spy(attention, *args, **options):
        placed = place(attention, *args, **options)
        if attention.encoder_decoder_attention:
            rows.add(placed[1].size(0))
        return placed

    place = Attention.place
    monkeypatch.setattr(Attention, "place", spy)

    def translate():
        rows.clear()
        generator = SequenceGenerator(
            [model], WORDS, beam_size=4, max_len_a=0, max_len_b=12, temperature=0.3
        )
        if not alignment:
            model.make_generation_fast_()
        return generator.generate([model], batch()), set(rows)

    shared, keys = translate()
    assert max(keys) == 7 and len(keys) > 1, (
        "a row for each sentence, and sentences leave the batch"
    )
    monkeypatch.setattr(
        MixtureEncoder, "reorder_encoder_out", TransformerEncoderBase.reorder_encoder_out
    )
    separate, keys = translate()
    assert max(keys) == 28
    assert len({len(sentence[0]["tokens"]) for sentence in separate}) > 1, (
        "sentences must end at different steps"
    )
    for with_sharing, without in zip(shared, separate):
        for a, b in zip(with_sharing, without):
            assert torch.equal(a["tokens"], b["tokens"])
            torch.testing.assert_close(a["score"], b["score"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(a["attention"], b["attention"], rtol=1e-4, atol=1e-5)


ONE = ("--encoder-layers", 1, "--decoder-layers", 1)
SMALL = functools.cache(lambda arch: build(arch, *ONE, symbols=34).double().eval())


@settings(max_examples=settings.default.max_examples // 12)
@given(
    st.sampled_from(
        ["moa_transformer_tiny", "mae_transformer_tiny", "switchhead_transformer_tiny"]
    ),
    st.permutations(range(5)),
    st.lists(st.integers(1, 7), min_size=5, max_size=5),
    st.integers(0, 4),
)
def test_a_translation_has_the_same_score_in_any_batch(arch, order, lengths, split):
    """Whatever its order, the sentences beside it, and so its padding."""
    model = SMALL(arch)
    generator = SequenceGenerator([model], WORDS, beam_size=2, max_len_a=0, max_len_b=4)

    def scores(rows):
        source = torch.ones(len(rows), max(lengths[row] for row in rows), dtype=torch.long)
        for place, row in enumerate(rows):
            source[place, -lengths[row] :] = torch.arange(lengths[row]) * (row + 2) % 30 + 4
        net_input = {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}
        return {
            row: torch.stack([beam["score"] for beam in beams])
            for row, beams in zip(rows, generator.generate([model], {"net_input": net_input}))
        }

    parts = scores(order[: split + 1]) | (scores(order[split + 1 :]) if split < 4 else {})
    torch.testing.assert_close(parts, scores(range(5)), rtol=1e-5, atol=1e-5)


def test_only_an_order_that_repeats_every_sentence_is_a_beam():
    model = model_of()
    encoder_out = model.encoder(**batch()["net_input"])
    for order, is_beam in (
        (torch.arange(7).repeat_interleave(3), True),
        (torch.arange(7).repeat(3), False),
        (torch.arange(7).flip(0), False),
        (torch.tensor([0, 0, 1]), False),
    ):
        reordered = model.encoder.reorder_encoder_out(encoder_out, order)
        assert ("beam" in reordered) == is_beam
        state = {}
        model.decoder(torch.full((len(order), 1), 2), reordered, incremental_state=state)
        keys = model.decoder.layers[0].encoder_attn._get_input_buffer(state)["prev_key"]
        assert keys.size(0) == (7 if is_beam else len(order))


def test_later_orders_of_a_beam_copy_what_changes():
    encoder = model_of().encoder
    encoder_out = encoder.reorder_encoder_out(
        encoder(**batch()["net_input"]), torch.arange(7).repeat_interleave(2)
    )
    swapped = torch.arange(14).view(7, 2).flip(1).flatten()
    assert encoder.reorder_encoder_out(encoder_out, swapped) is encoder_out
    for order, is_beam in ((swapped[4:], True), (swapped.roll(1), False), (swapped[:5], False)):
        found = encoder.reorder_encoder_out(encoder_out, order)
        assert ("beam" in found) == is_beam
        assert torch.equal(found["encoder_out"][0], encoder_out["encoder_out"][0][:, order])


def test_a_sentence_that_leaves_the_batch_takes_its_keys_along():
    model = model_of()
    attention = model.decoder.layers[0].encoder_attn
    memory = torch.randn(5, 3, 128).repeat_interleave(2, dim=1)
    state = {}
    with forward_context(beam_size=2):
        attention(
            torch.randn(1, 6, 128), memory, memory, incremental_state=state, static_kv=True
        )
    before = attention._get_input_buffer(state)["prev_key"].clone()
    attention.reorder_incremental_state(state, torch.tensor([1, 0, 3, 2, 4, 4]))
    assert torch.equal(attention._get_input_buffer(state)["prev_key"], before)
    attention.reorder_incremental_state(state, torch.tensor([0, 0, 5, 4]))
    assert torch.equal(attention._get_input_buffer(state)["prev_key"], before[[0, 2]])


def test_the_decoder_says_that_its_mask_is_causal(monkeypatch):
    model = model_of()
    decoder = model.decoder
    calls = []
    compute = MixtureOfAttention.compute
    monkeypatch.setattr(
        MixtureOfAttention,
        "compute",
        lambda self, call: calls.append(call) or compute(self, call),
    )
    x = torch.zeros(4, 1, 128)
    with forward_context():
        mask = decoder.buffered_future_mask(x)
        for given in (mask, mask.clone(), None):
            decoder.layers[0].self_attn(x, x, x, attn_mask=given)
    assert [call.masks.is_causal for call in calls] == [True, False, False]
    assert torch.equal(mask.isinf(), torch.ones(4, 4).triu(1).bool())
    encoded = model.encoder(**batch()["net_input"])
    calls.clear()
    decoder(torch.full((7, 5), 7), encoded)
    # self- and cross-attention take turns
    assert [call.masks.is_causal for call in calls[-4::2]] == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arch, flags",
    [
        ("switchhead_transformer_tiny", ("--balance-loss", "none", "--z-loss-coef", 0)),
        ("moa_transformer_tiny", ("--router-choice", "hash", "--router-gates", "uniform")),
    ],
)
def test_fairseq_trains_and_translates_in_a_beam(arch, flags, fairseq, toy_data, tmp_path):
    log = fairseq.train(toy_data, tmp_path, "--max-epoch", 1, *flags, arch=arch).stdout
    assert '"train_dead_experts"' in log
    generate = (
        "--path",
        tmp_path / "checkpoint_last.pt",
        "--user-dir",
        "moa_fairseq",
        "--cpu",
        "--beam",
        3,
    )
    out = fairseq("generate", toy_data, *generate).stdout
    assert len([line for line in out.splitlines() if line.startswith("H-")]) == 12
