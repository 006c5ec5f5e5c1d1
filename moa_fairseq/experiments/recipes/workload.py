"""The model of a recipe without weights, its cost, and the size of its training set."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from moa_fairseq import process
from moa_fairseq.experiments.recipes.batch import CorpusSize, training_set
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.scoring.complexity import Cost, count
from moa_fairseq.experiments.scoring.meta_model import build_meta_model

# Bytes that a batch in half precision holds for a token, fitted to the four peaks in
# results/benchmarks/training-cuda.json: per MAC of the attention and of the feed-forward, divided by the
# model's width, and per symbol of the vocabulary, which is a MAC of the output divided by the width.
ATTENTION_BYTES = 1.94
FEED_FORWARD_BYTES = 2.46
OUTPUT_BYTES = 12.7
MASKED = 0.15  # fraction of a masked language model's tokens that have outputs
FALLBACK_VOCABULARY = 32000  # if table, data and recipe do not give the number of symbols
# Tokens of both sentences, if neither data nor recipe give their mean lengths
FALLBACK_LENGTH = 512


class Workload(NamedTuple):
    """The part of the plan that does not depend on the hardware.

    Args:
        model: the model on the meta device, without weights.
        cost: parameters, and MACs of a forward pass over a sentence pair of mean length.
        vocabulary: the number of symbols of the dictionary.
        lengths: mean length of source sentences and of target sentences, in tokens.
        size: the size of the training set, or None if it is unknown.
    """

    model: Any
    cost: Cost
    vocabulary: int
    lengths: list[int]
    size: CorpusSize | None

    @property
    def macs_per_target_token(self) -> float:
        """MACs of a forward pass over a sentence pair, divided by its target tokens."""
        return self.cost.total_macs / self.lengths[1]

    def batch_bytes(self, precision: str, masked: bool) -> float:
        """Approximate memory of a batch, in bytes per token of max_tokens.

        Args:
            precision: see `precision_name`.
            masked: True for a masked language model, which has outputs for some tokens only.
        """
        macs = self.cost.macs
        attention = sum(macs[part] for part in macs if part.endswith("attention"))
        output = macs["output"] * (MASKED if masked else 1)
        width = next(m.embedding_dim for m in self.model.modules() if isinstance(m, nn.Embedding))
        per_pair = (
            ATTENTION_BYTES * attention
            + FEED_FORWARD_BYTES * macs["feed_forward"]
            + OUTPUT_BYTES * output
        ) / width
        per_token = per_pair / max(self.lengths)
        return per_token * (2 if precision == "fp32" else 1)


def workload(recipe: Recipe, data: Path | None) -> Workload:
    """Build the model without weights and count it.

    Args:
        recipe: the training; its flags give the model and, for a language model, the length of a sample.
        data: a folder made by fairseq-preprocess, or None.

    Raises:
        UserError: for a model that fairseq does not build, and data that cannot be read.
    """
    size = training_set(recipe, data)
    vocabulary = recipe.data.bpe or FALLBACK_VOCABULARY
    if size:
        vocabulary = size.vocabulary
    line = process.flags(recipe.model.as_flags() | {"arch": None})
    model = build_meta_model(recipe.model.arch, vocabulary, "separate", line)
    sample = recipe.training_flags.get("tokens-per-sample")
    lengths = [int(sample or FALLBACK_LENGTH)] * 2
    if not sample and size and size.sentences:
        source = max(1, round(size.source_tokens / size.sentences))
        lengths = [source, max(1, round(size.target_tokens / size.sentences))]
    return Workload(model, count(model, *lengths), vocabulary, lengths, size)
