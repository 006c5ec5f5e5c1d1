"""What `generate` of transformers needs from a model: a cache, rules of the search, and outputs."""

import copy
import dataclasses
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils import ModelOutput

from moa_fairseq.errors import UserError
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.transformer_layer import LayerCache

OLDEST = (4, 57)  # 4.48 reads a cache as a tuple of tensors; versions between the two are untested
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
    raise UserError(
        f"transformers {transformers.__version__} is too old for exported models: they need 4.57 or newer, "
        "pip install --upgrade 'transformers>=4.57'."
    )
# The name of a cache in transformers: `cache` from 5.24, `past_key_values` before
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


def _output(name: str, *fields: str) -> Any:
    """A class of outputs, whose fields are None by default."""
    return dataclasses.make_dataclass(
        name,
        [(field, Any, None) for field in fields],
        bases=(ModelOutput,),
        namespace={"__module__": __name__},
    )


# The output of a model. The outputs of transformers have up to ten fields, and each pass compares each field
# with all others, which takes time.
MixtureOutput = _output("MixtureOutput", "loss", "logits", CACHE, "encoder_last_hidden_state")
# The output of the encoder in `generate`. It has the padding, because transformers 5 passes no mask to the
# decoder if the user gave none.
MemoryOutput = _output("MemoryOutput", "last_hidden_state", "padding")


class GenerationCache:
    """The caches of all layers, with the methods that `generate` calls.

    Args:
        layers: the cache of each layer.
    """

    is_compileable = False
    is_initialized = True
    is_linear = ()
    is_sliding = ()

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers
        self.caches: list[KVCache] = [cache for layer in layers for cache in layer.all]
        # The hypotheses of a beam search that have a row in the cache, because their sentence is not
        # finished: their indices, ascending; None: all hypotheses
        self.rows: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of positions in the cache."""
        return self.layers[layer_idx].self_attn.length

    def get_max_cache_shape(self) -> int:
        """-1, which means no limit in transformers."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the hypotheses of a beam: replace row i by row beam_idx[i].

        Args:
            beam_idx: [B] int64, for all hypotheses; each index is in the same sentence as its row.
        """
        if self.rows is not None:
            # In the rows of the cache
            beam_idx = torch.searchsorted(self.rows, beam_idx[self.rows])
        for cache in self.caches:
            cache.reorder(beam_idx)

    def keep(self, is_running: Tensor) -> None:
        """Drop the hypotheses of finished sentences, if others stay.

        Args:
            is_running: which hypotheses stay, [sentences, beam] bool, none of those that were dropped before.
        """
        rows = is_running.flatten().nonzero().flatten()
        num_cached = is_running.numel() if self.rows is None else len(self.rows)
        if 0 < len(rows) < num_cached:
            order = rows if self.rows is None else torch.searchsorted(self.rows, rows)
            for cache in self.caches:
                cache.reorder(order)
            self.rows = rows


# The cache of the beam search that runs in this context
_SEARCHED: ContextVar[GenerationCache | None] = ContextVar("_SEARCHED", default=None)


def _known_ids(ids: Any, vocabulary: int) -> list[int]:
    """A list of the ids (one id, several or None) that are in the vocabulary."""
    every = torch.as_tensor([] if ids is None else ids).flatten().tolist()
    return [number for number in every if 0 <= number < vocabulary]


class FairseqRules:
    """The rules of fairseq's search, in one pass over the scores.

    Suppressed symbols are forbidden, and so is the end before the minimum length. At the maximum length all
    symbols but the end are forbidden, and the end keeps its probability. transformers' `forced_eos_token_id`
    would set it to 1, which changes the order of hypotheses, and its other rules would read and copy all
    scores five times in each step.

    Args:
        generation_config: suppress_tokens, eos_token_id, min_length and max_length (with the prompt) are
            read. Ids outside the vocabulary are ignored.
        vocabulary: V.
        forces_end: whether the symbol at the maximum length must be the end, if there is only one end.
    """

    def __init__(self, generation_config: Any, vocabulary: int, forces_end: bool):
        self.suppressed = _known_ids(generation_config.suppress_tokens, vocabulary)
        self.ends = _known_ids(generation_config.eos_token_id, vocabulary)
        self.min_length: int = generation_config.min_length or 0
        self.last_length: int | None = None
        if forces_end and len(self.ends) == 1 and generation_config.max_length:
            self.last_length = generation_config.max_length - 1
        self._masks: dict[str, Tensor] = {}

    def _mask(self, name: str, ids: list[int], scores: Tensor) -> Tensor:
        """A mask [V] bool, True at the ids, which is cached under its name."""
        if name not in self._masks:
            self._masks[name] = scores.new_zeros(scores.size(-1), dtype=torch.bool)
            self._masks[name][ids] = True
        return self._masks[name]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] with -inf for forbidden symbols, as a new tensor.

        Args:
            input_ids: the symbols so far, [B, T].
            scores: [B, V].
        """
        length = input_ids.size(1)
        if length == self.last_length:
            forbidden = ~self._mask("end", self.ends, scores)
        elif length < self.min_length:
            forbidden = self._mask("early", self.suppressed + self.ends, scores)
        elif self.suppressed:
            forbidden = self._mask("suppressed", self.suppressed, scores)
        else:
            return scores
        return scores.masked_fill(forbidden, -torch.inf)


class Processors(LogitsProcessorList):
    """A list of processors that does not inspect the signature of each processor in each step.

    FairseqRules come first, because a later processor for sampling might otherwise leave only symbols that
    they forbid. At the maximum length no other processor can forbid the end, the only symbol that is left.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Apply the processors to the scores [B, V], one after the other."""
        if kwargs:
            processed: Tensor = super().__call__(input_ids, scores, **kwargs)
            return processed
        rules = self[0]
        is_last = input_ids.size(1) == rules.last_length
        for processor in self:
            changed = processor(input_ids, scores)
            if is_last:  # the score of the end may change, but no processor can forbid it
                changed = torch.where(changed[:, rules.ends].isfinite(), changed, scores)
            scores = changed
        return scores


class MixtureGenerationMixin(GenerationMixin):
    """The base of translation models and causal language models.

    transformers looks for a base class whose name contains GenerationMixin, hence the name of this class.
    """

    config: Any
    model: Any
    _padding: Any

    def _decode(
        self,
        ids: Tensor,
        mask: Tensor | None,
        cache: GenerationCache | None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The decoder's logits [B, T, V] and routings.

        Args:
            ids: [B, T].
            mask: [B, T], or [B, S] for all positions so far; 0 = padding.
            cache: the cache, or None.
            memory: [B, S', C], one row for all hypotheses of a sentence; None: there is no memory, or the
                cache has its keys.
            memory_padding: [B, S'], True = padding.

        Raises:
            UserError: for the cache of another beam search, which has dropped hypotheses.
        """
        if cache is not None and cache.rows is not None:
            return self._decode_running(ids, mask, cache, cache.rows)
        model = self.model
        padding = self._padding(ids, mask, model.decoder)
        return model.decode(ids, padding, memory, memory_padding, cache and cache.layers)

    def _decode_running(
        self, ids: Tensor, mask: Tensor | None, cache: GenerationCache, rows: Tensor
    ) -> tuple[Tensor, Any]:
        """`_decode` for the hypotheses `rows`, which the cache has; the logits of the others are 0."""
        if cache is not _SEARCHED.get():
            raise UserError(
                "This cache is left over from a beam search, and lacks hypotheses: use a new one."
            )
        model = self.model
        running = ids[rows]
        padding = self._padding(running, None if mask is None else mask[rows], model.decoder)
        logits, routings = model.decode(running, padding, caches=cache.layers)
        all_logits = logits.new_zeros(len(ids), *logits.shape[1:])
        return all_logits.index_copy_(0, rows, logits), routings

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search, with the cache where `_check_early_stop_heuristic` finds it."""
        token = _SEARCHED.set(cache_of(kwargs))
        try:
            return super()._beam_search(*args, **kwargs)
        finally:
            _SEARCHED.reset(token)

    def _check_early_stop_heuristic(self, **state: Any) -> Tensor:
        """Remove finished sentences from the cache; transformers calls this at the end of each step.

        Args:
            state: that of the search, with is_sent_finished [sentences, beam] and early_stopping.

        Returns:
            Which sentences can still improve, [sentences, 1] bool, as transformers computes it.
        """
        can_improve: Tensor = super()._check_early_stop_heuristic(**state)
        cache = _SEARCHED.get()
        if cache is not None:
            has_ended = state["is_sent_finished"]
            is_running = can_improve.expand_as(has_ended)
            if state["early_stopping"] is True:
                is_running = is_running & ~has_ended.all(1, keepdim=True)
            cache.keep(is_running)
        return can_improve

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any
    ) -> None:
        """Add an empty cache to model_kwargs, if the user wants one and has given none."""
        kind = generation_config.cache_implementation
        if kind is not None:
            raise UserError(
                f"cache_implementation={kind!r}: these models have a cache of their own only."
            )
        if generation_config.prefill_chunk_size is not None:
            raise UserError("prefill_chunk_size: these models read a prompt in one pass.")
        if generation_config.use_cache and model_kwargs.get(CACHE) is None:
            beam = max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            model_kwargs[CACHE] = GenerationCache(self.model.decoder.new_caches(beam))

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Add a mask if prompts have padding, because later steps see only their last symbol."""
        ids, inputs = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        symbols = ids.ne(self.model.decoder.settings.padding_idx)
        if inputs.get("decoder_attention_mask") is None and not symbols.all():
            inputs["decoder_attention_mask"] = symbols.long()
        return ids, inputs

    def _supports_default_dynamic_cache(self) -> bool:
        return False

    def _get_logits_processor(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """FairseqRules, then the processors of transformers without those that the rules replace."""
        rest = copy.copy(generation_config)
        # `generate` has added min_new_tokens to the length of the prompt: this sum is min_length
        rest.min_length = rest.min_new_tokens = rest.suppress_tokens = None
        rules = FairseqRules(
            generation_config, self.config.vocab_size, forces_end=self.config.is_encoder_decoder
        )
        return Processors([rules, *super()._get_logits_processor(rest, *args, **kwargs)])

    def _reorder_cache(self, cache: GenerationCache, beam_idx: Tensor) -> GenerationCache:
        """Follow the hypotheses of a beam, and return the cache."""
        cache.reorder_cache(beam_idx)
        return cache


class EncoderCall:
    """The encoder, in the form in which `generate` calls it.

    Args:
        model: a translation model.
    """

    main_input_name = "input_ids"

    def __init__(self, model: Any):
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run the encoder: its output [B, S, C] and padding [B, S]."""
        stack = self.model.model.source_stack
        padding = self.model._padding(input_ids, attention_mask, stack)
        memory, _ = stack(input_ids, padding)
        return MemoryOutput(last_hidden_state=memory, padding=padding)

    __call__ = forward


def cache_of(inputs: dict[str, Any]) -> GenerationCache | None:
    """The cache in the inputs of a forward pass, under either of its names."""
    cache: GenerationCache | None = inputs.get("cache") or inputs.get("past_key_values")
    return cache


def new_ids(ids: Tensor, cache: GenerationCache | None) -> Tensor:
    """The ids, of ids [B, T], whose keys are not in the cache."""
    return ids if cache is None else ids[:, cache.get_seq_length() :]
