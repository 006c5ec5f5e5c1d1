"""Adaptive embeddings and the adaptive softmax against a loop over words."""

import pytest
import torch

from moa_fairseq.layers.adaptive import AdaptiveEmbedding, AdaptiveSoftmax

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


@pytest.mark.parametrize("tied_projections", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_are_those_of_each_word(tied, tied_projections):
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(CUTOFFS, 6, 2.0, output_dim=6, padding_idx=PADDING).double()
    softmax = AdaptiveSoftmax(6, CUTOFFS, 2.0, tied, tied_projections).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    log_probs = softmax(x, embedding if tied else None)
    parameters = dict(softmax.named_parameters())
    if tied:
        first = torch.cat([embedding.weights(0)[0], parameters["head.class_proj.weight"]])
    else:
        first = parameters["head.weight"]
    scores = (x @ first.T).log_softmax(-1)
    torch.testing.assert_close(log_probs[:, : CUTOFFS[0]], scores[:, : CUTOFFS[0]])
    for band in (1, 2):
        words, projection = embedding.weights(band)
        if not tied:
            words = parameters[f"tail.{band - 1}.2.weight"]
        down = parameters.get(f"tail.{band - 1}.0.weight", projection.T)
        assert (down is not parameters.get(f"tail.{band - 1}.0.weight")) == (
            tied and tied_projections
        )
        within = (x @ down.T @ words.T).log_softmax(-1)
        expected = within + scores[:, CUTOFFS[0] + band - 1, None]
        torch.testing.assert_close(log_probs[:, CUTOFFS[band - 1] : CUTOFFS[band]], expected)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, dtype=torch.float64))
