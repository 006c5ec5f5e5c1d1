"""The loss of an adaptive softmax against the full softmax, written out in float64."""

import argparse

import pytest
import torch
from fairseq import criterions
from fairseq.data import Dictionary
from fairseq.modules import AdaptiveSoftmax
from threads import assert_same_in_threads
from torch import nn

import moa_fairseq  # noqa: F401  (registers the criterions)
from moa_fairseq.errors import UserError

PAD = 1
WORDS = 48
CUTOFF = [10, 20]
UNTRAINED = [11, 21]  # the second word of each further cluster: fairseq takes it for padding
EVERY_WORD = torch.tensor([[*range(2, 25), PAD], [*range(25, WORDS), PAD]])


class Model(nn.Module):
    """Hidden states that are parameters, and an adaptive softmax above."""

    def __init__(self, cutoff=CUTOFF):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.adaptive_softmax = AdaptiveSoftmax(WORDS, 16, cutoff, dropout=0.0)
        self.states = nn.Parameter(torch.randn(*EVERY_WORD.shape, 16))
        self.double()

    def forward(self):
        return self.states, None

    def get_targets(self, sample, net_output):
        return sample["target"]


def criterion(name, **settings):
    cfg = criterions.CRITERION_DATACLASS_REGISTRY[name](
        **{"ddp_backend": "legacy_ddp", **settings}
    )
    cfg.sentence_avg = False
    dictionary = Dictionary()
    return criterions.CRITERION_REGISTRY[name].build_criterion(
        cfg, argparse.Namespace(target_dictionary=dictionary, source_dictionary=dictionary)
    )


def loss_of(model, name, **settings):
    return criterion(name, **settings)(model, {"net_input": {}, "target": EVERY_WORD})


def surprise_of_every_word(model):
    """−log p of each word in EVERY_WORD, by the definition: p(word) = p(cluster) · p(word in the cluster)."""
    softmax = model.decoder.adaptive_softmax
    states = model.states.view(-1, 16)
    head = torch.softmax(states @ softmax.head.weight.t(), -1)  # [N, 10 words and 2 clusters]
    parts = [head[:, : CUTOFF[0]]]
    for number, tail in enumerate(softmax.tail):
        inside = torch.softmax(states @ tail[0].weight.t() @ tail[2].weight.t(), -1)
        parts.append(head[:, CUTOFF[0] + number, None] * inside)
    probabilities = torch.cat(parts, 1)  # [N, 48]
    assert torch.allclose(probabilities.sum(1), torch.ones(1, dtype=torch.float64))
    target = EVERY_WORD.view(-1)
    surprise = -probabilities.gather(1, target[:, None])[:, 0].log()
    return {int(word): surprise[place] for place, word in enumerate(target) if word != PAD}


@pytest.mark.parametrize("name", ["adaptive_loss", "adaptive_loss_with_routing"])
def test_the_loss_is_that_of_the_full_softmax(name):
    torch.manual_seed(0)
    model = Model()
    loss, size, entries = loss_of(model, name)
    expected = sum(surprise_of_every_word(model).values())
    assert torch.allclose(loss, expected) and torch.allclose(entries["loss"], expected)
    assert size == entries["ntokens"] == WORDS - 2
    gradients, wanted = (
        torch.autograd.grad(x, list(model.parameters())) for x in (loss.sum(), expected)
    )
    assert all(torch.allclose(*pair) for pair in zip(gradients, wanted))


@pytest.mark.parametrize("name", ["adaptive_loss", "adaptive_loss_with_routing"])
def test_fairseqs_own_loss_leaves_a_word_of_each_cluster_out(name):
    torch.manual_seed(0)
    model = Model()
    surprise = surprise_of_every_word(model)
    softmax = model.decoder.adaptive_softmax
    head = torch.log_softmax(model.states.view(-1, 16) @ softmax.head.weight.t(), -1)
    left_out = 0.0
    for number, word in enumerate(UNTRAINED):  # of which the cluster alone counts
        place = EVERY_WORD.view(-1).tolist().index(word)
        left_out += surprise[word] + head[place, CUTOFF[0] + number]
    loss, _, _ = loss_of(model, name, fairseq_adaptive_loss=True)
    assert left_out > 1 and torch.allclose(loss, sum(surprise.values()) - left_out)


def test_padding_outside_of_the_first_cluster_is_refused():
    with pytest.raises(UserError, match="--adaptive-softmax-cutoff 1,"):
        loss_of(Model([1, 20]), "adaptive_loss")


def test_a_loss_is_that_of_its_own_thread():
    """They share the softmax, whose results the criterion reads by a hook."""
    model = Model()
    loss = criterion("adaptive_loss")
    states = [torch.randn_like(model.states) for _ in range(8)]

    class Part(nn.Module):
        """Hidden states of its own."""

        def __init__(self, number):
            super().__init__()
            self.decoder = model.decoder
            self.states = states[number]

        forward = Model.forward
        get_targets = Model.get_targets

    @torch.no_grad()
    def run(number):
        return loss(
            Part(number), {"net_input": {}, "target": EVERY_WORD, "ntokens": 1, "nsentences": 1}
        )[0]

    assert_same_in_threads(run, 20)
