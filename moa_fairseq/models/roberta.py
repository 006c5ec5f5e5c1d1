"""MoA for masked language modelling: `--arch moa_roberta_8k8e128d` and the rest of MoA's Table 2."""

import argparse
from typing import Any, ClassVar, Dict

from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.model import RobertaEncoder, RobertaModel
from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from moa_fairseq.attention.expert_linear import ExpertLinear
from moa_fairseq.attention.routers import TopKRouter
from moa_fairseq.models._family import MixtureFamily
from moa_fairseq.models._flags import add_mixture_args, set_mixture_defaults
from moa_fairseq.models._layers import MixtureEncoder, name_attentions

MAX_POSITIONS = 128  # MoA App. E: "we set the sequence length to be 128"


class MixtureRobertaEncoder(RobertaEncoder):
    """RoBERTa's encoder with a mixture of attention heads in every layer; all else is its own."""

    def build_encoder(
        self, args: argparse.Namespace, dictionary: Any, embed_tokens: nn.Embedding
    ) -> nn.Module:
        encoder = MixtureEncoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


@register_model("moa_roberta")
class MoARobertaModel(MixtureFamily, RobertaModel):
    """fairseq's RoBERTa with MoA in place of its self-attention (MoA §5.2).

    Everything else is RoBERTa's: post-norm layers, the tied LM head, classification heads
    (`register_classification_head`), checkpoints with heads, `from_pretrained`, `fill_mask`.
    """

    refused: ClassVar[Dict[str, Any]] = {
        "quant_noise_pq": 0,
        "mha_reg_scale_factor": 0,
        "mha_heads_to_keep": -1,
    }

    def __init__(self, args: argparse.Namespace, encoder: MixtureRobertaEncoder) -> None:
        super().__init__(args, encoder)
        self.apply(_init_mixture)
        name_attentions(self)

    @classmethod
    def add_family_args(cls, parser: argparse.ArgumentParser) -> None:
        add_mixture_args(parser)

    @classmethod
    def set_defaults(cls, args: argparse.Namespace) -> None:
        moa_roberta_8k8e128d(args)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MoARobertaModel":
        """Build from command-line arguments or a hydra config. Raises UserError for impossible flags."""
        args = cls.completed(args)
        return cls(args, MixtureRobertaEncoder(args, task.source_dictionary))


def _init_mixture(module: nn.Module) -> None:
    """BERT's initialisation draws every nn.Linear anew: a router's noise starts at zero again."""
    if isinstance(module, (TopKRouter, ExpertLinear)):
        module.reset_parameters()


@register_model_architecture("roberta", "roberta_medium_wt103")
def roberta_medium_wt103(args: argparse.Namespace) -> None:
    """Dense baseline of MoA Table 2: 8 layers, width 512, feed-forward 2048, 8 heads: 51.34M parameters."""
    _medium(args)
    roberta_architecture(args)


def _medium(args: argparse.Namespace) -> None:
    """The body of Table 2's models (MoA §5.2, Table 5), unless the user set another."""
    sizes = {"layers": 8, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8}
    _set_body(args, sizes)


def _set_body(args: argparse.Namespace, sizes: dict) -> None:
    defaults = {**{f"encoder_{name}": value for name, value in sizes.items()}, "max_positions": MAX_POSITIONS}
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def _mixture(args: argparse.Namespace, per_token: int, num_experts: int, dim: int) -> None:
    # Only with biases in keys, values and experts do Table 2's parameters come out (to 0.01M).
    if getattr(args, "expert_bias", None) is None:
        args.expert_bias = True
    set_mixture_defaults(args, num_experts, per_token, dim)
    _medium(args)
    roberta_architecture(args)


# MoA Table 2: row → (K, E, D)
TABLE_2 = {
    "8k8e128d": (8, 8, 128),
    "8k8e256d": (8, 8, 256),
    "8k16e256d": (8, 16, 256),
    "8k32e256d": (8, 32, 256),
    "8k64e256d": (8, 64, 256),
}


def _register_row(row: str, per_token: int, num_experts: int, dim: int) -> Any:
    def architecture(args: argparse.Namespace) -> None:
        _mixture(args, per_token, num_experts, dim)

    architecture.__name__ = f"moa_roberta_{row}"
    architecture.__doc__ = f"{per_token}K{num_experts}E{dim}D in the body of `roberta_medium_wt103`."
    return register_model_architecture("moa_roberta", architecture.__name__)(architecture)


moa_roberta_8k8e128d = _register_row("8k8e128d", *TABLE_2["8k8e128d"])
for _row, _sizes in list(TABLE_2.items())[1:]:
    _register_row(_row, *_sizes)

_TINY = {"layers": 4, "embed_dim": 128, "ffn_embed_dim": 512, "attention_heads": 4}


@register_model_architecture("roberta", "roberta_tiny")
def roberta_tiny(args: argparse.Namespace) -> None:
    """Dense, 4 layers, width 128, feed-forward 512, 4 heads: for small data and small machines."""
    _set_body(args, _TINY)
    roberta_architecture(args)


@register_model_architecture("moa_roberta", "moa_roberta_tiny")
def moa_roberta_tiny(args: argparse.Namespace) -> None:
    """4K8E48D in the body of `roberta_tiny`.

    (K + 1) · D = 240 against the dense attention's 2 · 128: its projections cost 6 % less.
    """
    _set_body(args, _TINY)
    _mixture(args, per_token=4, num_experts=8, dim=48)
