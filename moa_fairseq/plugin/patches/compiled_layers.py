"""--compile-layers: torch compiles the layers of a Transformer for training, each type of layer once.

Equal layers share their code for all batches, because sizes are inputs of a graph. Everything outside the
layers (embeddings, losses, the optimiser) runs as without the flag, and so do validation and generation.
"""

from __future__ import annotations

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
from torch import Tensor, nn

from moa_fairseq.files import private_folder
from moa_fairseq.plugin.patches.compile_flag import FLAG, LAYERS, ContextLayer, check
from moa_fairseq.plugin.patches.table import patch

logger = logging.getLogger(__name__)
# Type of layer → the names of what its forward takes after x
_ARGUMENTS = {kind: [*inspect.signature(kind.forward).parameters][2:] for kind in LAYERS}
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the folder whose compiled code torch runs
_TESTS = "plugin/patches/test_compiled_layers.py::"
# All layers together need a graph for each type of layer, precision, and batch of one sentence or one token.
_MOST_GRAPHS = 64
_LINE_WIDTH = 200  # characters of a quoted line: a compiler's command can have thousands


@patch(
    "fairseq.trainer:Trainer.__init__", f"{_TESTS}test_the_flag_reaches_the_trainer_of_any_model"
)
def compile_for_training(
    begin: Callable, trainer: Any, cfg: Any, task: Any, model: nn.Module, *args: Any, **options: Any
) -> None:
    """Compile the layers of the trainer's model if --compile-layers was given and torch can compile here.

    Only a training compiles, and only a training builds a trainer.
    """
    compiles = getattr(cfg.optimization, "compile_layers", False)
    if compiles:
        check(cfg, task, model)
    begin(trainer, cfg, task, model, *args, **options)
    if compiles and can_compile(trainer.device):
        compile_layers(model)


@patch(
    "fairseq.incremental_decoding_utils:FairseqIncrementalState.get_incremental_state",
    f"{_TESTS}test_compiled_layers_compute_the_same_in_few_graphs",
)
def read_no_state_where_there_is_none(get: Callable, module: Any, state: Any, key: str) -> Any:
    """Return None if there is no state, without making a key.

    fairseq makes a key per layer even without a state: layers would not share compiled code.
    """
    if state is None:
        return None
    return get(module, state, key)


def can_compile(device: torch.device) -> bool:
    """Whether torch can compile for a device on this machine; if not, a warning gives the reason."""
    # If this import fails, it is an error without the flag as well.
    importlib.import_module("torch._dynamo")
    inductor: Any = importlib.import_module("torch._inductor.runtime.runtime_utils")

    def trial(x: Tensor) -> tuple[Tensor, bool]:
        return x.sin() * x, torch.compiler.is_compiling()

    try:
        # The default folder is in /tmp, where another user may have made one of that name.
        private_folder(Path(os.environ.get(CACHE) or inductor.default_cache_dir()))
        _, compiled = torch.compile(trial, dynamic=True, fullgraph=True)(
            torch.ones(5, device=device)
        )
    except Exception as error:  # compilers, their caches and their tools raise errors of any type
        _warn("torch cannot compile here, and the layers run as without the flag", error)
        return False
    if not compiled:
        logger.warning(
            f"{FLAG}: torch's compiler is turned off (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE), and the "
            "layers run as without the flag"
        )
    return compiled


def _warn(what: str, error: Exception) -> None:
    """Log the lines of a compiler's error that say what is wrong."""
    lines = []
    for line in map(str.strip, str(error).splitlines()):
        if line and not line.startswith("Set TORCHDYNAMO_VERBOSE"):  # torch's advice
            lines.append(line[:_LINE_WIDTH])
    # The message of a C++ compiler comes after its long command, in lines with "error:".
    compilers = [line for line in lines if "error:" in line.lower()]
    reason = " ".join(lines[:2] + compilers[:2] if compilers else lines[:3])
    logger.warning(f"{FLAG}: {what}: {type(error).__name__}: {reason}")


def compile_layers(model: nn.Module, backend: str = "inductor", mode: str | None = None) -> None:
    """Let every layer of a model's Transformers train by compiled code.

    Args:
        model: the `forward` of its layers is replaced in place; its weights keep their names.
        backend, mode: arguments of torch.compile.
    """
    _configure_torch()
    gelu_accurate(torch.zeros(1))  # its first call sets an attribute, which a graph cannot do
    compiled = _CompiledLayers(backend, mode)
    names = set()
    for layer in model.modules():
        if isinstance(layer, LAYERS):
            # A deep copy of the layer gets a copy of this partial function, which holds the copied layer.
            forward = functools.partial(compiled, layer)
            checkpointed = vars(layer).get("forward")  # torch's checkpoint(layer's own forward, …)
            if checkpointed is not None:
                forward = functools.partial(checkpointed.func, forward, **checkpointed.keywords)
            layer.forward = forward
            names.add(type(layer).__name__)
    logger.info(
        f"{FLAG}: {' and '.join(sorted(names))} are compiled when they first run, and again for new kinds of "
        "batches: this takes minutes, in which nothing else is logged"
    )


def _configure_torch() -> None:
    config: Any = torch._dynamo.config
    config.specialize_float = True  # a dropout is a constant of the graph, not an input
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # True would split graphs at the borders of DistributedDataParallel's messages; a layer is smaller.
    config.optimize_ddp = False
    # A backward pass that cannot be compiled fails in the forward pass, which can still run uncompiled.
    functorch: Any = torch._functorch.config
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True


class _CompiledLayers:
    """The `forward` of a model's layers: compiled code in training, and the layer's own otherwise.

    Args:
        backend, mode: arguments of torch.compile.
    """

    def __init__(self, backend: str, mode: str | None):
        options: Any = {"dynamic": True, "fullgraph": True, "backend": backend, "mode": mode}
        self.compiled_forward = torch.compile(_forward, **options)
        self.compiled_with_context = torch.compile(_forward_with_context, **options)
        self.failed: set[type] = set()
        # These are loaded here because that takes seconds, and most commands compile nothing.
        errors = torch._dynamo.exc
        self.failures = (errors.TorchDynamoException, errors.FailOnRecompileLimitHit)

    def __call__(self, layer: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        layer_type = type(layer)
        kind = next(kind for kind in LAYERS if isinstance(layer, kind))
        options.update(zip(_ARGUMENTS[kind], args))
        if layer_type in self.failed or not _trains(layer, options):
            return layer_type.forward(layer, x, **options)
        inputs = _graph_inputs(x, options)
        try:
            if isinstance(layer, ContextLayer):
                mask = options.get("self_attn_mask")
                return layer.run_compiled(self.compiled_with_context, mask, _contiguous(x), inputs)
            return self.compiled_forward(layer, _contiguous(x), inputs)
        except self.failures as error:
            self.failed.add(layer_type)
            _warn(f"{layer_type.__name__} cannot be compiled, and runs as without the flag", error)
            return layer_type.forward(layer, x, **options)

    def __deepcopy__(self, memo: Any) -> _CompiledLayers:
        return self  # compiled code belongs to no single layer


def _forward(layer: Any, x: Tensor, options: Any) -> Any:
    return _contiguous(type(layer).forward(layer, x, **options))


def _forward_with_context(layer: ContextLayer, context: Any, x: Tensor, options: Any) -> Any:
    out, routings = layer.forward_with_context(context, x, **options)
    return _contiguous(out), routings


def _contiguous(value: Any) -> Any:
    """A tensor, or the first of a tuple, in the layout that graphs expect; in a graph this costs nothing."""
    if isinstance(value, tuple):
        return (_contiguous(value[0]), *value[1:])
    return value.contiguous() if isinstance(value, Tensor) else value


def _trains(layer: nn.Module, options: dict[str, Any]) -> bool:
    """Whether this pass belongs to training: it has gradients, and is not a step of generation."""
    return layer.training and torch.is_grad_enabled() and options.get("incremental_state") is None


def _graph_inputs(x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a layer's `forward` in one form for all layers and batches, so that few graphs suffice.

    Tensors become contiguous: the first layer's input and a mask cut from a larger one have other layouts. If
    only one of source and target has padding, the other gets a mask without padding: a decoder then has two
    graphs instead of four.

    Args:
        x: the layer's input, [T, B, C].
        options: the arguments of `forward` after x, by name.
    """
    inputs = {name: _contiguous(value) for name, value in options.items()}
    encoder_out = inputs.get("encoder_out")
    if encoder_out is None:  # there are no weights of attention to it that could be asked for
        inputs.pop("need_attn", None)
        inputs.pop("need_head_weights", None)
        return inputs
    of_mask = {"encoder_padding_mask": encoder_out, "self_attn_padding_mask": x}
    if any(inputs.get(name) is not None for name in of_mask):
        for name, tokens in of_mask.items():
            if inputs.get(name) is None:
                length, batch = tokens.shape[:2]
                inputs[name] = torch.zeros(batch, length, dtype=torch.bool, device=x.device)
    return inputs
