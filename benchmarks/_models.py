"""Whole translation models with random weights, and random sentences: for training.py and generation.py."""

import argparse
from typing import Any, Dict

import torch
from fairseq import options
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import nn

from moa_fairseq.criterions.with_routing import LabelSmoothedCrossEntropyWithRouting

# fairseq's dense Transformers beside MoA's. Base to base is equal MACs (604M and 629M of 10 + 10 tokens)
# and nearly equal parameters; the vaswani big Transformer has MoA big's parameters.
BASE = "transformer"
PAIRS = {
    "moa_transformer_base": "transformer",
    "moa_transformer_big": "transformer_vaswani_wmt_en_de_big",
}
MINIATURE = {"moa_transformer_tiny": "transformer_tiny"}
VOCABULARY, SMALL_VOCABULARY = 32768, 512
BATCH = {"cpu": (40, 25), "cuda": (320, 25)}  # of one update: sentence pairs, tokens of each
SMALL_BATCH = (8, 9)


def pairs(args: argparse.Namespace) -> Dict[str, str]:
    """Architecture → the dense one beside it, as --miniature has it."""
    return MINIATURE if args.miniature else PAIRS


def dictionary(symbols: int) -> Dictionary:
    """A dictionary of `symbols` types, the special ones included."""
    words = Dictionary()
    for i in range(symbols - len(words)):
        words.add_symbol(f"w{i}")
    return words


def build(arch: str, words: Dictionary, device: str, dtype: torch.dtype) -> nn.Module:
    """The model of fairseq-train --arch ARCH --share-all-embeddings."""
    flags = ["data", "--arch", arch, "--share-all-embeddings"]
    args = options.parse_args_and_arch(options.get_training_parser(), flags)
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).to(device, dtype)


def criterion(arch: str, words: Dictionary) -> nn.Module:
    """Label-smoothed cross entropy; with the routers' losses and statistics for a mixture."""
    task = argparse.Namespace(target_dictionary=words)
    if arch.startswith("moa"):
        return LabelSmoothedCrossEntropyWithRouting(task, False, 0.1)
    return LabelSmoothedCrossEntropyCriterion(task, False, 0.1)


def training_batch(args: argparse.Namespace) -> "tuple[Dictionary, Dict[str, Any]]":
    """The dictionary, and the sample of one update."""
    words = dictionary(SMALL_VOCABULARY if args.miniature else VOCABULARY)
    return words, sentences(*batch_shape(args), words, args.device)


def batch_shape(args: argparse.Namespace) -> "tuple[int, int]":
    """Sentence pairs of an update, and tokens of each."""
    return SMALL_BATCH if args.miniature else BATCH[args.device]


def sentences(batch: int, length: int, words: Dictionary, device: str) -> Dict[str, Any]:
    """A training sample of `batch` sentence pairs of `length` tokens; one in eight is a quarter shorter."""
    generator = torch.Generator().manual_seed(0)
    source, previous, target = (
        torch.randint(4, len(words), (batch, length), generator=generator) for _ in range(3)
    )
    short = max(1, length // 4)
    source[::8, :short] = words.pad()  # fairseq pads sources on the left
    previous[::8, -short:] = words.pad()
    target[::8, -short:] = words.pad()
    net_input = {
        "src_tokens": source.to(device),
        "src_lengths": source.ne(words.pad()).sum(1).to(device),
        "prev_output_tokens": previous.to(device),
    }
    tokens = int(target.ne(words.pad()).sum())
    ids = torch.arange(batch, device=device)
    return {"id": ids, "net_input": net_input, "target": target.to(device), "ntokens": tokens}
