"""A beam search of an exported model extends the sentences that have not ended, and no others."""

import dataclasses

import integrations.tiny_models  # noqa: F401  (skips where there is no transformers)
import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.mixture_generation import CACHE, FairseqRules, GenerationCache
from moa_fairseq.integrations.mixture_transformer import (
    MixtureTransformerConfig,
    MixtureTransformerForCausalLM,
    MixtureTransformerForConditionalGeneration,
)
from moa_fairseq.layers.transformer_layer import StackSettings

VOCABULARY = 12
MOA = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 8}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
SEARCH = {"num_beams": 3, "max_new_tokens": 30, "suppress_tokens": [1]}
SENTENCES = ([4, 5, 2], [6, 7, 8, 9, 2], [10, 2], [11, 4, 9, 2])


def decided(model, seed):
    """A model whose sentences end at different lengths."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    return model.double().eval()


def translation_model(seed):
    encoder = StackSettings("moa", MOA, VOCABULARY, 1, 16, 32, 2, 2)
    decoder = dataclasses.replace(encoder, causal=True, memory_dim=16)
    config = MixtureTransformerConfig(
        dataclasses.asdict(encoder), dataclasses.asdict(decoder), **IDS
    )
    return decided(MixtureTransformerForConditionalGeneration(config), seed)


def language_model(seed):
    decoder = StackSettings("moa", MOA, VOCABULARY, 1, 16, 32, 2, 2, causal=True)
    config = MixtureTransformerConfig(None, dataclasses.asdict(decoder), **IDS)
    return decided(MixtureTransformerForCausalLM(config), seed)


def batch(sentences):
    """Ids and mask [B, S], padded on the left."""
    width = max(map(len, sentences))
    ids = torch.tensor([[1] * (width - len(words)) + words for words in sentences])
    return {"input_ids": ids, "attention_mask": ids.ne(1).long()}


def words_of(row):
    """The symbols of a row but padding."""
    return [int(symbol) for symbol in row if symbol != 1]


@pytest.mark.parametrize(
    ("make", "seed", "early_stopping"),
    [
        (translation_model, 4, True),
        (translation_model, 4, False),
        (language_model, 6, True),
        (language_model, 4, False),
    ],
)
def test_a_sentence_that_has_ended_leaves_the_batch(make, seed, early_stopping):
    model = make(seed)
    rows = []
    layer = model.model.decoder.layers[0]
    layer.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].size(0)))
    search = SEARCH | {
        "early_stopping": early_stopping,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    together = model.generate(**batch(SENTENCES), **search)
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 12 and rows[-1] < 12
    assert all(count % 3 == 0 for count in rows)
    for sentence, row, score in zip(SENTENCES, together.sequences, together.sequences_scores):
        alone = model.generate(**batch([sentence]), **search)
        assert words_of(row) == words_of(alone.sequences[0])
        torch.testing.assert_close(score, alone.sequences_scores[0], atol=1e-5, rtol=0)


def test_a_cache_that_has_forgotten_hypotheses_is_of_no_other_search():
    model = language_model(6)
    search = SEARCH | {"early_stopping": True, "return_dict_in_generate": True}
    result = model.generate(**batch(SENTENCES), **search)
    cache = result[CACHE]
    assert isinstance(cache, GenerationCache) and cache.rows is not None
    with pytest.raises(UserError, match="use a new one"):
        model(torch.full((12, 1), 4), **{CACHE: cache})


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_rules_forbid_symbols_by_the_length_so_far(length):
    config = MixtureTransformerConfig()
    config.suppress_tokens, config.eos_token_id = [1], 2
    config.min_length, config.max_length = 2, 5
    scores = torch.randn(2, 5)
    before = scores.clone()
    ruled = FairseqRules(config, forces_end=True)(torch.zeros(2, length, dtype=torch.long), scores)
    allowed = {1: [0, 3, 4], 4: [2]}.get(length, [0, 2, 3, 4])
    assert ruled.isfinite().nonzero()[:, 1].unique().tolist() == allowed
    torch.testing.assert_close(ruled[:, allowed], before[:, allowed])
    assert torch.equal(scores, before)


def test_a_sample_is_never_left_without_a_symbol():
    model = language_model(4)
    torch.manual_seed(1)
    sample = {"do_sample": True, "top_k": 1, "min_new_tokens": 6, "max_new_tokens": 6}
    ids = model.generate(**batch(SENTENCES), **sample)
    assert ids.size(1) == 11 and 2 not in ids[:, 5:]
