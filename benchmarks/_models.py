"""Whole translation models with random weights, and random sentences: for training.py and generation.py."""

import argparse
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import nn

from moa_fairseq.experiments.recipes.loading import find_recipe, load_recipe
from moa_fairseq.plugin.criterions.with_routing import LabelSmoothedCrossEntropyWithRouting
from moa_fairseq.process import flags

# fairseq's dense Transformers beside MoA's. Base to base is equal MACs (604M and 629M of 10 + 10 tokens)
# and nearly equal parameters; the vaswani big Transformer has MoA big's parameters.
BASE = "transformer"
PAIRS = {
    "moa_transformer_base": "transformer",
    "moa_transformer_big": "transformer_vaswani_wmt_en_de_big",
}
TINY = {"quickstart_moa": "quickstart_transformer"}  # recipes; equal MACs within 6 %
MINIATURE = {"moa_transformer_tiny": "transformer_tiny"}
SIZE = {
    "choices": ("tiny", "large"),
    "default": "large",
    "help": "the quickstart's models, or base and big",
}
VOCABULARY = 32768
TINY_VOCABULARY = 4096
SMALL_VOCABULARY = 512
BATCH = {"cpu": (40, 25), "cuda": (320, 25)}  # of one update: sentence pairs, tokens of each
TINY_BATCH = (85, 12)  # the quickstart's 1,024 tokens
SMALL_BATCH = (8, 9)


def pairs(args: argparse.Namespace) -> dict[str, str]:
    """Architecture, or a recipe's name → the dense one beside it, as --miniature and --size have it."""
    return MINIATURE if args.miniature else TINY if args.size == "tiny" else PAIRS


def dictionary(symbols: int) -> Dictionary:
    """A dictionary of `symbols` types, the special ones included."""
    words = Dictionary()
    for i in range(symbols - len(words)):
        words.add_symbol(f"w{i}")
    return words


def build(arch: str, words: Dictionary, device: str, dtype: torch.dtype, *more: str) -> nn.Module:
    """The model of fairseq-train --arch ARCH --share-all-embeddings and more flags, or a shipped recipe's."""
    line = ["--arch", arch, "--share-all-embeddings", *more]
    recipe = find_recipe(Path(arch))
    if recipe.is_file():
        line = flags(load_recipe(recipe).model.as_flags())
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", *line])
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    return ARCH_MODEL_REGISTRY[args.arch].build_model(args, task).to(device, dtype)


def criterion(arch: str, words: Dictionary) -> nn.Module:
    """Label-smoothed cross entropy; with the routers' losses and statistics for a mixture."""
    task = argparse.Namespace(target_dictionary=words)
    if "moa" in arch:
        return LabelSmoothedCrossEntropyWithRouting(task, False, 0.1)
    return LabelSmoothedCrossEntropyCriterion(task, False, 0.1)


def training_batch(args: argparse.Namespace) -> "tuple[Dictionary, dict[str, Any]]":
    """The dictionary, and the sample of one update."""
    words = vocabulary(args)
    return words, sentences(*batch_shape(args), words, args.device)


def vocabulary(args: argparse.Namespace) -> Dictionary:
    """A dictionary of the size that goes with the models."""
    return dictionary(
        SMALL_VOCABULARY
        if args.miniature
        else TINY_VOCABULARY
        if args.size == "tiny"
        else VOCABULARY
    )


def batch_shape(args: argparse.Namespace) -> "tuple[int, int]":
    """Sentence pairs of an update, and tokens of each."""
    return (
        SMALL_BATCH if args.miniature else TINY_BATCH if args.size == "tiny" else BATCH[args.device]
    )


def sentences(batch: int, length: int, words: Dictionary, device: str) -> dict[str, Any]:
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
