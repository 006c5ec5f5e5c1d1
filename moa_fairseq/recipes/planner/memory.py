"""How much of a GPU's memory, and of a disk, a training takes: before anything runs.

Per parameter (P of them, with Adam's 8 bytes; other optimizers: OPTIMIZER_BYTES):

    fp32, amp                 4 weight + 4 gradient + 8 Adam                                       = 16 bytes
    fp16, bf16                2 weight + 2 gradient + 4 master + 4 its gradient + 8 Adam           = 20 bytes
    memory-efficient-fp16     2 weight + 2 gradient + 8 Adam                                       = 12 bytes
    several GPUs              + one gradient for the buckets that are reduced
    zero-sharding os          Adam's 8 bytes are divided by the number of GPUs
    fully_sharded             everything is divided by the number of GPUs

Per token of --max-tokens: what autograd keeps, measured on this machine's CPU with the recipe's own model of
one and two layers (`measure_activations`), and for the loss three rows of logits: log-probabilities, their
gradient and that of the logits. Compared with whole updates on a CPU in fp32 (tests/recipes/test_memory.py):
within 15 %. For a GPU the measurement stands in for its fused attention and its masks of bytes; on GPUs
this was not run. CUDA_BYTES for the CUDA context and libraries is assumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.recipes.schema import CLASSIFICATION, MASKED_LM, TRANSLATION, Recipe
from moa_fairseq.running import command_line

CUDA_BYTES = 1_000_000_000
OPTIMIZER_BYTES = {"nag": 4, "sgd": 4, "adagrad": 4}  # of a parameter; of others Adam's
_ADAM_BYTES = 8
HALF = ("fp16", "bf16")
_MEASURED_TOKENS, _SYMBOLS = 256, 100


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. loss: None where the frequencies of an adaptive softmax's words are not known."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: Optional[int]
    fixed: int = CUDA_BYTES

    @property
    def total(self) -> Optional[int]:
        """All of it at the peak."""
        return None if self.loss is None else sum(dataclasses.astuple(self))


def estimate_memory(
    model: nn.Module,
    kept: float,
    logits: Optional[float],
    max_tokens: int,
    precision: str,
    devices: int,
    flags: Mapping[str, Any],
) -> Memory:
    """The memory of each of `devices` GPUs.

    model: on any device; only shapes are read. kept: bytes of a token (`measure_activations`); logits: how
    many a token has (`logits_per_token`). precision: fp32, fp16, bf16 or amp. flags: the recipe's model and
    train flags, of which the optimizer, sharding and memory efficiency count here.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    half = precision in HALF
    weight = 2 if half else 4
    cast = 2 if precision == "amp" else 0  # autocast keeps the weights in bfloat16, too
    efficient = bool(flags.get("memory-efficient-fp16") or flags.get("memory-efficient-bf16"))
    master = 4 if half and not efficient else 0
    whole = flags.get("ddp-backend") == "fully_sharded"
    share = devices if whole else 1
    adam_share = devices if whole or flags.get("zero-sharding") == "os" else 1
    buckets = weight if devices > 1 and not whole else 0
    return Memory(
        weights=parameters * (weight + master + cast) // share,
        gradients=parameters * (weight + master + buckets) // share,
        optimizer=parameters * optimizer_bytes(flags) // adam_share,
        activations=round(kept * max_tokens),
        loss=None if logits is None else round(logits * 3 * 4 * max_tokens),
    )


def optimizer_bytes(flags: Mapping[str, Any]) -> int:
    """What the optimizer remembers of a parameter."""
    return OPTIMIZER_BYTES.get(str(flags.get("optimizer")), _ADAM_BYTES)


def logits_per_token(
    recipe: Recipe, model: nn.Module, vocabulary: int, data: Optional[Path]
) -> Optional[float]:
    """How many logits a token of --max-tokens has, on average.

    Of an adaptive softmax every token has those of the frequent words, and only the tokens in a further band
    those of that band: dict.txt in `data` says how many; None without it.
    """
    adaptive = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    if recipe.kind == CLASSIFICATION:  # one row of a few classes for a whole sentence
        return 0.0
    if recipe.kind == MASKED_LM:  # fairseq projects the masked tokens alone
        return vocabulary * float(recipe.training_flags.get("mask-prob", 0.15))
    if adaptive is None:
        return float(vocabulary)
    if data is None:
        return None
    from fairseq.data import Dictionary

    counts, cutoff = Dictionary.load(str(data / "dict.txt")).count, adaptive.cutoff
    bands = [(high - low) * sum(counts[low:high]) for low, high in zip(cutoff, cutoff[1:])]
    return cutoff[0] + len(bands) + sum(bands) / sum(counts)


def measure_activations(
    recipe: Recipe, model: nn.Module, lengths: Sequence[int], vocabulary: int, precision: str, on_gpu: bool
) -> float:
    """Bytes that a forward pass keeps for the backward pass, per token of --max-tokens, logits aside.

    model: the whole model, of which the layers are counted. lengths: tokens of a source and a target
    sentence. Models of one layer, and of two in encoder or decoder, say what a layer keeps: all layers of a
    stack keep the same. With activation checkpointing one layer at a time is there in whole.
    """
    from moa_fairseq.evaluation.skeleton import build_skeleton

    depths = {side: len(layers_of(getattr(model, side, nn.Module()))) for side in ("encoder", "decoder")}
    depths = {side: depth for side, depth in depths.items() if depth}
    recompute = bool(recipe.training_flags.get("checkpoint-activations"))
    if not any("adaptive" in type(module).__name__.lower() for module in model.modules()):
        vocabulary = _SYMBOLS  # what is kept does not depend on it
    sentences = max(1, _MEASURED_TOKENS // max(lengths))

    @functools.cache
    def kept(deeper: str = "", checkpointing: bool = recompute) -> float:
        values = {**recipe.model.as_flags(), "arch": None, "checkpoint-activations": checkpointing}
        values.update((name, rate) for name, rate in recipe.training_flags.items() if "dropout" in name)
        values.update({f"{side}-layers": 1 + (side == deeper) for side in depths})
        if recipe.kind != TRANSLATION:
            values["tokens-per-sample"] = lengths[1]  # so many positions
        flags = command_line.flags(values)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            shallow = build_skeleton(recipe.model.arch, vocabulary, "separate", flags, weights=True).train()
            if precision in HALF:
                shallow = shallow.bfloat16()  # kept by fp16 in the same sizes
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"))
                if on_gpu:
                    stack.enter_context(_gpu_kernels())
                few, more = (_kept_bytes(shallow, recipe, lengths, n) for n in (sentences, 2 * sentences))
        return more - few  # without what does not grow, such as masks and autocast's weights

    one_layer, total = 0.0, kept()
    for side, depth in depths.items():
        total += (depth - 1) * (kept(side) - kept())
        if recompute:
            one_layer = max(one_layer, kept(side, False) - kept("", False))
    return (total + one_layer) / (sentences * max(lengths))


def disk(
    recipe: Recipe, model: nn.Module, on_gpu: bool, updates: Optional[int], epochs: Optional[int]
) -> Dict[str, Optional[int]]:
    """Bytes of the checkpoints and the average that a training leaves, as fairseq writes them.

    A checkpoint has the weights and what the optimizer remembers, in fp32 whatever the precision. A tied
    weight stands in it once for each of its names if it comes from a GPU. updates, epochs: begun ones of the
    training, None if that is not known. "checkpoint": of one file, two more of which are there while a new
    one is written; "total" is None where nothing limits their number.
    """
    flags, train = recipe.training_flags, recipe.train
    own = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - own.keys()
    state = [values for name, values in model.state_dict().items() if on_gpu or name not in tied]
    weights = sum(values.numel() * values.element_size() for values in state)
    remembered = sum(parameter.numel() for parameter in own.values()) * optimizer_bytes(flags)
    size = weights + (0 if flags.get("no-save-optimizer-state") else remembered)
    size += weights if flags.get("store-ema") else 0

    def number(most: Optional[int], done: Optional[int], interval: int) -> Optional[int]:
        made = None if done is None else done // interval
        return min((files for files in (most, made) if files is not None), default=None)

    keep, interval = flags.get("keep-interval-updates", -1), flags.get("save-interval-updates")
    kept = [
        1,  # checkpoint_last.pt
        0 if flags.get("disable-validation") else 1 + flags.get("keep-best-checkpoints", 0),
        0
        if flags.get("no-epoch-checkpoints")
        else number(train.keep_last_epochs, epochs, flags.get("save-interval", 1)),
        number(keep if keep > 0 else None, updates, interval) if interval else 0,
    ]
    counted = [files for files in kept if files is not None]
    saves = recipe.finetune != "noft" and not flags.get("no-save")
    files = 0 if not saves else sum(counted) if len(counted) == len(kept) else None
    average = weights if recipe.average else 0
    total = None if files is None else files * size + average
    return {"checkpoint": size, "files": files, "average": average, "total": total}


def layers_of(model: nn.Module) -> List[nn.Module]:
    """The layers of encoder and decoder."""
    names = ("EncoderLayer", "DecoderLayer", "EncoderLayerBase", "DecoderLayerBase")
    return [module for module in model.modules() if type(module).__name__.endswith(names)]


def _kept_bytes(model: Any, recipe: Recipe, lengths: Sequence[int], sentences: int) -> int:
    """Bytes that autograd keeps of a forward pass over so many sentences, parameters aside."""
    source, target = (torch.randint(5, _SYMBOLS, (sentences, length)) for length in lengths)
    read: Dict[str, Any] = {"src_tokens": source, "features_only": True}
    if recipe.kind == TRANSLATION:
        read.update(src_lengths=torch.full((sentences,), lengths[0]), prev_output_tokens=target)
    chunks = recipe.training_flags.get("carried-chunks")
    if chunks:
        model.decoder.carry_context(chunks)
        with torch.no_grad():
            for chunk in range(chunks):
                model(**read, chunk=chunk)
        read["chunk"] = chunks
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: Dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**read)
    del output  # it held the storages: before this no address can have stood for two of them
    return sum(size for address, size in storages.items() if address not in parameters)


class _FusedAttention(torch.autograd.Function):
    """What the fused attention of a GPU keeps: no attention weights. Its result here is zero."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Tensor:
        out = q.new_zeros(*q.shape[:-1], v.size(-1))
        log_sums = torch.zeros(q.shape[:-1])
        ctx.save_for_backward(q, k, v, mask, out, log_sums)
        return out


@contextlib.contextmanager
def _gpu_kernels() -> Iterator[None]:
    """A block in which attention and dropout keep on a CPU what they keep on a GPU."""
    functional: Any = F
    plain = F.scaled_dot_product_attention, F.dropout

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Optional[Tensor] = None, *_: Any, **__: Any):
        return _FusedAttention.apply(q, k, v, attn_mask)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    functional.scaled_dot_product_attention, functional.dropout = attention, dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = plain
