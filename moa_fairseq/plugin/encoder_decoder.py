"""fairseq's encoder and decoder with another attention, through their `build_*` hooks."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout, LayerDropModuleList
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.initialization import forked_rng
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.layers.transformer_layer import Shortcut, swiglu
from moa_fairseq.plugin.carried_context import CarriedContext
from moa_fairseq.plugin.families import build_attention, build_sigma_moe, initialize
from moa_fairseq.plugin.forward_context import ForwardContext, current_context, forward_context, restored
from moa_fairseq.plugin.patches import host_tokens

logger = logging.getLogger(__name__)
_DRAWN_BY_DEPTH = 4  # a decoder's `version` with --initialization depth-scaled; fairseq's own is 3
_BEAM = "beam"  # a key of an encoder's output: [a tensor with a row for each hypothesis of a sentence]


if TYPE_CHECKING:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Extended
else:
    Extended = object


def use_rms_norms(module: nn.Module, cfg: Any) -> None:
    """--rms-norm: put RMSNorm (arXiv 1910.07467) in the place of the layer norms of `module` itself."""
    if not getattr(cfg, "rms_norm", False):
        return
    norms: list[tuple[str, Any]] = list(module.named_children())
    for name, norm in norms:
        if name.endswith("layer_norm"):  # torch's, or apex's
            setattr(module, name, nn.RMSNorm(norm.normalized_shape, eps=norm.eps))


class MixtureFeedForward(Extended):
    """A layer whose feed-forward may be gated, or a mixture of experts. Precedes a layer of fairseq's.

    shortcuts: its residual sums in their order, where they have ω of their own (`_finish_layer` sets them).
    A mixture takes the place of fc1; fc2, and what fairseq's layer does between the two, then do nothing.
    A gated feed-forward has an fc1 of twice the width, whose halves the activation multiplies, and no biases.
    """

    activation_fn: Any

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        if not hasattr(self, "shortcuts"):
            return super().residual_connection(x, residual)
        context = current_context()
        context.residual_sums += 1
        return self.shortcuts[context.residual_sums - 1](x, residual)

    def compiled(self, run: Callable[..., Any], mask: Any, x: Tensor, options: dict[str, Any]) -> Any:
        """This layer's forward by the compiled `whole`.

        Args:
            run: called with a layer, a context, x and options; calls the layer's `whole` with the rest.
            mask: that of the self-attention as the decoder made it, which options have in another layout.
            x: [T, B, C].
            options: what `forward` takes beside x, by name.

        Returns:
            What `forward` returns.
        """
        context = current_context()
        is_causal = mask is not None and mask is context.causal_mask
        # whether there is padding would make two graphs, and a mask costs little in one
        layer_context = dataclasses.replace(
            context,
            causal_mask=options["self_attn_mask"] if is_causal else None,
            unpadded=False,
            makes_mask=False,
            chunk=None,
            residual_sums=0,
            routings=(),
        )
        out, routings = run(self, layer_context, x, options)
        for module, routing in routings:
            context.record(module, routing)
        return out

    def whole(self, context: ForwardContext, x: Tensor, **options: Any) -> Any:
        """The layer's `forward` with nothing but what is given.

        Args:
            context: in place of the thread's; its `routings` get nothing.
            x: [T, B, C].
            options: what `forward` takes beside x, by name.

        Returns:
            The output of `forward`, and a list of (module, routing).
        """
        routings: list[Any] = []
        with forward_context(**(vars(context) | {"routings": (routings,)})):
            out = type(self).forward(self, x, **options)
        return out, routings

    @forked_rng()
    def build_fc1(self, input_dim: int, output_dim: int, *quant_noise: Any) -> nn.Module:
        """fairseq's hook: the first matrix of the feed-forward, or the mixture in its place.

        Raises:
            UserError: for sigma-MoE with a gated feed-forward or --scale-fc, and its impossible sizes.
        """
        mixture = build_sigma_moe(self.mixture_cfg, input_dim, self.activation_fn)
        if getattr(self.mixture_cfg, "gated_feed_forward", False):
            if mixture is not None:
                raise UserError(
                    "--gated-feed-forward and --sigma-moe-num-experts both replace the feed-forward: leave "
                    "one of the two out."
                )
            self.activation_fn = swiglu
            return nn.Linear(input_dim, 2 * output_dim, bias=False)
        if mixture is None:
            return super().build_fc1(input_dim, output_dim, *quant_noise)
        if getattr(self, "ffn_layernorm", None) is not None:
            raise UserError(
                "--scale-fc normalises the feed-forward block that --sigma-moe-num-experts replaces: leave "
                "one of the two out."
            )
        self.activation_fn = nn.Identity()
        self.activation_dropout_module = nn.Identity()
        return mixture

    @forked_rng()
    def build_fc2(self, input_dim: int, output_dim: int, *quant_noise: Any) -> nn.Module:
        if isinstance(self.fc1, SigmaMoE):
            return nn.Identity()
        if self.activation_fn is swiglu:
            return nn.Linear(input_dim, output_dim, bias=False)
        return super().build_fc2(input_dim, output_dim, *quant_noise)


class MixtureEncoderLayer(MixtureFeedForward, TransformerEncoderLayerBase):
    """An encoder layer whose self-attention is a mixture."""

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        self.mixture_cfg = cfg  # fairseq builds the feed-forward later, and without it
        return build_attention(cfg, embed_dim, self_attention=True)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None):
        with forward_context(padding=encoder_padding_mask, residual_sums=0):
            return super().forward(x, encoder_padding_mask, attn_mask)


class MixtureDecoderLayer(MixtureFeedForward, TransformerDecoderLayerBase):
    """A decoder layer whose self- and cross-attention are mixtures."""

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        self.mixture_cfg = cfg
        return build_attention(cfg, embed_dim, decoder=True, self_attention=not cfg.cross_self_attention)

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        return build_attention(
            cfg,
            embed_dim,
            decoder=True,
            encoder_decoder_attention=True,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
        )

    def forward(
        self,
        x: Tensor,
        *args: Any,
        self_attn_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        **kwargs: Any,
    ):
        """As fairseq's, with one argument more.

        Args:
            context: this layer's inputs before x, to which its self-attention attends, too, [M, B, C].
        """
        # with cross-self-attention fairseq appends the source's mask to it
        if current_context().unpadded and not self.cross_self_attention:
            self_attn_padding_mask = None
        if context is not None and self.normalize_before:
            context = self.self_attn_layer_norm(context)
        # The queries of the cross-attention are the target's: fairseq does not pass their padding on.
        with forward_context(padding=self_attn_padding_mask, carried=context, residual_sums=0):
            return super().forward(x, *args, self_attn_padding_mask=self_attn_padding_mask, **kwargs)


def _same_context() -> tuple[Any, Any]:
    """Contexts of a checkpointed layer's two runs: the second has no encoder or decoder around it."""
    return contextlib.nullcontext(), restored(current_context())


def _finish_layer(layer: nn.Module, cfg: Any, layers: int) -> nn.Module:
    """--initialization, activation checkpointing and FSDP; the latter as fairseq's `build_*_layer` adds them.

    Checkpointing is torch's non-reentrant one: fairseq's runs the first forward pass without a graph,
    and the auxiliary losses of that pass would reach no router.
    """
    use_rms_norms(layer, cfg)
    initialize(layer, cfg, layers)
    if getattr(cfg, "initialization", None) == "admin":
        norms: list[Any] = [norm for name, norm in layer.named_children() if name.endswith("layer_norm")]
        layer.shortcuts = nn.ModuleList(Shortcut(norm.normalized_shape[0]) for norm in norms)
    if cfg.checkpoint_activations:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint,
            layer.forward,
            use_reentrant=False,
            context_fn=_same_context,
        )
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class MixtureEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder over `MixtureEncoderLayer`s."""

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Any]]:
        """As fairseq's, without its question to the device in every layer: is there padding?

        Where nothing is, "encoder_padding_mask" is empty, which means None to fairseq: no cross-attention
        has to ask again.
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
                if isinstance(layer_output, tuple):
                    x, fc_result = layer_output
                else:
                    x = layer_output
                    fc_result = None
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
        return _finish_layer(MixtureEncoderLayer(cfg, return_fc=self.return_fc), cfg, cfg.encoder.layers)

    def reorder_encoder_out(
        self, encoder_out: dict[str, list[Tensor]], new_order: Tensor
    ) -> dict[str, list[Tensor]]:
        """fairseq's; notes in the output when the order repeats every sentence for the hypotheses of a beam.

        fairseq's generator does not tell the model the size of the beam; only this order shows it. Later
        orders exchange the hypotheses of a sentence, which read the same: on a CPU, where asking costs no
        wait, nothing is copied then.
        """
        rows = encoder_out["encoder_out"][0].size(1)
        has_beam = _BEAM in encoder_out
        beam = encoder_out[_BEAM][0].size(0) if has_beam else new_order.numel() // max(rows, 1)
        if beam < 2 or (has_beam and new_order.is_cuda):
            return super().reorder_encoder_out(encoder_out, new_order)
        numbers = torch.arange(new_order.numel(), device=new_order.device)
        if not has_beam:
            result = super().reorder_encoder_out(encoder_out, new_order)
            is_beam = torch.equal(new_order, numbers // beam) and new_order.numel() == rows * beam
            if is_beam:
                return result | {_BEAM: [new_order.new_empty(beam, 0)]}
            return result
        sentence = new_order // beam
        if new_order.numel() == rows and torch.equal(sentence, numbers // beam):
            return encoder_out
        result = super().reorder_encoder_out(encoder_out, new_order)
        # a sentence that is finished leaves with all of its hypotheses
        together = new_order.numel() % beam == 0 and torch.equal(sentence, sentence[numbers // beam * beam])
        if together:
            return result | {_BEAM: encoder_out[_BEAM]}
        return result


class MixtureDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder over `MixtureDecoderLayer`s."""

    context: CarriedContext | None = None
    _cross_self_attention: bool

    @property
    def cross_self_attention(self) -> bool:
        """--cross-self-attention, or a pass in which fairseq shall make a padding mask as for that."""
        return self._cross_self_attention or current_context().makes_mask

    @cross_self_attention.setter
    def cross_self_attention(self, value: bool) -> None:
        self._cross_self_attention = value

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        use_rms_norms(self, cfg)
        dropout = getattr(cfg, "output_dropout", None) or 0.0
        self.output_dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        self._draws_by_depth = getattr(cfg, "initialization", None) == "depth-scaled"
        if self._draws_by_depth:
            self.version.fill_(_DRAWN_BY_DEPTH)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        """fairseq's; weights trained before architectures left --no-scale-embedding compute as they did."""
        version = state_dict.get(f"{name}.version")
        if self._draws_by_depth and version is not None and version.item() < _DRAWN_BY_DEPTH:
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
        """Attend to the last `chunks` chunks as well, whenever `forward` is given the number of a chunk.

        Args:
            chunks: how many; 0: none.

        Raises:
            UserError: if positions are embeddings, which begin anew with each chunk, or layers are dropped.
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
        """As fairseq's, with two arguments more, which do nothing before `carry_context`.

        Args:
            chunk: number of this chunk [B, T] of B texts that are read in order; None: nothing is carried.
            part: number of these texts among the groups of texts that take turns.
        """
        if chunk is None or self.context is None:
            return super().forward(prev_output_tokens, *args, **kwargs)
        with self.context.reading(chunk, self.training, prev_output_tokens.size(0), part):
            return super().forward(prev_output_tokens, *args, **kwargs)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        mask: Tensor = super().buffered_future_mask(tensor)
        while mask.size(0) < tensor.size(0):  # another thread has put a smaller one in its place
            mask = super().buffered_future_mask(tensor)
        current_context().causal_mask = mask
        return mask

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict[str, Any] | None = None,
        *args,
        **kwargs,
    ):
        beam = encoder_out[_BEAM][0].size(0) if encoder_out and _BEAM in encoder_out else 1
        changes: dict[str, Any] = {"beam_size": beam, "token_ids": prev_output_tokens}
        is_full_pass = incremental_state is None
        if is_full_pass and prev_output_tokens.is_cuda:  # on a CPU nothing reads it
            changes["right_padded"] = host_tokens.is_right_padded(prev_output_tokens, self.padding_idx)
        if is_full_pass and host_tokens.on_host(prev_output_tokens) is not None:
            changes["unpadded"] = not host_tokens.is_padded(prev_output_tokens, self.padding_idx)
            changes["makes_mask"] = True  # fairseq asks nothing of the device then
        with forward_context(**changes):
            return super().extract_features(
                prev_output_tokens, encoder_out, incremental_state, *args, **kwargs
            )

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _finish_layer(MixtureDecoderLayer(cfg, no_encoder_attn), cfg, cfg.decoder.layers)
