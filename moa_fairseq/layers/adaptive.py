"""Adaptive embeddings and softmax (arXiv 1809.10853, 1609.04309), whose parameters are named as in fairseq.

Words are sorted by frequency. Band i has the words from cutoff i − 1 up to, but without, cutoff i. Each band
is narrower than the one before by a constant factor.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _widths(width: int, factor: float, bands: int) -> list[int]:
    return [int(width // factor**band) for band in range(bands)]


class AdaptiveEmbedding(nn.Module):
    """Word embeddings that are narrower for rarer words, projected to one width.

    Args:
        cutoffs: for each band, the id of its last word plus one; the last cutoff is V, the size of the
            vocabulary.
        initial_dim: the width of the first band.
        factor: the width of a band divided by the width of the next band.
        output_dim: the width of the embeddings that are returned, C.
        padding_idx: the id of padding, in the first band.
    """

    def __init__(
        self,
        cutoffs: Sequence[int],
        initial_dim: int,
        factor: float,
        output_dim: int,
        padding_idx: int,
    ):
        super().__init__()
        self.cutoffs = list(cutoffs)
        self.embeddings = nn.ModuleList()
        first = 0
        for cutoff, width in zip(cutoffs, _widths(initial_dim, factor, len(cutoffs))):
            words = nn.Embedding(cutoff - first, width, None if first else padding_idx)
            nn.init.normal_(words.weight, std=width**-0.5)
            projection = nn.Linear(width, output_dim, bias=False)
            nn.init.xavier_uniform_(projection.weight)
            self.embeddings.append(nn.Sequential(words, projection))
            first = cutoff
        with torch.no_grad():
            self.weights(0)[0][padding_idx] = 0

    def weights(self, band: int) -> tuple[Tensor, Tensor]:
        """The embeddings [words, width] and the projection [C, width] of a band, counted from 0."""
        words, projection = self.embeddings[band].parameters()
        return words, projection

    def forward(self, ids: Tensor) -> Tensor:
        """The embeddings [..., C] of word ids [...]."""
        out: Tensor | None = None
        first = 0
        for cutoff, embed in zip(self.cutoffs, self.embeddings):
            in_band = (ids >= first) & (ids < cutoff)
            rows = embed((ids - first).clamp(0, cutoff - first - 1)).masked_fill(
                ~in_band.unsqueeze(-1), 0
            )
            out = rows if out is None else out + rows
            first = cutoff
        assert out is not None
        return out


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of words: over the first band and a class for each other band, then inside that band.

    Args:
        input_dim: D, the width of the inputs.
        cutoffs, factor: those of `AdaptiveEmbedding`.
        tied: whether words have the embeddings of an `AdaptiveEmbedding`, which each call passes.
        tied_projections: whether bands have the projections of that `AdaptiveEmbedding`, too.
        dropout: the probability with which an input, or a number of a narrower band, is zeroed in training.
    """

    def __init__(
        self,
        input_dim: int,
        cutoffs: Sequence[int],
        factor: float,
        tied: bool = False,
        tied_projections: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.cutoffs = list(cutoffs)
        classes = len(cutoffs) - 1
        self.dropout_module = nn.Dropout(dropout)
        self.head: nn.Module
        if tied:
            self.head = nn.Module()
            self.head.class_proj = nn.Linear(input_dim, classes, bias=False)
        else:
            self.head = nn.Linear(input_dim, cutoffs[0] + classes, bias=False)
        self.tail = nn.ModuleList()
        for band, width in enumerate(_widths(input_dim, factor, len(cutoffs))[1:], 1):
            parts = nn.ModuleDict()  # the keys are those of fairseq's nn.Sequential
            if not (tied and tied_projections):
                parts["0"] = nn.Linear(input_dim, width, bias=False)
            if not tied:
                parts["2"] = nn.Linear(width, cutoffs[band] - cutoffs[band - 1], bias=False)
            self.tail.append(parts)
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, embedding: AdaptiveEmbedding | None = None) -> Tensor:
        """Log-probabilities [..., V] of all words.

        Args:
            x: inputs, [..., D].
            embedding: the embeddings to use if the softmax is tied; else None.
        """
        x = self.dropout_module(x)
        first = self.cutoffs[0]
        if embedding is None:
            log_probs = self.head(x)
        else:
            classes = self.head.class_proj
            assert isinstance(classes, nn.Linear)
            log_probs = torch.cat([F.linear(x, embedding.weights(0)[0]), classes(x)], -1)
        log_probs = log_probs.log_softmax(-1)
        bands = [log_probs[..., :first]]
        for band, parts in enumerate(self.tail):
            assert isinstance(parts, nn.ModuleDict)
            narrow: Tensor
            if embedding is None:
                narrow = self.dropout_module(parts["0"](x))
                scores = parts["2"](narrow)
            else:
                words, projection = embedding.weights(band + 1)
                narrow = parts["0"](x) if "0" in parts else F.linear(x, projection.t())
                scores = F.linear(self.dropout_module(narrow), words)
            bands.append(scores.log_softmax(-1) + log_probs[..., first + band, None])
        return torch.cat(bands, -1)
