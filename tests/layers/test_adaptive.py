"""Adaptive embeddings against a loop over words."""

import torch

from moa_fairseq.layers.adaptive import AdaptiveEmbedding

CUTOFFS = [5, 8, 12]
PADDING = 1  # also the place of words 6 and 9 in their bands


def test_embeddings_and_gradients_are_those_of_each_word():
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(CUTOFFS, 8, 2.0, output_dim=6, padding_idx=PADDING).double()
    ids = torch.tensor([list(range(12)), [11, 6, 1, 0, 8, 9, 1, 6, 4, 5, 7, 2]])
    out = embedding(ids)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    for word in range(12):
        band = sum(word >= cutoff for cutoff in CUTOFFS)
        words, projection = embedding.weights(band)
        row = word - [0, *CUTOFFS][band]
        expected = projection @ words[row]
        torch.testing.assert_close(out[ids == word], expected.expand((ids == word).sum(), -1))
        gradient = projection.T @ weight[ids == word].sum(0)
        if word == PADDING:
            gradient = torch.zeros_like(gradient)
        torch.testing.assert_close(words.grad[row], gradient)
