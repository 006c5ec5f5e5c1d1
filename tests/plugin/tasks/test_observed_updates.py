"""What routers balance by: the micro-batches of updates that were made, each once."""

import pytest
import torch

from moa_fairseq.layers.routers import TopKRouter
from moa_fairseq.layers.running_statistics import running_statistics_of

ROUTED = (
    "--routing-bias-rate",
    0.01,
    "--criterion",
    "label_smoothed_cross_entropy_with_routing",
)


@pytest.fixture
def routed(build_trainer, monkeypatch):
    """(trainer, micro-batches, router → loads that it was told of, one list entry per update)."""
    trainer, samples = build_trainer(*ROUTED, arch="moa_transformer_tiny", task="translation")
    told = {}

    def update(router, loads):
        told.setdefault(router, []).append(loads.clone())

    monkeypatch.setattr(TopKRouter, "update", update)
    trainer.begin_epoch(1)
    return trainer, samples, told


def tokens_of(samples):
    """How many source and target tokens encoders and decoders route, padding apart."""
    source = sum(int(sample["net_input"]["src_lengths"].sum()) for sample in samples)
    return source, sum(sample["ntokens"] for sample in samples)


def assert_told(told, samples):
    source, target = tokens_of(samples)
    assert told
    for router, loads in told.items():
        assert len(loads) == 1
        assert int(loads[0].sum()) in (
            source * router.experts_per_token,
            target * router.experts_per_token,
        )


def test_routers_count_what_an_update_was_made_of(routed):
    """An empty micro-batch, of a worker with none left, is filled with one that has been trained on."""
    trainer, samples, told = routed
    trainer.train_step(samples[:1])
    told.clear()
    trainer.train_step([samples[1], {}])
    assert_told(told, samples[1:2])


def test_a_layer_that_observed_nothing_keeps_no_other_from_its_update(routed):
    """As LayerDrop leaves one out."""
    trainer, _, told = routed
    one, *others = running_statistics_of(trainer.get_model())
    one.observe(torch.ones_like(one.pending))
    trainer.get_model().set_num_updates(7)
    assert others and told[one][0].eq(1).all() and not one.has_pending


def test_an_update_that_overflowed_leaves_no_trace(routed, monkeypatch):
    trainer, samples, told = routed

    def overflow(clip_norm):
        raise OverflowError

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "clip_grad_norm", overflow)
        # Fairseq takes a GPU for granted here
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        trainer.train_step(samples[:2])
    assert trainer.get_num_updates() == 0 and not told
    trainer.train_step(samples[2:3])
    assert trainer.get_num_updates() == 1
    assert_told(told, samples[2:3])
