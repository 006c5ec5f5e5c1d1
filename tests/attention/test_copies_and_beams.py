"""What an announced beam must not do to sentences that are no beam, and what a copied attention keeps."""

import copy
import pickle

import pytest
import torch

from moa_fairseq.attention.mae import MixtureOfAttentiveExperts
from moa_fairseq.attention.moa import MixtureOfAttention

WIDTH, BEAM, SOURCE = 16, 3, 5


def moa(**role):
    return MixtureOfAttention(WIDTH, num_experts=4, experts_per_token=2, expert_dim=8, **role)


def mae(**role):
    return MixtureOfAttentiveExperts(WIDTH, num_heads=4, causal=True, **role)


@pytest.fixture(params=[moa, mae], ids=["moa", "mae"])
def build(request):
    torch.manual_seed(0)
    return lambda **role: request.param(**role).eval()


def test_sentences_after_an_announced_beam_are_no_hypotheses(build):
    """fairseq does not announce a beam of 1, so that an earlier generator's announcement still stands."""
    attention = build(encoder_decoder_attention=True)
    query, memory = torch.randn(1, 2 * BEAM, WIDTH), torch.randn(SOURCE, 2 * BEAM, WIDTH)
    padding = torch.zeros(2 * BEAM, SOURCE, dtype=torch.bool)
    padding[1, 2:] = True
    expected, _ = attention(query, memory, memory, key_padding_mask=padding)
    attention.set_beam_size(BEAM)
    out, _ = attention(query, memory, memory, padding, incremental_state={}, static_kv=True)
    torch.testing.assert_close(out, expected)


def test_such_sentences_are_reordered_row_by_row():
    torch.manual_seed(0)
    attention = moa(encoder_decoder_attention=True).eval()
    query, memory = torch.randn(1, 2 * BEAM, WIDTH), torch.randn(SOURCE, 2 * BEAM, WIDTH)
    expected, _ = attention(query, memory, memory)
    attention.set_beam_size(BEAM)
    state, order = {}, torch.tensor([5, 0, 0, 2, 1])
    attention(query, memory, memory, incremental_state=state, static_kv=True)
    attention.reorder_incremental_state(state, order)
    out, _ = attention(query[:, order], None, None, incremental_state=state, static_kv=True)
    torch.testing.assert_close(out, expected[:, order])


def test_masks_that_differ_within_a_beam_are_kept(build):
    attention = build(encoder_decoder_attention=True)
    query = torch.randn(1, BEAM, WIDTH)
    memory = torch.randn(SOURCE, 1, WIDTH).expand(-1, BEAM, -1)
    padding = torch.zeros(BEAM, SOURCE, dtype=torch.bool)
    padding[1, 2:] = True
    expected, _ = attention(query, memory, memory, key_padding_mask=padding)
    attention.set_beam_size(BEAM)
    out, _ = attention(query, memory, memory, padding, incremental_state={}, static_kv=True)
    torch.testing.assert_close(out, expected)


def test_a_beam_still_shares_its_keys(build):
    attention = build(encoder_decoder_attention=True)
    attention.set_beam_size(BEAM)
    memory = torch.randn(SOURCE, 2, WIDTH).repeat_interleave(BEAM, 1)
    state = {}
    attention(torch.randn(1, 2 * BEAM, WIDTH), memory, memory, incremental_state=state, static_kv=True)
    assert attention.cache_in(state)["prev_key"].size(0) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_remember_their_own_keys(build, copied):
    """Layers are often made as copies of one: they must not write into the same cache."""
    first = build(self_attention=True)
    second = copied(first)
    x = torch.randn(4, 2, WIDTH)
    expected, _ = second(x, x, x, attn_mask=torch.full((4, 4), -torch.inf).triu(1))
    state, steps = {}, []
    for step in x.split(1):
        first(-step, None, None, incremental_state=state)
        steps.append(second(step, step, step, incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(steps), expected)


def test_a_copy_without_a_path_has_a_name_of_its_own_and_one_with_a_path_keeps_it(build):
    attention = build(self_attention=True)
    assert copy.deepcopy(attention).name != attention.name
    attention.name = "decoder.layers.0.self_attn"
    assert copy.deepcopy(attention).name == "decoder.layers.0.self_attn"


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [torch.ones(4, 4, dtype=torch.bool), torch.full((4, 4), -torch.inf)])
def test_a_query_whose_mask_blocks_every_key_gets_zeros(mask, need_weights):
    mask = mask.clone()
    mask[0] = False if mask.dtype == torch.bool else 0.0
    torch.manual_seed(0)
    attention = moa(self_attention=True)
    x = torch.randn(4, 2, WIDTH, requires_grad=True)
    out, weights = attention(x, x, x, attn_mask=mask, need_weights=need_weights)
    assert out[0].abs().max() > 0 and (out[1:] == 0).all()
    assert weights is None or (weights[:, 1:] == 0).all()
    out.square().sum().backward()
    assert x.grad.isfinite().all()
