"""--compile-layers: the layers of a Transformer are compiled by torch, each kind once, for training alone.

Equal layers share their code, for any batch: sizes are inputs of a graph. What is no part of a layer
(embeddings, losses, the optimiser) stays as it is, and so do validation and generation.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.modules.gelu import gelu_accurate
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from omegaconf import open_dict
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.files import private_folder
from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger(__name__)
FLAG = "--compile-layers"
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # of compiled code, which torch runs when it finds it there
HELP = (
    "torch.compile for a Transformer's layers in training: the first updates take minutes longer, all "
    "others need less CPU time; dropout masks differ"
)
LAYERS = (TransformerEncoderLayerBase, TransformerDecoderLayerBase)
_TEST = "plugin/patches/test_compiled_layers.py::"
# What a layer's forward takes besides x, in order: an encoder's, a decoder's
_NAMES = [list(inspect.signature(kind.forward).parameters)[2:] for kind in LAYERS]
_MOST_GRAPHS = 64  # of all layers: kinds, precisions and batches of one sentence or one token
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


@patch(
    "fairseq.options:add_optimization_args",
    f"{_TEST}test_the_flag_reaches_the_trainer_of_any_model",
)
def offer_compiled_layers(add: Callable, parser: argparse.ArgumentParser) -> Any:
    """fairseq cannot compile a model (this plugin is imported while the parser is built)."""
    group = add(parser)
    group.add_argument(FLAG, action="store_true", help=HELP)
    return group


@patch(
    "fairseq.dataclass.utils, fairseq_cli.*:convert_namespace_to_omegaconf",
    f"{_TEST}test_the_flag_reaches_the_trainer_of_any_model",
)
def hand_on_compiled_layers(convert: Callable, args: argparse.Namespace) -> Any:
    """fairseq's settings have no place for a flag that belongs to neither fairseq nor a model."""
    cfg = convert(args)
    if getattr(args, "compile_layers", False):
        with open_dict(cfg.optimization):
            cfg.optimization.compile_layers = True
    return cfg


@patch("fairseq.trainer:Trainer.__init__", f"{_TEST}test_the_flag_reaches_the_trainer_of_any_model")
def compile_for_training(
    begin: Callable, trainer: Any, cfg: Any, task: Any, model: nn.Module, *args: Any, **options: Any
) -> None:
    """Only a training compiles, and only a training builds a trainer."""
    compiles = getattr(cfg.optimization, "compile_layers", False)
    if compiles:
        check(cfg, task, model)
    begin(trainer, cfg, task, model, *args, **options)
    if compiles and can_compile(trainer.device):
        compile_layers(model)


@patch(
    "fairseq.incremental_decoding_utils:FairseqIncrementalState.get_incremental_state",
    f"{_TEST}test_compiled_layers_compute_the_same_in_few_graphs",
)
def read_no_state_where_there_is_none(get: Callable, module: Any, state: Any, key: str) -> Any:
    """fairseq makes a key per layer even without a state: layers would not share compiled code."""
    if state is None:
        return None
    return get(module, state, key)


def check(cfg: Any, task: Any, model: nn.Module) -> None:
    """Refuse what does not go with compiled layers.

    Args:
        cfg: all settings of fairseq.
        task: of the training.
        model: as the task built it, before anything wraps it.

    Raises:
        UserError: names the first setting that does not, and why.
    """
    reasons: dict[str, str] = {}
    for (section, name), reason in _REFUSED.items():
        if getattr(getattr(cfg, section), name, None):
            reasons[f"--{name.replace('_', '-')}"] = reason
    if cfg.distributed_training.ddp_backend == "fully_sharded":
        flag = "--ddp-backend fully_sharded"
        reasons[flag] = "it takes a layer's weights away between two passes"
    if getattr(task, "alternates", False):
        reason = "experts are drawn for each layer by its name (--bcd none draws none)"
        reasons["--bcd alternate"] = reason
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    foreign = any("forward" in vars(layer) and not hasattr(layer, "whole") for layer in layers)
    if foreign and getattr(cfg.model, "checkpoint_activations", False):
        reasons["--checkpoint-activations"] = (
            "fairseq's own way to it runs layers without a graph; --arch dense_transformer_base and others "
            "of this package have torch's"
        )
    if not layers:
        reasons[f"--arch {getattr(cfg.model, 'arch', cfg.model._name)}"] = (
            "none of its layers is fairseq's TransformerEncoderLayer or TransformerDecoderLayer"
        )
    if reasons:
        flag, reason = next(iter(reasons.items()))
        raise UserError(
            f"{FLAG} cannot be combined with {flag}: {reason}. Leave one of the two out."
        )


def can_compile(device: torch.device) -> bool:
    """Whether torch can compile for a device here; a warning says why not."""
    importlib.import_module("torch._dynamo")  # what fails here, fails without the flag, too
    inductor: Any = importlib.import_module("torch._inductor.runtime.runtime_utils")

    def trial(x: Tensor) -> tuple[Tensor, bool]:
        return x.sin() * x, torch.compiler.is_compiling()

    try:
        # in /tmp, where another user may have made it first
        private_folder(Path(os.environ.get(CACHE) or inductor.default_cache_dir()))
        _, compiled = torch.compile(trial, dynamic=True, fullgraph=True)(
            torch.ones(5, device=device)
        )
    except Exception as error:  # whatever compilers, their caches and their tools raise
        _warn("torch cannot compile here, and the layers run as without the flag", error)
        return False
    if not compiled:
        logger.warning(
            f"{FLAG}: torch's compiler is turned off (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE), and the "
            "layers run as without the flag"
        )
    return compiled


def _warn(what: str, error: Exception) -> None:
    lines = []
    for line in map(str.strip, str(error).splitlines()):
        if line and not line.startswith("Set TORCHDYNAMO_VERBOSE"):
            lines.append(line[:200])
    # A compiler's, below its long command
    at_fault = [line for line in lines if "error:" in line.lower()]
    reason = " ".join((lines[:2] + at_fault[:2]) if at_fault else lines[:3])
    logger.warning(f"{FLAG}: {what}: {type(error).__name__}: {reason}")


def compile_layers(model: nn.Module, backend: str = "inductor", mode: str | None = None) -> None:
    """Let every layer of a model's Transformers train by compiled code.

    Args:
        model: in which layers are replaced in place; its weights keep their names.
        backend, mode: of torch.compile.
    """
    config: Any = torch._dynamo.config
    config.specialize_float = True  # a dropout is a number, not an input
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # A layer is smaller than what DistributedDataParallel sends at once
    config.optimize_ddp = False
    # a backward pass that cannot be compiled shows in the forward pass, where there is another way
    functorch: Any = torch._functorch.config
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
    gelu_accurate(torch.zeros(1))  # its first call writes into the function, which no graph can
    shared = _Compiled(backend, mode)
    kinds = set()
    for layer in model.modules():
        if isinstance(layer, LAYERS):
            run = functools.partial(shared, layer)  # a copy of the layer has one with the copy
            checkpointed = vars(layer).get("forward")  # activation checkpointing
            if checkpointed is not None:
                run = functools.partial(
                    checkpointed.func, run, *checkpointed.args[1:], **checkpointed.keywords
                )
            layer.forward = run
            kinds.add(type(layer).__name__)
    names = " and ".join(sorted(kinds))
    logger.info(
        f"{FLAG}: {names} are compiled when they first run, and again for new kinds of batches: this takes "
        "minutes, in which nothing else is logged"
    )


class _Compiled:
    """The layers of a model in place of their `forward`.

    A layer that reads what is in no argument has `whole`, its forward with all that as arguments and results,
    and `compiled`, which calls that.
    """

    def __init__(self, backend: str, mode: str | None):
        self.run = torch.compile(_forward, dynamic=True, fullgraph=True, backend=backend, mode=mode)
        self.run_whole = torch.compile(
            _whole, dynamic=True, fullgraph=True, backend=backend, mode=mode
        )
        self.failed: set[type] = set()
        # Loaded here: that takes seconds, and most commands compile nothing
        errors = torch._dynamo.exc
        self.failures = (errors.TorchDynamoException, errors.FailOnRecompileLimitHit)

    def __call__(self, layer: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        kind = type(layer)
        options.update(zip(_NAMES[isinstance(layer, TransformerDecoderLayerBase)], args))
        trains = (
            layer.training and torch.is_grad_enabled() and options.get("incremental_state") is None
        )
        if not trains or kind in self.failed:
            return kind.forward(layer, x, **options)
        try:
            # a graph is for one layout: the first layer gets another, and a mask is a part of a larger one
            inputs = {name: _dense(value) for name, value in options.items()}
            _pad_both(x, inputs)
            # These are for the last layer, of the attention to it
            if inputs.get("encoder_out") is None:
                inputs.pop("need_attn", None)
                inputs.pop("need_head_weights", None)
            if hasattr(layer, "whole"):
                return layer.compiled(
                    self.run_whole, options.get("self_attn_mask"), _dense(x), inputs
                )
            return self.run(layer, _dense(x), inputs)
        except self.failures as error:
            self.failed.add(kind)
            _warn(f"{kind.__name__} cannot be compiled, and runs as without the flag", error)
            return kind.forward(layer, x, **options)

    def __deepcopy__(self, memo: Any) -> _Compiled:
        return self  # the code is no layer's own


def _forward(layer: Any, x: Tensor, options: Any) -> Any:
    return _first_dense(type(layer).forward(layer, x, **options))


def _whole(layer: Any, context: Any, x: Tensor, options: Any) -> Any:
    out, routings = layer.whole(context, x, **options)
    return _first_dense(out), routings


def _first_dense(out: Any) -> Any:
    """The layer's output as the next one wants it, which costs a compiled layer nothing."""
    if isinstance(out, Tensor):
        return out.contiguous()
    return (out[0].contiguous(), *out[1:])


def _dense(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.contiguous()
    return value


def _pad_both(x: Tensor, options: dict[str, Any]) -> None:
    """Where source or target have padding both get a mask: a decoder has two graphs then, not four."""
    memory = options.get("encoder_out")
    masks: dict[str, Any] = {"encoder_padding_mask": memory, "self_attn_padding_mask": x}
    if memory is None or all(options.get(name) is None for name in masks):
        return
    for name, tokens in masks.items():
        if options.get(name) is None:
            options[name] = torch.zeros(tokens.shape[1::-1], dtype=torch.bool, device=x.device)
