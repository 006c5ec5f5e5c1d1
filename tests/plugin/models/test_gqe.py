"""GQE's architectures: what they count, and a training through fairseq's commands."""

import pytest

from moa_fairseq.experiments.scoring.complexity import complexity

ARCHS = [
    "gqe_transformer_base",
    "gqe_transformer_iwslt_de_en",
    "gqe_transformer_tiny",
    "gqe_lm_base",
]


@pytest.mark.parametrize("arch", ARCHS)
def test_they_cost_about_what_the_dense_models_do(arch):
    dense = arch.replace("gqe_lm", "gqe_transformer_lm").replace("gqe", "dense")
    ours, theirs = (complexity(name, 1000).attention_macs for name in (arch, dense))
    assert 0.95 < ours / theirs < 1.05


def test_the_papers_language_model_has_about_250_million_parameters():
    assert 245e6 < complexity("gqe_rope_lm_250m", 50257).total_parameters < 255e6


@pytest.mark.thorough
def test_it_trains_translates_and_shows_its_loads(loads_after_training):
    modules = loads_after_training(
        "gqe_transformer_tiny", logged=["load_balance_loss", "max_load"]
    )
    assert all(row["num_experts"] == 8 and row["experts_per_token"] == 4 for row in modules)
    # As many choices in each group
    assert all(sum(row["load"][:4]) == pytest.approx(0.5) for row in modules)
