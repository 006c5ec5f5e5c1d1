"""The command-line flags that every mixture of this package shares, each declared here only."""

import argparse

from moa_fairseq.attention.mae import GATES
from moa_fairseq.attention.routers import RENORMALIZATIONS
from moa_fairseq.attention.single_expert import EVALUATIONS, MIXTURE
from moa_fairseq.kernels import BACKENDS


def add_mixture_args(parser: argparse.ArgumentParser) -> None:
    """Add the expert flags to a model's parser; their defaults come from the architecture."""
    suppress = argparse.SUPPRESS
    parser.add_argument(
        "--num-experts", type=int, metavar="E", default=suppress, help="attention experts per module (E)"
    )
    parser.add_argument(
        "--experts-per-token", type=int, metavar="K", default=suppress, help="experts each token chooses (K)"
    )
    parser.add_argument(
        "--expert-dim", type=int, metavar="D", default=suppress, help="head dimension of an expert (D)"
    )
    parser.add_argument(
        "--expert-bias",
        action=argparse.BooleanOptionalAction,
        default=suppress,
        help="biases in keys, values, query and output experts (off for translation, as in MoA's release)",
    )
    parser.add_argument(
        "--routing-noise",
        action="store_true",
        default=suppress,
        help="learned Gaussian noise on the router's logits in training (MoA Eq. 3)",
    )
    parser.add_argument(
        "--router-renormalize",
        choices=RENORMALIZATIONS,
        default=suppress,
        help="divide the chosen gates by their sum: without a gradient through it (detached: MoA Eq. 9), "
        "with one (full), or not at all (none: MoA's released code)",
    )
    parser.add_argument(
        "--expert-backend",
        choices=BACKENDS,
        default=suppress,
        help="what computes the expert projections; auto picks by device and dtype",
    )


def set_mixture_defaults(args: argparse.Namespace, num_experts: int, per_token: int, dim: int) -> None:
    """Give an architecture its K, E and D, and the flags their defaults, unless the user set them."""
    defaults = {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_dim": dim,
        "expert_bias": False,
        "routing_noise": False,
        "router_renormalize": "detached",
        "expert_backend": "auto",
    }
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def add_mae_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of mixtures of attentive experts; their defaults come from the architecture."""
    suppress = argparse.SUPPRESS
    parser.add_argument(
        "--mae-dropped-heads",
        type=int,
        metavar="T",
        default=suppress,
        help="heads that each expert leaves out (of 8 heads, 1 makes MAE-7 and 2 makes MAE-6)",
    )
    parser.add_argument(
        "--mae-gate",
        choices=GATES,
        default=suppress,
        help="how experts are weighted: by a gate that sees the input, or all alike (UNI-MAE)",
    )
    parser.add_argument(
        "--gate-hidden-dim", type=int, metavar="N", default=suppress, help="hidden size of the gate's MLP"
    )
    parser.add_argument(
        "--gate-dropout", type=float, metavar="P", default=suppress, help="dropout after its first layer"
    )
    parser.add_argument(
        "--gate-window",
        type=int,
        metavar="N",
        default=suppress,
        help="how many of the latest inputs a decoder's gate averages (translation: all so far)",
    )
    parser.add_argument(
        "--mae-evaluate-with",
        choices=EVALUATIONS,
        default=suppress,
        help="in evaluation (never in training): mix the experts, or use each gate's favourite alone, or one "
        "random expert in each module; for trained models by --model-overrides",
    )
    parser.add_argument(
        "--mae-evaluate-seed", type=int, metavar="N", default=suppress, help="which random experts these are"
    )


def set_mae_defaults(args: argparse.Namespace) -> None:
    """Give the flags of `add_mae_args` their defaults, unless the user or an architecture set them."""
    defaults = {
        "mae_dropped_heads": 1,
        "mae_gate": "learned",
        "gate_hidden_dim": 256,
        "gate_dropout": 0.1,
        "gate_window": None,
        "mae_evaluate_with": MIXTURE,
        "mae_evaluate_seed": 1,
    }
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.attention_family = "mae"
