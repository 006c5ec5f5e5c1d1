"""fairseq's encoder and decoder over the layers of `transformer_layers`."""

import logging
import math
from typing import Any

import torch
import torch.utils.checkpoint
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout, LayerDropModuleList
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.carried_context import CarriedContext
from moa_fairseq.plugin.forward_context import current_context, forward_context
from moa_fairseq.plugin.patches import host_tokens
from moa_fairseq.plugin.transformer_layers import (
    MixtureDecoderLayer,
    MixtureEncoderLayer,
    finish_layer,
    use_rms_norms,
)

logger = logging.getLogger(__name__)
# A decoder's `version` with --initialization depth-scaled; fairseq's own is 3.
_DEPTH_SCALED_VERSION = 4
# A key of an encoder's output: the size of the beam that shares each row, as the tensor [beam, 0], because
# fairseq keeps nothing but tensors there.
_BEAM = "beam"


class MixtureEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder over `MixtureEncoderLayer`s."""

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Any]]:
        """fairseq's `forward`, in which no layer waits for the device to learn whether there is padding.

        If there is no padding, "encoder_padding_mask" is empty, which means None to fairseq: no
        cross-attention has to ask again.
        """
        padding = src_tokens.eq(self.padding_idx)
        is_padded = host_tokens.is_padded(src_tokens, self.padding_idx)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if is_padded:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        x = x.transpose(0, 1)  # [B, T, C] → [T, B, C]
        states = [x] if return_all_hiddens else []
        fc_results = []
        with forward_context(token_ids=src_tokens):
            for layer in self.layers:
                layer_output = layer(x, encoder_padding_mask=padding if is_padded else None)
                is_pair = isinstance(layer_output, tuple)
                x, fc_result = layer_output if is_pair else (layer_output, None)
                if return_all_hiddens:
                    states.append(x)
                    fc_results.append(fc_result)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        lengths = padding.size(1) - padding.sum(dim=1, dtype=torch.int32)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding] if is_padded else [],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": fc_results,
            "src_tokens": [],
            "src_lengths": [lengths.reshape(-1, 1)],
        }

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return finish_layer(
            MixtureEncoderLayer(cfg, return_fc=self.return_fc), cfg, cfg.encoder.layers
        )

    def reorder_encoder_out(
        self, encoder_out: dict[str, list[Tensor]], new_order: Tensor
    ) -> dict[str, list[Tensor]]:
        """Reorder the output, and note the size of a beam in it when the order repeats every sentence.

        fairseq's generator does not tell the model the size of the beam; only this order shows it. Later
        orders exchange the hypotheses of a sentence, which all read the same rows: on a CPU, where a look at
        the order costs no wait, nothing is copied then.
        """
        if _BEAM in encoder_out and new_order.is_cuda:
            return super().reorder_encoder_out(encoder_out, new_order)
        rows = torch.arange(encoder_out["encoder_out"][0].size(1), device=new_order.device)
        if _BEAM not in encoder_out:
            result = super().reorder_encoder_out(encoder_out, new_order)
            beam = new_order.numel() // max(rows.numel(), 1)
            if beam > 1 and torch.equal(new_order, rows.repeat_interleave(beam)):
                result[_BEAM] = [new_order.new_empty(beam, 0)]
            return result
        beam = encoder_out[_BEAM][0].size(0)
        sentences = new_order // beam
        if torch.equal(sentences, rows // beam):
            return encoder_out
        result = super().reorder_encoder_out(encoder_out, new_order)
        # When a sentence is finished, all of its hypotheses leave the batch together.
        if torch.equal(sentences, sentences[::beam].repeat_interleave(beam)):
            result[_BEAM] = encoder_out[_BEAM]
        return result


class MixtureDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder over `MixtureDecoderLayer`s."""

    context: CarriedContext | None = None
    _cross_self_attention: bool

    @property
    def cross_self_attention(self) -> bool:
        """--cross-self-attention, or True in a pass with `makes_mask`.

        fairseq's decoder makes a padding mask if this is True, and otherwise asks the device for padding.
        """
        return self._cross_self_attention or current_context().makes_mask

    @cross_self_attention.setter
    def cross_self_attention(self, value: bool) -> None:
        self._cross_self_attention = value

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        use_rms_norms(self, cfg)
        dropout = getattr(cfg, "output_dropout", None) or 0.0
        self.output_dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        self._is_depth_scaled = getattr(cfg, "initialization", None) == "depth-scaled"
        if self._is_depth_scaled:
            self.version.fill_(_DEPTH_SCALED_VERSION)

    def upgrade_state_dict_named(
        self, state_dict: dict[str, Tensor], name: str
    ) -> dict[str, Tensor]:
        """fairseq's hook; weights from before architectures set --no-scale-embedding keep their old scale."""
        version = state_dict.get(f"{name}.version")
        if self._is_depth_scaled and version is not None and version.item() < _DEPTH_SCALED_VERSION:
            self.embed_scale = math.sqrt(self.embed_dim)
            logger.warning(
                "The model of these weights scaled its embeddings %.1f times more than this architecture "
                "does now: the old scale is kept.",
                self.embed_scale,
            )
        return super().upgrade_state_dict_named(state_dict, name)

    def output_layer(self, features: Tensor) -> Tensor:
        return super().output_layer(self.output_dropout_module(features))

    def carry_context(self, chunks: int) -> None:
        """Attend to earlier chunks as well, whenever `forward` is given the number of a chunk.

        Args:
            chunks: the number of earlier chunks; 0 switches this off.

        Raises:
            UserError: if positions are embeddings, which start again in each chunk, or layers are dropped.
        """
        if chunks and self.embed_positions is not None:
            raise UserError(
                "--carried-chunks needs relative positions: give --positions xl or --positions rope."
            )
        if chunks and isinstance(self.layers, LayerDropModuleList):
            raise UserError(
                "--carried-chunks keeps a context for each layer, but --decoder-layerdrop skips layers "
                "at random: leave one of the two flags out."
            )
        self.context = CarriedContext(self.layers, chunks) if chunks else None

    def forward(
        self,
        prev_output_tokens: Tensor,
        *args: Any,
        chunk: int | None = None,
        part: int = 0,
        **kwargs: Any,
    ):
        """fairseq's `forward` with two more arguments, which have no effect before `carry_context`.

        Args:
            chunk: the number of this chunk, [B, T], of B texts that are read in order; with None no context
                is carried.
            part: the number of this group of texts, among the groups that take turns.
        """
        if chunk is None or self.context is None:
            return super().forward(prev_output_tokens, *args, **kwargs)
        with self.context.reading(chunk, self.training, prev_output_tokens.size(0), part):
            return super().forward(prev_output_tokens, *args, **kwargs)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        mask: Tensor = super().buffered_future_mask(tensor)
        while mask.size(0) < tensor.size(0):  # another thread has stored a smaller mask meanwhile
            mask = super().buffered_future_mask(tensor)
        current_context().causal_mask = mask
        return mask

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ):
        beam = encoder_out[_BEAM][0].size(0) if encoder_out and _BEAM in encoder_out else 1
        changes: dict[str, Any] = {"beam_size": beam, "token_ids": prev_output_tokens}
        if incremental_state is None:
            if prev_output_tokens.is_cuda:  # on a CPU nothing reads `right_padded`
                changes["right_padded"] = host_tokens.is_right_padded(
                    prev_output_tokens, self.padding_idx
                )
            if host_tokens.on_host(prev_output_tokens) is not None:
                is_padded = host_tokens.is_padded(prev_output_tokens, self.padding_idx)
                changes |= {"unpadded": not is_padded, "makes_mask": True}
        with forward_context(**changes):
            return super().extract_features(
                prev_output_tokens, encoder_out, incremental_state, *args, **kwargs
            )

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return finish_layer(MixtureDecoderLayer(cfg, no_encoder_attn), cfg, cfg.decoder.layers)
