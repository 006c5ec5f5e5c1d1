"""How much of a GPU's memory a training takes: an estimate from shapes, before anything runs.

Per parameter (P of them, Adam):

    fp32, amp                 4 weight + 4 gradient + 8 Adam                                       = 16 bytes
    fp16, bf16                2 weight + 2 gradient + 4 master + 4 its gradient + 8 Adam           = 20 bytes
    memory-efficient-fp16     2 weight + 2 gradient + 8 Adam                                       = 12 bytes
    several GPUs              + one gradient for the buckets that are reduced
    zero-sharding os          Adam's 8 bytes are divided by the number of GPUs
    fully_sharded             everything is divided by the number of GPUs

Per token of --max-tokens: what the backward pass needs, counted on the model's modules by
`activation_elements`, and for the loss a row of the vocabulary (log-probabilities and their gradient in
fp32, logits and theirs in the model's precision). Checked on a CPU in fp32 against what autograd keeps
(tests/recipes/test_memory.py): within 15 %. CUDA_BYTES for the CUDA context and libraries is assumed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, List, Mapping, Set

from torch import nn

from moa_fairseq.attention.base import MixtureAttention
from moa_fairseq.feed_forward.sigma_moe import SigmaMoE

CUDA_BYTES = 1_000_000_000
_ADAM_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    fixed: int = CUDA_BYTES

    @property
    def total(self) -> int:
        """All of it at the peak."""
        return sum(dataclasses.astuple(self))


def estimate_memory(
    model: nn.Module,
    vocabulary: int,
    max_tokens: int,
    precision: str,
    devices: int,
    flags: Mapping[str, Any],
) -> Memory:
    """The memory of each of `devices` GPUs.

    model: on any device; only shapes are read. precision: fp32, fp16, bf16 or amp. flags: the recipe's
    model and train flags, of which sharding, memory efficiency and checkpointing count here.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    half = precision in ("fp16", "bf16")
    size = 2 if half or precision == "amp" else 4
    weight = 2 if half else 4
    efficient = bool(flags.get("memory-efficient-fp16") or flags.get("memory-efficient-bf16"))
    master = 4 if half and not efficient else 0
    whole = flags.get("ddp-backend") == "fully_sharded"
    share = devices if whole else 1
    adam_share = devices if whole or flags.get("zero-sharding") == "os" else 1
    buckets = weight if devices > 1 and not whole else 0
    recompute = bool(flags.get("checkpoint-activations"))
    elements = activation_elements(model, recompute, bool(flags.get("activation-dropout")))
    return Memory(
        weights=parameters * (weight + master) // share,
        gradients=parameters * (weight + master + buckets) // share,
        optimizer=parameters * _ADAM_BYTES // adam_share,
        activations=elements * size * max_tokens,
        loss=vocabulary * (4 + 4 + 2 * size) * max_tokens,
    )


def activation_elements(model: nn.Module, recompute: bool = False, activation_dropout: bool = False) -> int:
    """Numbers kept for the backward pass per token, the vocabulary's aside.

    recompute: with activation checkpointing a layer keeps its input, and one layer at a time is there in
    whole.
    """
    layers = layers_of(model)
    per_layer = [_elements(layer, activation_dropout) for layer in layers]
    embeddings = [m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)]
    width = max(embeddings, default=0)
    around = 2 * 3 * width if layers else _elements(model, activation_dropout)
    return around + (len(layers) * width + max(per_layer, default=0) if recompute else sum(per_layer))


def layers_of(model: nn.Module) -> List[nn.Module]:
    """The layers of encoder and decoder."""
    names = ("EncoderLayer", "DecoderLayer", "EncoderLayerBase", "DecoderLayerBase")
    return [module for module in model.modules() if type(module).__name__.endswith(names)]


def _elements(layer: nn.Module, activation_dropout: bool) -> int:
    total = 0
    told: Set[nn.Module] = set()
    for name, module in layer.named_modules():
        if module in told:
            continue
        if isinstance(module, (MixtureAttention, SigmaMoE)):
            total += module.kept_elements()
            told.update(module.modules())
        elif type(module).__name__ == "MultiheadAttention":
            total += module.embed_dim
        elif isinstance(module, nn.Linear):
            total += module.out_features
            if name.rpartition(".")[2] == "fc1" and activation_dropout:
                total += module.out_features + module.out_features // 2  # its output, and a mask of bytes
        elif "Norm" in type(module).__name__:
            shape = getattr(module, "normalized_shape", ())
            total += 2 * (shape[0] if shape else 0)
    return total
