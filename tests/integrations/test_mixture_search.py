"""A beam search of an exported model extends the sentences that have not ended, and no others."""

import dataclasses
import subprocess
import sys

import integrations.tiny_models  # noqa: F401  (skips where there is no transformers)
import pytest
import torch
from integrations.conftest import ROOT

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


@pytest.mark.parametrize("min_length", [2, 5, 9])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_rules_forbid_symbols_by_the_length_so_far(length, min_length):
    config = MixtureTransformerConfig()
    config.suppress_tokens, config.eos_token_id = [1], 2
    config.min_length, config.max_length = min_length, 5
    scores = torch.randn(2, 5)
    before = scores.clone()
    rules = FairseqRules(config, vocabulary=5, forces_end=True)
    ruled = rules(torch.zeros(2, length, dtype=torch.long), scores)
    allowed = [0, 3, 4] if length < min_length else [0, 2, 3, 4]
    if length == 4:  # the maximum length wins
        allowed = [2]
    assert ruled.isfinite().nonzero()[:, 1].unique().tolist() == allowed
    torch.testing.assert_close(ruled[:, allowed], before[:, allowed])
    assert torch.equal(scores, before)


def test_a_sample_is_never_left_without_a_symbol():
    model = language_model(4)
    torch.manual_seed(1)
    sample = {"do_sample": True, "top_k": 1, "min_new_tokens": 6, "max_new_tokens": 6}
    ids = model.generate(**batch(SENTENCES), **sample)
    assert ids.size(1) == 11 and 2 not in ids[:, 5:]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"eos_token_id": [2]}, {"eos_token_id": 2}),
        ({"eos_token_id": torch.tensor(2)}, {"eos_token_id": 2}),
        ({"eos_token_id": -1}, {"eos_token_id": VOCABULARY}),
        ({"suppress_tokens": [1, -1, VOCABULARY]}, {"suppress_tokens": [1]}),
    ],
)
def test_rules_read_ids_as_transformers_does(one, other):
    model = translation_model(4)
    search = SEARCH | {"max_new_tokens": 5, "min_new_tokens": 2}
    ids, ids_of_other = (
        model.generate(**batch(SENTENCES), **(search | kind)) for kind in (one, other)
    )
    assert torch.equal(ids, ids_of_other)


def test_without_a_valid_end_no_symbol_is_forced_or_forbidden():
    config = MixtureTransformerConfig()
    config.suppress_tokens, config.eos_token_id = None, -1
    config.min_length, config.max_length = 2, 5
    scores = torch.randn(2, 5)
    rules = FairseqRules(config, vocabulary=5, forces_end=True)
    for length in (1, 4):
        assert torch.equal(rules(torch.zeros(2, length, dtype=torch.long), scores), scores)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "rule",
    [{"prefix_allowed_tokens_fn": lambda row, ids: [5, 6]}, {"no_repeat_ngram_size": 1}],
    ids=["prefix", "ngram"],
)
def test_the_last_symbol_is_the_end_whatever_else_forbids_it(rule, beams):
    model = translation_model(4)
    search = SEARCH | {"num_beams": beams, "max_new_tokens": 3}
    ids = model.generate(**batch(SENTENCES), **search, **rule)
    assert ids[:, -1].eq(2).all()


@pytest.mark.parametrize("beams", [1, 3])
def test_padding_of_the_source_needs_no_mask(beams):
    model = translation_model(4)
    inputs = batch(SENTENCES)
    search = SEARCH | {"num_beams": beams}
    ids = model.generate(**inputs, **search)
    assert torch.equal(model.generate(inputs["input_ids"], **search), ids)
    memory = model.get_encoder()(**inputs)
    assert torch.equal(model.generate(encoder_outputs=memory, **search), ids)


@pytest.mark.parametrize("beams", [1, 3])
def test_padding_of_the_decoder_s_prompts_needs_no_mask(beams):
    model = translation_model(4)
    prompts = ([2], [2, 5, 6], [2, 7], [2, 8, 9])
    search = SEARCH | {"num_beams": beams}
    inputs = batch(SENTENCES)
    together = model.generate(**inputs, **search, decoder_input_ids=batch(prompts)["input_ids"])
    for sentence, prompt, row in zip(SENTENCES, prompts, together):
        prompt_ids = torch.tensor([prompt])
        alone = model.generate(**batch([sentence]), **search, decoder_input_ids=prompt_ids)
        assert words_of(row) == words_of(alone[0])


def test_a_pass_makes_the_cache_that_guidance_asks_for():
    model = language_model(4)
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]])
    first = model(ids[:, :2], use_cache=True)
    second = model(ids[:, 2:], **{CACHE: first[CACHE]})
    torch.testing.assert_close(second.logits, model(ids).logits[:, 2:])


def test_what_the_cache_cannot_do_is_refused_by_name():
    model = language_model(4)
    inputs = batch(SENTENCES[:1])
    with pytest.raises(UserError, match="prefill_chunk_size"):
        model.generate(**inputs, prefill_chunk_size=2)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(**inputs, prompt_lookup_num_tokens=2)


def test_a_version_without_such_caches_is_refused_before_a_search():
    code = "import transformers; transformers.__version__ = '4.48.3'; import {}"
    module = "moa_fairseq.integrations.mixture_transformer"
    command = [sys.executable, "-c", code.format(module)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "transformers>=4.57" in done.stderr
