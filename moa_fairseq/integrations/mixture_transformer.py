"""Exported models, for Hugging Face's transformers.

After an import of this module, AutoConfig, AutoTokenizer, AutoModelForSeq2SeqLM, AutoModelForCausalLM and
AutoModelForMaskedLM read the folders of `moa-fairseq export --transformers`.
"""

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
    PretrainedConfig,
    PreTrainedModel,
)

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.mixture_generation import (
    CACHE,
    EncoderCall,
    GenerationCache,
    MixtureGenerationMixin,
    MixtureOutput,
    cache_of,
    new_ids,
)
from moa_fairseq.integrations.mixture_tokenizer import MixtureTokenizer
from moa_fairseq.layers.losses import BALANCE_LOSSES, OF_ANY_FAMILY, weighted_loss
from moa_fairseq.layers.routing import Routing, RoutingSums
from moa_fairseq.layers.running_statistics import RunningStatistics
from moa_fairseq.layers.transformer import MixtureTransformer
from moa_fairseq.layers.transformer_layer import StackSettings

IGNORED = -100  # the label of a position without a loss


class MixtureTransformerConfig(PretrainedConfig):
    """The settings of a model.

    Args:
        encoder_stack, decoder_stack: the fields of `StackSettings`; a model without an encoder is a causal
            language model, a model without a decoder a masked language model.
        shared_embedding, own_output: those of `MixtureTransformer`.
        label_smoothing: ε of the loss, as in fairseq.
        balance_loss, load_balance_coef, z_loss_coef, aux_loss_reduce, aux_loss_scale: the flags of the
            plugin's criterions; with coefficients of 0 there are no auxiliary losses.
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
        # transformers also makes configs without arguments
        stack = decoder_stack or encoder_stack or {}
        self.vocab_size = stack.get("vocab_size", 0)
        self.hidden_size = stack.get("embed_dim", 0)
        self.num_hidden_layers = stack.get("layers", 0)
        self.num_attention_heads = stack.get("attention_heads", 1)
        options.setdefault("is_encoder_decoder", bool(encoder_stack and decoder_stack))
        options["tie_word_embeddings"] = False  # a tied matrix exists once in the model
        super().__init__(**options)


class MixtureTransformerModel(PreTrainedModel):
    """The base of the three kinds of models.

    Args:
        config: a config with the stacks of this kind.

    Raises:
        UserError: for a config of another kind.
    """

    config_class = MixtureTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True  # the cache cannot go back, so no assistant model may draft
    stacks: tuple[bool, bool]  # whether the kind has an encoder, and a decoder

    def __init__(self, config: MixtureTransformerConfig):
        super().__init__(config)
        stacks = config.encoder_stack is not None, config.decoder_stack is not None
        if stacks != self.stacks:
            kinds = {kind.stacks: auto for auto, kind in _KINDS.items()}
            remedy = (
                f"load it with {kinds[stacks].__name__}"
                if stacks in kinds
                else "give the config a stack"
            )
            raise UserError(f"This config is not that of a {type(self).__name__}: {remedy}.")
        encoder = None if config.encoder_stack is None else StackSettings(**config.encoder_stack)
        decoder = None if config.decoder_stack is None else StackSettings(**config.decoder_stack)
        self.model: Any = MixtureTransformer(
            encoder, decoder, config.shared_embedding, config.own_output
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Fill a buffer that is in no file; modules have initialised all other tensors."""
        if isinstance(module, RunningStatistics) and getattr(module, "pending", None) is not None:
            module.forget()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Enable gradient checkpointing, non-reentrant: otherwise auxiliary losses would have no gradient."""
        kwargs = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if kwargs["use_reentrant"]:
            raise UserError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the routers' losses: "
                'set gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of the encoder, or of a decoder alone."""
        stack = self.model.decoder if self.model.encoder is None else self.model.source_stack
        return stack.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embeddings of the encoder, or of a decoder alone."""
        stack = self.model.decoder if self.model.encoder is None else self.model.source_stack
        stack.embed_tokens = value

    def _padding(self, ids: Tensor, mask: Tensor | None, stack: Any) -> Tensor | None:
        """The padding [B, T], or [B, S] if the mask is longer, True = padding; None: no padding."""
        padding = ids.eq(stack.settings.padding_idx)
        if mask is not None:
            padding = F.pad(padding, (mask.size(1) - ids.size(1), 0)) | mask.eq(0)
        if torch.compiler.is_compiling() or padding.any():
            return padding
        return None

    def _loss(
        self, logits: Tensor, labels: Tensor, routings: tuple[Routing, ...], items: Any = None
    ) -> Tensor:
        """The plugin's criterion for each label: cross entropy, and in training auxiliary losses.

        Args:
            logits: [B, T, V].
            labels: [B, T]; a position with the label IGNORED has no loss.
            routings: the routings of the pass.
            items: the number of labels in the update; None: in this pass.
        """
        config = self.config
        size = logits.size(-1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        # fairseq distributes ε over the other V − 1 words, torch over all V words
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

    def _output(
        self,
        logits: Tensor,
        labels: Tensor | None,
        routings: tuple[Routing, ...],
        parts: dict[str, Any],
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        """The output of a forward pass.

        Args:
            logits, labels, routings: those of `_loss`; without labels there is no loss.
            parts: further fields of the output.
            return_dict: False: the output is a tuple.
            num_items_in_batch: the number of labels in an update, which Trainer passes.
            others: not used.
        """
        loss = None if labels is None else self._loss(logits, labels, routings, num_items_in_batch)
        out = MixtureOutput(loss=loss, logits=logits, **parts)
        return out.to_tuple() if return_dict is False else out


class MixtureTransformerForConditionalGeneration(MixtureTransformerModel, MixtureGenerationMixin):
    """A translation model."""

    stacks = (True, True)

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder, in the form in which `generate` calls it."""
        return EncoderCall(self)

    def encode(
        self, ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, tuple[Routing, ...]]:
        """Run the encoder. Returns its output [B, S, C] and routings.

        Args:
            ids: [B, S].
            attention_mask: [B, S], 0 = padding.
        """
        stack = self.model.source_stack
        return stack(ids, self._padding(ids, attention_mask, stack))

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's inputs: the start symbol, then the labels but the last; padding for ignored ones."""
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
        """The inputs of the next pass: the ids whose keys the cache lacks."""
        cache = cache_of(kwargs)
        return {
            "decoder_input_ids": new_ids(decoder_input_ids, cache),
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
        **kwargs: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids, attention_mask: the ids and mask of the source, [B, S].
            decoder_input_ids, decoder_attention_mask: the ids of the target, [B, T], by default made from the
                labels, and the mask of all positions so far.
            encoder_outputs: the output of the encoder, in place of input_ids.
            labels: [B, T]; a position with the label -100 has no loss.
            kwargs: those of `_output`, and the cache of `generate` as cache or past_key_values, depending on
                the version of transformers. Others are not used.

        Returns:
            MixtureOutput with the logits [B, T, V].
        """
        cache = cache_of(kwargs)
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
            attended = None  # the cache has its keys
        elif input_ids is not None:
            padding = self._padding(input_ids, attention_mask, self.model.source_stack)
        elif attention_mask is not None and not attention_mask.all():
            padding = attention_mask.eq(0)
        else:
            padding = getattr(encoder_outputs, "padding", None)
        beam = 1 if cache is None else cache.layers[0].all[-1].beam_size
        if beam > 1 and attended is not None:  # the hypotheses of a sentence share keys
            attended = attended[::beam]
            padding = padding if padding is None else padding[::beam]
        assert decoder_input_ids is not None
        logits, routed = self._decode(
            decoder_input_ids, decoder_attention_mask, cache, attended, padding
        )
        parts = {CACHE: cache, "encoder_last_hidden_state": memory}
        return self._output(logits, labels, routings + routed, parts, **kwargs)


class MixtureTransformerForCausalLM(MixtureTransformerModel, MixtureGenerationMixin):
    """A causal language model."""

    stacks = (False, True)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The inputs of the next pass: the ids whose keys the cache lacks."""
        cache = cache_of(kwargs)
        return {
            "input_ids": new_ids(input_ids, cache),
            "attention_mask": attention_mask,
            CACHE: cache,
        }

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], with a cache [B, S] for all positions so far; 0 = padding.
            labels: [B, T], the same as input_ids; each position predicts the next label. -100: no loss.
            shift_labels: [B, T], in place of labels: the label that each position predicts, as in fairseq.
            kwargs: those of `MixtureTransformerForConditionalGeneration.forward`.

        Returns:
            MixtureOutput with the logits [B, T, V].
        """
        cache = cache_of(kwargs)
        if cache is None and kwargs.get("use_cache"):
            cache = GenerationCache(self.model.decoder.new_caches())
        logits, routings = self._decode(input_ids, attention_mask, cache)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return self._output(logits, shift_labels, routings, {CACHE: cache}, **kwargs)


class MixtureTransformerForMaskedLM(MixtureTransformerModel):
    """A masked language model."""

    stacks = (True, False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 = padding.
            labels: [B, T]; a position with the label -100 has no loss.
            kwargs: those of `_output`; others are not used.

        Returns:
            MixtureOutput with the logits [B, T, V].
        """
        padding = self._padding(input_ids, attention_mask, self.model.source_stack)
        logits, routings = self.model(input_ids, padding=padding)
        return self._output(logits, labels, routings, {}, **kwargs)


_KINDS: dict[Any, type[MixtureTransformerModel]] = {
    AutoModelForSeq2SeqLM: MixtureTransformerForConditionalGeneration,
    AutoModelForCausalLM: MixtureTransformerForCausalLM,
    AutoModelForMaskedLM: MixtureTransformerForMaskedLM,
}
AutoConfig.register(MixtureTransformerConfig.model_type, MixtureTransformerConfig, exist_ok=True)
AutoTokenizer.register(
    MixtureTransformerConfig, slow_tokenizer_class=MixtureTokenizer, exist_ok=True
)
for _auto, _kind in _KINDS.items():
    _auto.register(MixtureTransformerConfig, _kind, exist_ok=True)
