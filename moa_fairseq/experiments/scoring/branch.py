"""The size of attention's output before training, measured in an untrained model."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.modules import MultiheadAttention
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.attention import Attention


def branch_size(
    arch: str, vocab_size: int = 32000, embeddings: str = "shared", model_flags: Sequence[str] = ()
) -> float:
    """The norm of attention's output ÷ the norm of its input before training, a mean; see --branch.

    Args:
        arch, vocab_size, embeddings, model_flags: the arguments of `build_meta_model`.

    Raises:
        UserError: in the cases of `build_meta_model`, and if the model has no multi-head attention, cannot
            read 20 tokens, or does not fit into memory.
    """
    from moa_fairseq.experiments.scoring.meta_model import build_meta_model

    meta_model = build_meta_model(arch, vocab_size, embeddings, model_flags)
    needed = 4 * sum(map(torch.numel, meta_model.parameters()))
    if needed > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise UserError(
            f"--branch: the weights of {arch} need {needed / 2**30:.0f} GiB, and this machine has "
            f"{memory / 2**30:.0f}. Leave the flag out, or give fewer layers after a lone --."
        )
    sizes: list[float] = []

    def measure(module: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        sizes.append((output[0].norm() / kwargs["query"].norm()).item())

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for seed in range(1, 5):  # with a single seed, the size is off by 3 % for a tiny model
            torch.manual_seed(seed)
            model = build_meta_model(arch, vocab_size, embeddings, model_flags, weights=True).eval()
            for module in model.modules():
                if isinstance(module, (Attention, MultiheadAttention)):
                    module.register_forward_hook(measure, with_kwargs=True)
            tokens = torch.randint(4, vocab_size, (8, 20))
            inputs = [tokens]
            if isinstance(model, FairseqEncoderDecoderModel):
                inputs += [torch.full((8,), 20), tokens]
            try:
                model(*inputs)
            except (TypeError, IndexError) as error:
                raise UserError(
                    f"--branch: {arch} does not run on 20 random tokens ({error}). Leave the flag out, or "
                    "allow 20 positions."
                ) from error
    if not sizes:
        raise UserError(f"--branch: {arch} has no multi-head attention. Leave the flag out.")
    return sum(sizes) / len(sizes)
