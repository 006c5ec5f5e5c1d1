"""The part that all models with mixtures share: flags, defaults, checks, and steps after each update."""

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from fairseq.distributed import utils as distributed
from fairseq.models import ARCH_CONFIG_REGISTRY, FairseqEncoderDecoderModel
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from moa_fairseq.errors import UserError, check_choice
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.head_gate import HEAD_GATES
from moa_fairseq.layers.initialization import scale_branch
from moa_fairseq.layers.positions import POSITIONS_IN_ATTENTION
from moa_fairseq.layers.running_statistics import running_statistics_of, update_running_statistics
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.plugin.families import add_family_args, naming_flags, settings_of

INITIALIZATIONS = ("own", "depth-scaled", "admin")
INITIALIZATION_HELP = (
    "initialisation of the layers' matrices. own: per module, as in its paper or in fairseq; "
    "depth-scaled: normal with deviation √(2/n)/√fan-in for n layers, biases zero (SwitchHead's pre-norm "
    "models); admin: as own, plus factors ω of the shortcuts of post-norm layers, set by a pass over the "
    "first batch (dense translation models, arXiv 2004.08249)"
)
POSITIONS = ("learned", "sinusoidal", *POSITIONS_IN_ATTENTION)
BRANCH_SCALE_HELP = (
    "initial scale of the attention output: factor of every output projection at initialisation "
    "(default: 1). 1/K gives dense attention the small initial output of K gates that sum to 1; K undoes it "
    "in a mixture"
)
OUTPUT_SCALE_HELP = (
    "constant scale of the attention output, in training and afterwards (default: 1). K multiplies by K "
    "the gates of a mixture whose gates sum to 1; 1/K scales dense attention like K equal gates"
)
HEAD_GATE_HELP = (
    "sigmoid gates of the query's input that multiply each attention head's output (gated attention, "
    "arXiv 2505.06708): one gate per head (head) or per element (element)"
)
KERNEL_CHECK_HELP = (
    "no check of the Triton kernels before the first training on a new kind of GPU; kernels that were "
    "not checked stay off"
)

if TYPE_CHECKING:
    from fairseq.models import BaseFairseqModel
else:
    BaseFairseqModel = object
Model = TypeVar("Model", bound=nn.Module)


class MixtureModel(BaseFairseqModel):
    """A base class that precedes the fairseq model that it extends.

    Attributes:
        attention_family: a name of FAMILIES.
        default_arch: the architecture that gives a flag its value if neither the user nor another
            architecture does.
        refused: options of fairseq → the values that switch them off. They change or read the inside of
            fairseq's own attention, which a mixture lacks.
    """

    attention_family: ClassVar[str]
    default_arch: ClassVar[str]
    refused: ClassVar[dict[str, Any]] = {
        "quant_noise_pq": 0,
        "scale_heads": False,
        "offload_activations": False,
    }
    _updates_seen: int | None = None

    @classmethod
    def hub_models(cls) -> dict:
        return {}  # the parent's models are dense checkpoints

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        super().add_args(parser)
        cls.add_mixture_args(parser)

    @classmethod
    def add_mixture_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the family, and the flags that all families share."""
        add_family_args(parser, cls.attention_family)
        parser.add_argument(
            "--initialization",
            choices=INITIALIZATIONS,
            help=f"{INITIALIZATION_HELP}; default: the architecture's",
        )
        parser.add_argument(
            "--positions",
            choices=POSITIONS,
            default=argparse.SUPPRESS,
            help="position encoding: learned or sinusoidal embeddings, rotary queries and keys in every "
            "self-attention (rope; rope-half rotates half of each head), or Transformer-XL's relative "
            "positions in every self-attention (xl); default: the architecture's",
        )
        parser.add_argument(
            "--head-gate", choices=HEAD_GATES, default=argparse.SUPPRESS, help=HEAD_GATE_HELP
        )
        for flag, text in (
            ("--attention-branch-scale", BRANCH_SCALE_HELP),
            ("--attention-output-scale", OUTPUT_SCALE_HELP),
        ):
            parser.add_argument(flag, type=float, default=argparse.SUPPRESS, help=text)
        parser.add_argument("--no-kernel-check", action="store_true", help=KERNEL_CHECK_HELP)

    @classmethod
    def fill_defaults(cls, args: Any) -> argparse.Namespace:
        """Command-line arguments with every default.

        Args:
            args: a namespace, which is completed in place, or a config of fairseq-hydra-train, from which a
                new namespace is made.

        Raises:
            UserError: for a refused option or impossible positions, or if --initialization admin does not fit
                the model.
        """
        if isinstance(args, DictConfig):
            settings: Any = OmegaConf.to_container(args, resolve=True)
            args = argparse.Namespace(**settings)
        ARCH_CONFIG_REGISTRY[cls.default_arch](args)
        args.attention_family = cls.attention_family
        _set_positions(args)
        if args.initialization == "admin":
            cls._check_admin(args)
        for name, off in cls.refused.items():
            if getattr(args, name, None) not in (off, None):
                hint = " (--checkpoint-activations works)" if name == "offload_activations" else ""
                raise UserError(
                    f"--{name.replace('_', '-')}{hint} is not supported by mixtures of attention heads: "
                    "leave it out."
                )
        return args

    @classmethod
    def _check_admin(cls, args: argparse.Namespace) -> None:
        """Raise UserError if --initialization admin does not fit the model."""
        conflicts = []
        for name in (
            "encoder_normalize_before",
            "decoder_normalize_before",
            "encoder_layerdrop",
            "decoder_layerdrop",
        ):
            if getattr(args, name, None):
                conflicts.append(f"--{name.replace('_', '-')}")
        subject = " and ".join(conflicts)
        if not issubclass(cls, FairseqEncoderDecoderModel) or cls.attention_family != "dense":
            subject = f"the model of --arch {getattr(args, 'arch', cls.default_arch)}"
        if subject:
            raise UserError(
                f"--initialization admin does not fit {subject}: it is for post-norm dense translation "
                "models (dense_transformer_base) without layer dropout. Choose another --initialization."
            )

    @classmethod
    def post_build(cls, model: Model, args: argparse.Namespace) -> Model:
        """Name the attentions of a model that has just been built, check them, and scale their outputs.

        Args:
            model: its attentions and sigma-MoEs get their paths in the model as names.
            args: the model's arguments, as `fill_defaults` returns them.

        Returns:
            The same model.

        Raises:
            UserError: if settings do not fit the model, or the branch scale is not positive.
        """
        attentions = []
        for name, module in model.named_modules():
            if isinstance(module, (Attention, SigmaMoE)):
                module.name = name
            if isinstance(module, Attention):
                attentions.append(module)
        settings = settings_of(args)
        with naming_flags():
            settings.check(attentions)
        if settings.window is not None and all(
            attention.window is None for attention in attentions
        ):
            raise UserError(
                f"--window {settings.window} is for the self-attention of decoders, and this model has none: "
                "leave it out."
            )
        scale = getattr(args, "attention_branch_scale", None)
        if scale is not None:
            if not 0 < scale < math.inf:
                raise UserError(f"--attention-branch-scale is {scale}: give a positive number.")
            for attention in attentions:
                scale_branch(attention, scale)
        return model

    def set_num_updates(self, num_updates: int) -> None:
        """fairseq's hook: after each update, the modules' observations enter their running statistics.

        This is called after every update, and once more before every micro-batch; only a new number of
        updates means that an update has ended. In each update either all workers observe something or none
        does, so either all of them call all_reduce here or none.
        """
        super().set_num_updates(num_updates)
        if num_updates != self._updates_seen:
            self._updates_seen = num_updates
            running_statistics = running_statistics_of(self)
            if any(statistics.has_pending for statistics in running_statistics):
                update_running_statistics(running_statistics, sum_over_workers())


def sum_over_workers() -> Callable[[Tensor], None] | None:
    """A function that adds up a tensor over the data-parallel workers in place; None for one worker."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) == 1:
        return None
    return lambda tensor: distributed.all_reduce(tensor, group)


def _set_positions(args: argparse.Namespace) -> None:
    """Set fairseq's own flags for --positions; raise UserError for impossible positions."""
    args.positions = getattr(args, "positions", None)
    if args.positions is None:
        return
    check_choice("--positions", args.positions, POSITIONS)
    if args.positions in POSITIONS_IN_ATTENTION:
        if getattr(args, "cross_self_attention", False):
            raise UserError(
                f"--positions {args.positions} is for self-attention, but with --cross-self-attention the "
                "decoder has none and would see no token order: choose another "
                "--positions, or leave --cross-self-attention out."
            )
        args.no_token_positional_embeddings = True
    else:
        args.encoder_learned_pos = args.decoder_learned_pos = args.positions == "learned"
