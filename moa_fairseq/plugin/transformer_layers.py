"""fairseq's encoder and decoder layers with another attention, through their `build_*` hooks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from fairseq.distributed import fsdp_wrap
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.initialization import forked_rng
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.layers.transformer_layer import Shortcut, swiglu
from moa_fairseq.plugin.families import build_attention, build_sigma_moe, initialize
from moa_fairseq.plugin.forward_context import (
    ForwardContext,
    current_context,
    forward_context,
    restored,
)

if TYPE_CHECKING:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as FairseqLayer
else:
    FairseqLayer = object


def use_rms_norms(module: nn.Module, cfg: Any) -> None:
    """--rms-norm: put RMSNorm (arXiv 1910.07467) in the place of the layer norms of `module` itself."""
    if not getattr(cfg, "rms_norm", False):
        return
    norms: list[tuple[str, Any]] = list(module.named_children())
    for name, norm in norms:
        if name.endswith("layer_norm"):  # torch's, or apex's
            setattr(module, name, nn.RMSNorm(norm.normalized_shape, eps=norm.eps))


class MixtureLayer(FairseqLayer):
    """A layer whose feed-forward may be gated, or a mixture of experts. Precedes a layer of fairseq's.

    A mixture takes the place of fc1; fc2, and what fairseq's layer does between the two, then do nothing.
    A gated feed-forward has an fc1 of twice the width, whose halves the activation multiplies, and no biases.

    Attributes:
        shortcuts: the residual sums in their order, if they have ω of their own (`finish_layer` sets them).
    """

    activation_fn: Any

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        if not hasattr(self, "shortcuts"):
            return super().residual_connection(x, residual)
        context = current_context()
        index = context.residual_sums
        context.residual_sums += 1
        return self.shortcuts[index](x, residual)

    def run_compiled(
        self, run: Callable[..., Any], mask: Any, x: Tensor, options: dict[str, Any]
    ) -> Any:
        """This layer's forward by compiled code.

        Args:
            run: the compiled `forward_with_context`, called with this layer, a context, x and options.
            mask: that of the self-attention as the decoder made it, which options have in another layout.
            x: [T, B, C].
            options: what `forward` takes besides x, by name.

        Returns:
            What `forward` returns.
        """
        context = current_context()
        is_causal = mask is not None and mask is context.causal_mask
        # Whether there is padding would make two graphs, and a mask costs little in one. The other facts
        # belong to the pass and not to the layer.
        layer_context = dataclasses.replace(
            context,
            causal_mask=options["self_attn_mask"] if is_causal else None,
            unpadded=False,
            makes_mask=False,
            reading=None,
            residual_sums=0,
            routings=(),
        )
        out, routings = run(self, layer_context, x, options)
        for module, routing in routings:
            context.record(module, routing)
        return out

    def forward_with_context(self, context: ForwardContext, x: Tensor, **options: Any) -> Any:
        """The layer's `forward` with nothing but what is given.

        Args:
            context: in place of the thread's; its `routings` get nothing.
            x: [T, B, C].
            options: what `forward` takes besides x, by name.

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
        is_gated = getattr(self.mixture_cfg, "gated_feed_forward", False)
        if mixture is None and not is_gated:
            return super().build_fc1(input_dim, output_dim, *quant_noise)
        if mixture is None:
            self.activation_fn = swiglu
            return nn.Linear(input_dim, 2 * output_dim, bias=False)
        if is_gated:
            raise UserError(
                "--gated-feed-forward and --sigma-moe-num-experts both replace the feed-forward: leave "
                "one of the two out."
            )
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


class MixtureEncoderLayer(MixtureLayer, TransformerEncoderLayerBase):
    """An encoder layer whose self-attention is a mixture."""

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        self.mixture_cfg = cfg  # fairseq builds the feed-forward later, and without it
        return build_attention(cfg, embed_dim, self_attention=True)

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ):
        with forward_context(padding=encoder_padding_mask, residual_sums=0):
            return super().forward(x, encoder_padding_mask, attn_mask)


class MixtureDecoderLayer(MixtureLayer, TransformerDecoderLayerBase):
    """A decoder layer whose self- and cross-attention are mixtures."""

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        self.mixture_cfg = cfg
        return build_attention(
            cfg, embed_dim, decoder=True, self_attention=not cfg.cross_self_attention
        )

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
            return super().forward(
                x, *args, self_attn_padding_mask=self_attn_padding_mask, **kwargs
            )


def _same_context() -> tuple[Any, Any]:
    """Contexts of a checkpointed layer's two runs: the second has no encoder or decoder around it."""
    return contextlib.nullcontext(), restored(current_context())


def finish_layer(layer: nn.Module, cfg: Any, num_layers: int) -> nn.Module:
    """--rms-norm, --initialization, activation checkpointing, and FSDP as fairseq's `build_*_layer` adds it.

    Checkpointing is torch's non-reentrant one: fairseq's runs the first forward pass without a graph,
    and the auxiliary losses of that pass would reach no router.
    """
    use_rms_norms(layer, cfg)
    initialize(layer, cfg, num_layers)
    if getattr(cfg, "initialization", None) == "admin":
        children: list[tuple[str, Any]] = list(layer.named_children())
        norms = [norm for name, norm in children if name.endswith("layer_norm")]
        layer.shortcuts = nn.ModuleList(Shortcut(norm.normalized_shape[0]) for norm in norms)
    if cfg.checkpoint_activations:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint,
            layer.forward,
            use_reentrant=False,
            context_fn=_same_context,
        )
    min_params = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=min_params)
