"""Models with latent attention: what they count, how they start, generation, a training by fairseq-train."""

import json
import math

import pytest
import torch
import whole_models

from moa_fairseq.experiments.scoring.complexity import complexity

ARCH = "latent_transformer_lm_base"
SIZES = ("--decoder-layers", 3, "--decoder-embed-dim", 96, "--decoder-ffn-embed-dim", 96)
SIZES += ("--decoder-attention-heads", 6, "--latent-dim", 80)


def test_the_base_model_costs_about_what_the_dense_one_does_and_leaves_a_sixth_in_the_cache():
    ours, dense = (complexity(arch, 1000) for arch in (ARCH, "dense_transformer_lm_base"))
    assert 1.0 < ours.attention_parameters / dense.attention_parameters < 1.02
    assert (dense.cache_bytes, ours.cache_bytes) == (2 * 2 * 512, 2 * (4 * 64 + 32))


def test_every_matrix_starts_by_its_fan_in():
    model = whole_models.build(
        ARCH, *SIZES, "--latent-norm", "--initialization", "depth-scaled"
    )
    for layer in model.decoder.layers:
        for name, fan_in in (
            ("q_proj", 96),
            ("latent_proj", 96),
            ("k_proj", 80),
            ("v_proj", 80),
            ("out_proj", 96),
        ):
            deviation = getattr(layer.self_attn, name).weight.std().item()
            assert deviation == pytest.approx(math.sqrt(2 / 3) / math.sqrt(fan_in), rel=0.05), (
                name
            )
        assert (layer.self_attn.latent_norm.weight == 1).all()


@pytest.mark.parametrize("positions", ["rope", "sinusoidal"])
def test_step_by_step_equals_all_at_once(positions):
    model = whole_models.build(ARCH, *SIZES, "--latent-norm", "--positions", positions).eval()
    with torch.no_grad():
        whole_models.assert_incremental_equals_full(model, ARCH)


@pytest.mark.slow
def test_it_trains(fairseq, toy_wiki_data, tmp_path):
    line = [
        toy_wiki_data,
        "--user-dir",
        "moa_fairseq",
        "--cpu",
        "--task",
        "language_modeling",
        "--arch",
        ARCH,
    ]
    line += [
        *SIZES,
        "--rotary-key-dim",
        7,
        "--attention-head-dim",
        15,
        "--share-decoder-input-output-embed",
    ]
    line += [
        "--criterion",
        "cross_entropy_with_routing",
        "--balance-loss",
        "none",
        "--z-loss-coef",
        0,
    ]
    line += [
        "--optimizer",
        "adam",
        "--lr",
        0.003,
        "--tokens-per-sample",
        16,
        "--batch-size",
        8,
        "--max-epoch",
        2,
    ]
    line += [
        "--num-workers",
        0,
        "--log-format",
        "json",
        "--log-interval",
        1,
        "--save-dir",
        tmp_path,
    ]
    done = fairseq("train", *line)
    losses = [
        float(json.loads(text.split(" | ")[-1])["valid_loss"])
        for text in (done.stdout + done.stderr).splitlines()
        if '"valid_loss"' in text
    ]
    assert len(losses) == 2 and losses[1] < losses[0]
