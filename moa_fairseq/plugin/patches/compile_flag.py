"""--compile-layers: the flag, its way to the trainer, and the settings that it cannot be combined with."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from omegaconf import open_dict
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.table import patch

FLAG = "--compile-layers"
HELP = (
    "torch.compile for a Transformer's layers in training: the first updates take minutes longer, all "
    "others need less CPU time; dropout masks differ"
)
LAYERS = (TransformerEncoderLayerBase, TransformerDecoderLayerBase)
_TEST = "plugin/patches/test_compiled_layers.py::test_the_flag_reaches_the_trainer_of_any_model"
# Section and name of a setting → why it does not go with compiled layers
_REFUSED = {
    ("common", "tpu"): "a TPU has a compiler of its own",
    ("common", "quantization_config_path"): "it replaces parts of the layers during the training",
    ("distributed_training", "pipeline_model_parallel"): "it splits the layers itself",
    ("model", "quant_noise_pq"): "its noise is written into the weights before each pass",
    ("model", "quant_noise_scalar"): "its noise is written into the weights before each pass",
    ("model", "offload_activations"): "it moves what a layer keeps while the layer runs",
    ("model", "encoder_xformers_att_config"): "xformers' attention is not torch's",
    ("model", "decoder_xformers_att_config"): "xformers' attention is not torch's",
}


@runtime_checkable
class ContextLayer(Protocol):
    """A layer whose `forward` reads and writes a context, which is none of its arguments."""

    def forward_with_context(self, context: Any, x: Tensor, **options: Any) -> Any:
        """`forward` with the context as an argument; returns its output and its routings."""

    def run_compiled(
        self, run: Callable[..., Any], mask: Any, x: Tensor, options: dict[str, Any]
    ) -> Any:
        """`forward` by `run(layer, context, x, options)`, the compiled `forward_with_context`."""


@patch("fairseq.options:add_optimization_args", _TEST)
def offer_compiled_layers(add: Callable, parser: argparse.ArgumentParser) -> Any:
    """Add --compile-layers to the parser of a training.

    fairseq cannot compile a model (this plugin is imported while the parser is built).
    """
    group = add(parser)
    group.add_argument(FLAG, action="store_true", help=HELP)
    return group


@patch("fairseq.dataclass.utils, fairseq_cli.*:convert_namespace_to_omegaconf", _TEST)
def hand_on_compiled_layers(convert: Callable, args: argparse.Namespace) -> Any:
    """Add `optimization.compile_layers` to the settings if the flag was given.

    fairseq's settings have no place for a flag that belongs to neither fairseq nor a model.
    """
    cfg = convert(args)
    if getattr(args, "compile_layers", False):
        with open_dict(cfg.optimization):
            cfg.optimization.compile_layers = True
    return cfg


def check(cfg: Any, task: Any, model: nn.Module) -> None:
    """Refuse settings that cannot be combined with compiled layers.

    Args:
        cfg: all settings of fairseq.
        task: the training's task.
        model: the model as the task built it, before anything wraps it.

    Raises:
        UserError: names the first such setting, and the reason.
    """
    for (section, name), reason in _REFUSED.items():
        if getattr(getattr(cfg, section), name, None):
            raise _refusal(f"--{name.replace('_', '-')}", reason)
    if cfg.distributed_training.ddp_backend == "fully_sharded":
        raise _refusal(
            "--ddp-backend fully_sharded", "it takes a layer's weights away between two passes"
        )
    if getattr(task, "alternates", False):
        raise _refusal(
            "--bcd alternate",
            "experts are drawn for each layer by its name (--bcd none draws none)",
        )
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    if getattr(cfg.model, "checkpoint_activations", False) and any(
        map(_has_fairseqs_checkpointing, layers)
    ):
        raise _refusal(
            "--checkpoint-activations",
            "fairseq's own way to it runs layers without a graph; --arch dense_transformer_base and others "
            "of this package have torch's",
        )
    if not layers:
        raise _refusal(
            f"--arch {getattr(cfg.model, 'arch', cfg.model._name)}",
            "none of its layers is fairseq's TransformerEncoderLayer or TransformerDecoderLayer",
        )


def _has_fairseqs_checkpointing(layer: nn.Module) -> bool:
    """Whether fairseq replaced the `forward` of one of its own layers; this package's layers use torch's."""
    return "forward" in vars(layer) and not isinstance(layer, ContextLayer)


def _refusal(flag: str, reason: str) -> UserError:
    return UserError(f"{FLAG} cannot be combined with {flag}: {reason}. Leave one of the two out.")
