"""What `generate` of transformers asks of a model: a cache, rules of the beam search, outputs."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from moa_fairseq.errors import UserError
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.transformer_layer import LayerCache

# How transformers calls a cache: `cache` from 5.24, `past_key_values` before
_FIELDS = {field.name for field in dataclasses.fields(Seq2SeqLMOutput)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
# What a model returns. transformers' own outputs have up to ten fields, and each pass compares each of them
# with all others.
MixtureOutput = dataclasses.make_dataclass(
    "MixtureOutput",
    [(name, Any, None) for name in ("loss", "logits", CACHE, "encoder_last_hidden_state")],
    bases=(ModelOutput,),
    namespace={"__module__": __name__},
)


class GenerationCache:
    """The caches of all layers, with what `generate` asks of a cache.

    Args:
        layers: a cache of each.
    """

    is_compileable = False
    is_initialized = True
    is_linear = ()
    is_sliding = ()

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers
        self.caches: list[KVCache] = [cache for layer in layers for cache in layer.all]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions it holds."""
        return self.layers[layer_idx].self_attn.length

    def get_max_cache_shape(self) -> int:
        """No limit, as transformers writes it."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the hypotheses of a beam: row i becomes row beam_idx[i]."""
        for cache in self.caches:
            cache.reorder(beam_idx)


class ForcedEnd:
    """At the last step only the end has a probability, its own: fairseq's rule.

    transformers' own (`forced_eos_token_id`) sets it to 1, which changes the order of the hypotheses.

    Args:
        length: of the longest sequences, the start counted.
        end: the id of the end.
    """

    def __init__(self, length: int, end: int):
        self.length = length
        self.end = end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.size(1) != self.length - 1:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.end] = scores[:, self.end]
        return forced


class Processors(LogitsProcessorList):
    """transformers' list, which does not inspect the signature of every processor at every step."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """The scores [B, V] that the processors make of them, one after the other."""
        if kwargs:
            changed: Tensor = super().__call__(input_ids, scores, **kwargs)
            return changed
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class MixtureGenerationMixin(GenerationMixin):
    """What translation and causal language models have in common.

    transformers looks for its own mixin by the name of a base class, which therefore ends like it.
    """

    config: Any
    model: Any

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any
    ) -> None:
        name = generation_config.cache_implementation
        if name is not None:
            raise UserError(
                f"cache_implementation={name!r}: these models have a cache of their own only."
            )
        if generation_config.use_cache and model_kwargs.get(CACHE) is None:
            beam = max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            model_kwargs[CACHE] = GenerationCache(self.model.decoder.new_caches(beam))

    def _supports_default_dynamic_cache(self) -> bool:
        return False

    def _get_logits_processor(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        processors = Processors(super()._get_logits_processor(generation_config, *args, **kwargs))
        end = generation_config.eos_token_id
        if self.config.is_encoder_decoder and isinstance(end, int) and generation_config.max_length:
            processors.append(ForcedEnd(generation_config.max_length, end))
        return processors

    def _reorder_cache(self, cache: GenerationCache, beam_idx: Tensor) -> GenerationCache:
        cache.reorder_cache(beam_idx)
        return cache


class EncoderCall:
    """The encoder as `generate` calls it.

    Args:
        model: a translation model.
    """

    main_input_name = "input_ids"

    def __init__(self, model: Any):
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """The encoder's output [B, S, C]."""
        memory, _ = self.model.encode(input_ids, attention_mask)
        return BaseModelOutput(last_hidden_state=memory)

    __call__ = forward


def cache_of(inputs: dict[str, Any]) -> GenerationCache | None:
    """The cache among the inputs of a forward pass, by either of its names."""
    cache: GenerationCache | None = inputs.get("cache") or inputs.get("past_key_values")
    return cache


def new_ids(ids: Tensor, cache: GenerationCache | None) -> Tensor:
    """Those of the ids [B, T] whose keys the cache lacks."""
    return ids if cache is None else ids[:, cache.get_seq_length() :]
