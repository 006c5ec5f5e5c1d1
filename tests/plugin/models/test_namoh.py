"""NAMOH's architectures: what they count, and a training through fairseq's commands."""

import pytest

from moa_fairseq.experiments.scoring.complexity import complexity

ARCHS = [
    "namoh_transformer_base",
    "namoh_transformer_iwslt_de_en",
    "namoh_transformer_tiny",
    "namoh_lm_base",
]


@pytest.mark.parametrize("arch", ARCHS)
def test_they_have_twice_the_dense_parameters_and_no_more_work(arch):
    dense = arch.replace("namoh_lm", "namoh_transformer_lm").replace("namoh", "dense")
    ours, theirs = (complexity(name, 1000) for name in (arch, dense))
    assert 0.95 < ours.attention_macs / theirs.attention_macs < 1.05
    assert ours.total_parameters > theirs.total_parameters


@pytest.mark.thorough
def test_it_trains_translates_and_shows_its_loads(loads_after_training):
    modules = loads_after_training(
        "namoh_transformer_tiny", logged=["load_balance_loss", "max_load"]
    )
    assert all(row["num_experts"] == 8 and row["experts_per_token"] == 4 for row in modules)
    keys = [row for row in modules if row["name"].endswith(".keys")]
    assert len(keys) == sum(row["name"].endswith("encoder_attn") for row in modules) > 0
