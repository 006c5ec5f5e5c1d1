"""Models that were trained here, as models of Hugging Face's transformers.

Importing this module lets AutoConfig, AutoTokenizer, AutoModelForSeq2SeqLM, AutoModelForCausalLM and
AutoModelForMaskedLM read the folders of `moa-fairseq export --transformers`.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationMixin,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
)

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.mixture_tokenizer import MixtureTokenizer
from moa_fairseq.layers.kv_cache import KVCache
from moa_fairseq.layers.losses import BALANCE_LOSSES, OF_ANY_FAMILY, weighted_loss
from moa_fairseq.layers.routing import Routing, RoutingSums
from moa_fairseq.layers.running_statistics import RunningStatistics
from moa_fairseq.layers.transformer import LayerCache, MixtureTransformer, StackSettings

IGNORED = -100  # the label of a position without a loss
# How transformers calls a cache: `cache` from 5.24, `past_key_values` before
_FIELDS = {field.name for field in dataclasses.fields(Seq2SeqLMOutput)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"


class MixtureTransformerConfig(PretrainedConfig):
    """The settings of a model.

    Args:
        encoder_stack, decoder_stack: the fields of `StackSettings`; a model without an encoder is a causal
            language model, one without a decoder a masked one.
        shared_embedding, own_output: as of `MixtureTransformer`.
        label_smoothing: of the loss, fairseq's ε.
        balance_loss, load_balance_coef, z_loss_coef, aux_loss_reduce, aux_loss_scale: the flags of fairseq's
            criterions with routing; coefficients of 0 leave the routers' losses out.
        options: those of transformers.
    """

    model_type = "mixture_transformer"

    def __init__(
        self,
        encoder_stack: dict[str, Any] | None = None,
        decoder_stack: dict[str, Any] | None = None,
        shared_embedding: bool = False,
        own_output: bool = False,
        label_smoothing: float = 0.0,
        balance_loss: str = "moa",
        load_balance_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        aux_loss_reduce: str = "sum",
        aux_loss_scale: str = "sample-size",
        **options: Any,
    ):
        self.encoder_stack = encoder_stack
        self.decoder_stack = decoder_stack
        self.shared_embedding = shared_embedding
        self.own_output = own_output
        self.label_smoothing = label_smoothing
        self.balance_loss = balance_loss
        self.load_balance_coef = load_balance_coef
        self.z_loss_coef = z_loss_coef
        self.aux_loss_reduce = aux_loss_reduce
        self.aux_loss_scale = aux_loss_scale
        stack = decoder_stack or encoder_stack or {}  # transformers makes a config without any values
        self.vocab_size = stack.get("vocab_size", 0)
        self.hidden_size = stack.get("embed_dim", 0)
        self.num_hidden_layers = stack.get("layers", 0)
        self.num_attention_heads = stack.get("attention_heads", 1)
        options.setdefault("is_encoder_decoder", bool(encoder_stack and decoder_stack))
        options["tie_word_embeddings"] = False  # a tied matrix stands in the model once
        super().__init__(**options)


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

    def __bool__(self) -> bool:
        return True

    @property
    def caches(self) -> list[KVCache]:
        """Those of all attentions."""
        return [cache for layer in self.layers for cache in layer.all]

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


class MixtureTransformerModel(PreTrainedModel):
    """What the three kinds of models have in common.

    Args:
        config: with the stacks that the kind has.

    Raises:
        UserError: for a config of another kind.
    """

    config_class = MixtureTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    stacks: tuple[bool, bool]  # whether it has an encoder, and a decoder

    def __init__(self, config: MixtureTransformerConfig):
        super().__init__(config)
        found = config.encoder_stack is not None, config.decoder_stack is not None
        if found != self.stacks:
            kinds = {kind.stacks: auto for auto, kind in _KINDS.items()}
            remedy = f"load it with {kinds[found].__name__}" if found in kinds else "give the config a stack"
            raise UserError(f"This config is not that of a {type(self).__name__}: {remedy}.")
        encoder = None if config.encoder_stack is None else StackSettings(**config.encoder_stack)
        decoder = None if config.decoder_stack is None else StackSettings(**config.decoder_stack)
        self.model: Any = MixtureTransformer(encoder, decoder, config.shared_embedding, config.own_output)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Modules initialise themselves; a buffer that no file has is filled."""
        if isinstance(module, RunningStatistics):
            module.forget()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """As transformers', non-reentrant: else the routers' losses of the first pass have no gradient."""
        kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if kwargs["use_reentrant"]:
            raise UserError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the routers' losses: "
                'set gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of what the model reads first."""
        stack = self.model.decoder if self.model.encoder is None else self.model.source_stack
        return stack.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put other embeddings in their place."""
        stack = self.model.decoder if self.model.encoder is None else self.model.source_stack
        stack.embed_tokens = value

    def _padding(self, ids: Tensor, mask: Tensor | None, stack: Any) -> Tensor | None:
        """[B, T], or [B, S] of a longer mask, True = padding; None where there is none."""
        padding = ids.eq(stack.settings.padding_idx)
        if mask is not None:
            padding = F.pad(padding, (mask.size(1) - ids.size(1), 0)) | mask.eq(0)
        if torch.compiler.is_compiling() or padding.any():
            return padding
        return None

    def _loss(
        self, logits: Tensor, labels: Tensor, routings: tuple[Routing, ...], items: Any = None
    ) -> Tensor:
        """fairseq's criterion: cross entropy, and in training the routers' losses, per label.

        Args:
            logits: [B, T, V].
            labels: [B, T], IGNORED where there is no loss.
            routings: of the pass.
            items: how many labels the update has, if it has more than this pass.
        """
        config = self.config
        size = logits.size(-1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        # fairseq spreads ε over the other V − 1 words, torch over all V
        loss = F.cross_entropy(
            wide.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=config.label_smoothing * size / (size - 1),
            reduction="sum",
        )
        count = labels.ne(IGNORED).sum()
        if self.training and routings and (config.load_balance_coef or config.z_loss_coef):
            kinds = RoutingSums.by_kind(list(routings))
            balance = [BALANCE_LOSSES[config.balance_loss](sums) for sums in kinds]
            z = [OF_ANY_FAMILY["z_loss"](sums) for sums in kinds]
            weights = config.load_balance_coef, config.z_loss_coef
            term = weighted_loss(kinds, balance, z, *weights, config.aux_loss_reduce)
            loss = loss + term * (count if config.aux_loss_scale == "sample-size" else 1)
        return loss / (count if items is None else items)


class _Generates(MixtureTransformerModel, GenerationMixin):
    """What translation and causal language models have in common."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any) -> None:
        name = generation_config.cache_implementation
        if name is not None:
            raise UserError(f"cache_implementation={name!r}: these models have a cache of their own only.")
        if generation_config.use_cache and model_kwargs.get(CACHE) is None:
            beam = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs[CACHE] = GenerationCache(self.model.decoder.new_caches(beam))

    def _supports_default_dynamic_cache(self) -> bool:
        return False

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        found = super()._get_logits_processor(generation_config, *args, **kwargs)
        end = generation_config.eos_token_id
        if self.config.is_encoder_decoder and isinstance(end, int) and generation_config.max_length:
            found.append(ForcedEnd(generation_config.max_length, end))
        return found

    def _reorder_cache(self, cache: GenerationCache, beam_idx: Tensor) -> GenerationCache:
        cache.reorder_cache(beam_idx)
        return cache


class _EncoderCall:
    """The encoder as `generate` calls it."""

    main_input_name = "input_ids"

    def __init__(self, model: "MixtureTransformerForConditionalGeneration"):
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        """The encoder's output [B, S, C]."""
        memory, _ = self.model.encode(input_ids, attention_mask)
        return BaseModelOutput(last_hidden_state=memory)

    __call__ = forward


class MixtureTransformerForConditionalGeneration(_Generates):
    """A translation model."""

    stacks = (True, True)

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder, as `generate` calls it."""
        return _EncoderCall(self)

    def encode(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, tuple[Routing, ...]]:
        """The encoder's output [B, S, C] and routings.

        Args:
            ids: [B, S].
            attention_mask: [B, S], 0 = padding.
        """
        stack = self.model.source_stack
        return stack(ids, self._padding(ids, attention_mask, stack))

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads: the labels one later, after the end; padding where no label is."""
        start = self.config.decoder_start_token_id
        ids = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
        return ids.masked_fill(labels.eq(IGNORED), self.config.pad_token_id)

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        decoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The ids whose keys the cache lacks."""
        cache = kwargs.get(CACHE)
        held = 0 if cache is None else cache.get_seq_length()
        return {
            "decoder_input_ids": decoder_input_ids[:, held:],
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            CACHE: cache,
        }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        labels: Tensor | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids, attention_mask: of the source, [B, S].
            decoder_input_ids, decoder_attention_mask: of the target [B, T], the mask of all positions so far;
                by default made of the labels.
            encoder_outputs: in place of input_ids.
            labels: [B, T], -100 where there is no loss.
            cache, past_key_values: of `generate`, by the name of this transformers' version.
            use_cache: not read: `generate` makes the cache.
            return_dict: False: a tuple.
            num_items_in_batch: how many labels an update has, of Trainer.
            kwargs: not read.

        Returns:
            Seq2SeqLMOutput with the logits [B, T, V].
        """
        cache = past_key_values if cache is None else cache
        routings: tuple[Routing, ...] = ()
        if encoder_outputs is None:
            assert input_ids is not None
            memory, routings = self.encode(input_ids, attention_mask)
        else:
            memory = encoder_outputs[0]
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        attended: Tensor | None = memory
        padding = None
        if cache is not None and cache.get_seq_length():
            attended = None  # its keys are there
        elif input_ids is not None:
            padding = self._padding(input_ids, attention_mask, self.model.source_stack)
        elif attention_mask is not None and not attention_mask.all():
            padding = attention_mask.eq(0)
        beam = 1 if cache is None else cache.layers[0].all[-1].beam_size
        if beam > 1 and attended is not None:  # the hypotheses of a sentence share its keys
            attended = attended[::beam]
            padding = padding if padding is None else padding[::beam]
        assert decoder_input_ids is not None
        decoder_padding = self._padding(decoder_input_ids, decoder_attention_mask, self.model.decoder)
        logits, routed = self.model.decode(
            decoder_input_ids, decoder_padding, attended, padding, cache and cache.layers
        )
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, routings + routed, num_items_in_batch)
        out = Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=memory, **{CACHE: cache})
        return out.to_tuple() if return_dict is False else out


class MixtureTransformerForCausalLM(_Generates):
    """A causal language model."""

    stacks = (False, True)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The ids whose keys the cache lacks."""
        cache = kwargs.get(CACHE)
        held = 0 if cache is None else cache.get_seq_length()
        return {"input_ids": input_ids[:, held:], "attention_mask": attention_mask, CACHE: cache}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        cache: GenerationCache | None = None,
        past_key_values: GenerationCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], with a cache [B, S] of all positions so far; 0 = padding.
            labels: [B, T], the input_ids themselves; the loss is that of the next one. -100: no loss.
            shift_labels: [B, T], in place of labels: what follows each of the input_ids, as fairseq has it.
            cache, past_key_values, use_cache, return_dict, num_items_in_batch, kwargs: as of
                `MixtureTransformerForConditionalGeneration.forward`.

        Returns:
            CausalLMOutputWithPast with the logits [B, T, V].
        """
        cache = past_key_values if cache is None else cache
        padding = self._padding(input_ids, attention_mask, self.model.decoder)
        logits, routings = self.model.decode(input_ids, padding, caches=cache and cache.layers)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        loss = None
        if shift_labels is not None:
            loss = self._loss(logits, shift_labels, routings, num_items_in_batch)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return out.to_tuple() if return_dict is False else out


class MixtureTransformerForMaskedLM(MixtureTransformerModel):
    """A masked language model."""

    stacks = (True, False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 = padding.
            labels: [B, T], -100 where there is no loss.
            return_dict, num_items_in_batch, kwargs: as of
                `MixtureTransformerForConditionalGeneration.forward`.

        Returns:
            MaskedLMOutput with the logits [B, T, V].
        """
        padding = self._padding(input_ids, attention_mask, self.model.source_stack)
        logits, routings = self.model(input_ids, padding=padding)
        loss = None if labels is None else self._loss(logits, labels, routings, num_items_in_batch)
        out = MaskedLMOutput(loss=loss, logits=logits)
        return out.to_tuple() if return_dict is False else out


_KINDS: dict[Any, type[MixtureTransformerModel]] = {
    AutoModelForSeq2SeqLM: MixtureTransformerForConditionalGeneration,
    AutoModelForCausalLM: MixtureTransformerForCausalLM,
    AutoModelForMaskedLM: MixtureTransformerForMaskedLM,
}
AutoConfig.register(MixtureTransformerConfig.model_type, MixtureTransformerConfig, exist_ok=True)
AutoTokenizer.register(MixtureTransformerConfig, slow_tokenizer_class=MixtureTokenizer, exist_ok=True)
for _auto, _kind in _KINDS.items():
    _auto.register(MixtureTransformerConfig, _kind, exist_ok=True)
