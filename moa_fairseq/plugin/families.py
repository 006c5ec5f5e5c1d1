"""The flags of each family of mixtures, and how an attention is built from them."""

import argparse
import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.families import FAMILIES, register_family
from moa_fairseq.layers.initialization import forked_rng, init_fan_in_normal_
from moa_fairseq.layers.positions import POSITIONS_IN_ATTENTION
from moa_fairseq.layers.settings import FamilySettings
from moa_fairseq.layers.sigma_moe import SigmaMoESettings
from moa_fairseq.plugin.fairseq_call import FairseqCall, FairseqSigmaMoE, with_fairseq_call

__all__ = ["FAMILIES", "register_family"]  # other plugins import them from here


def add_family_args(parser: argparse.ArgumentParser, family: str) -> None:
    """Add the flags of a family and of sigma-MoE, without defaults, so that an architecture may set them.

    Args:
        parser: the parser to which the flags are added.
        family: a name of FAMILIES.
    """
    settings = FAMILIES[family]
    gen_parser_from_dataclass(parser, _as_fairseq(settings), delete_default=True)
    gen_parser_from_dataclass(parser, _as_fairseq(SigmaMoESettings), delete_default=True)
    for field in dataclasses.fields(settings):
        if field.default is False:  # the user may switch off what an architecture switches on
            opposite = f"--no-{field.name.replace('_', '-')}"
            parser.add_argument(
                opposite, action="store_false", dest=field.name, help=argparse.SUPPRESS
            )


def _as_fairseq(settings: type) -> FairseqDataclass:
    """An instance of the settings as a dataclass for fairseq, in which choices are an enum."""
    types = typing.get_type_hints(settings)
    fields = []
    for field in dataclasses.fields(settings):
        choices = field.metadata.get("choices")
        kind = ChoiceEnum(list(choices)) if choices else types[field.name]
        default = dataclasses.field(default=field.default, metadata=field.metadata)
        fields.append((field.name, kind, default))
    return dataclasses.make_dataclass(settings.__name__, fields, bases=(FairseqDataclass,))()


def set_defaults(args: Any, values: Mapping[str, Any]) -> None:
    """Set each value in args that neither the user nor an earlier architecture has set.

    Args:
        args: a namespace, which is changed in place; a value of None counts as not set.
        values: the values of flags, by their names in the namespace.
    """
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def set_family_defaults(args: Any, family: str) -> None:
    """Set every flag of a family and of sigma-MoE that has no value to its default.

    Args:
        args: a namespace, which is changed in place; None counts as no value.
        family: a name of FAMILIES.
    """
    for settings in (FAMILIES[family], SigmaMoESettings):
        set_defaults(args, {field.name: field.default for field in dataclasses.fields(settings)})


def settings_of(cfg: Any) -> FamilySettings:
    """The settings of a model's family, taken from its arguments or config."""
    return _settings_from(FAMILIES[cfg.attention_family], cfg)


def _settings_from(settings: type, cfg: Any) -> Any:
    return settings(
        **{field.name: getattr(cfg, field.name) for field in dataclasses.fields(settings)}
    )


# Keywords of layers → the flags that set them, besides the fields of settings
_OTHER_FLAGS = {
    "head_gate": "--head-gate",
    "output_scale": "--attention-output-scale",
    "positions": "--positions",
}
# A word that may be a keyword, and its value in x_y=1 or x_y='a'
_KEYWORD = re.compile(r"\b(?P<name>[a-z]\w*)(?:=(?P<value>'[^']*'|-?\w[\w.+-]*\w|-?\w))?")


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """A context in which errors of layers name flags instead of keywords: `--x-y 1` for `x_y=1`."""
    flags = dict(_OTHER_FLAGS)
    for settings in (*FAMILIES.values(), SigmaMoESettings):
        for field in dataclasses.fields(settings):
            flags[field.name] = f"--{field.name.replace('_', '-')}"

    def with_flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        # Inside a sentence, a name such as "positions" is an ordinary word.
        is_word = value is None and "_" not in name and match.start()
        if name not in flags or is_word:
            return match[0]
        if value in (None, "True"):
            return flags[name]
        return " ".join([flags[name], value.strip("'")])

    try:
        yield
    except UserError as error:  # layers raise no other errors for a user
        raise type(error)(_KEYWORD.sub(with_flag, str(error))) from error


@naming_flags()
@forked_rng()
def build_attention(cfg: Any, embed_dim: int, decoder: bool = False, **options: Any) -> FairseqCall:
    """The attention of the family that `cfg.attention_family` names, with fairseq's call.

    Args:
        cfg: a model's config, with every flag of its family.
        embed_dim: the layer's width, C.
        decoder: whether the attention is part of a decoder, where a query must not see later positions.
        options: arguments of fairseq's attention: self_attention, encoder_decoder_attention, kdim, vdim.

    Raises:
        UserError: for impossible settings.
    """
    side = cfg.decoder if decoder else cfg.encoder
    settings = settings_of(cfg)
    scale = getattr(cfg, "attention_output_scale", None)
    positions = getattr(cfg, "positions", None)
    if positions not in POSITIONS_IN_ATTENTION or not options.get("self_attention"):
        positions = None  # --positions may name an embedding of the model
    dropout = FairseqDropout(cfg.attention_dropout, module_name=settings.attention.__name__)
    attention = with_fairseq_call(settings.attention).from_settings(
        embed_dim,
        settings,
        num_heads=side.attention_heads,
        causal=decoder,
        dropout=dropout,  # --retain-dropout-modules finds it by its name
        positions=positions,
        head_gate=getattr(cfg, "head_gate", None) or "none",
        output_scale=1.0 if scale is None else scale,
        **options,
    )
    assert isinstance(attention, FairseqCall)
    return attention


def initialize(module: nn.Module, cfg: Any, layers: int) -> None:
    """Draw the matrices of a module again if --initialization is depth-scaled.

    Args:
        module: a part of a model; the matrices of its children are drawn.
        cfg: the model's config.
        layers: the number of layers of the encoder or decoder around the part, n. The deviation of a matrix
            is √(2/n)/√fan-in.
    """
    if getattr(cfg, "initialization", None) == "depth-scaled":
        for part in module.children():
            with forked_rng():
                init_fan_in_normal_(part, math.sqrt(2 / layers))


@naming_flags()
def build_sigma_moe(
    cfg: Any, embed_dim: int, activation: Callable[[Tensor], Tensor]
) -> FairseqSigmaMoE | None:
    """The sigma-MoE that cfg asks for, or None if the feed-forward is fairseq's own.

    Args:
        cfg: a model's config.
        embed_dim: the layer's width, C.
        activation: the activation of the experts' inner units.

    Raises:
        UserError: for impossible sizes.
    """
    settings = _settings_from(SigmaMoESettings, cfg)
    if settings.sigma_moe_num_experts == 0:
        return None
    return FairseqSigmaMoE(embed_dim, settings, activation, getattr(cfg, "expert_backend", "auto"))
