"""MoH's architectures through fairseq's commands, and what they count."""

import pytest

from moa_fairseq.experiments.scoring.complexity import complexity


def llm(layers, width, feed_forward, heads):
    sizes = {
        "layers": layers,
        "embed-dim": width,
        "ffn-embed-dim": feed_forward,
        "attention-heads": heads,
    }
    flags = [word for name, size in sizes.items() for word in (f"--decoder-{name}", str(size))]
    return [*flags, "--positions", "rope", "--gated-feed-forward", "--rms-norm"]


# arch → a dense model of the same sizes, its heads, its flags
ARCHS = {
    "moh_transformer_tiny": ("dense_transformer_tiny", 4, []),
    "moh_transformer_base": ("transformer", 8, []),
    "moh_transformer_big": ("transformer_vaswani_wmt_en_de_big", 16, []),
    "moh_transformer_iwslt_de_en": ("dense_transformer_iwslt_de_en", 8, []),
    "moh_roberta_medium": ("roberta_medium_wt103", 8, []),
    "moh_transformer_lm_small": ("dense_transformer_lm_base", 12, llm(12, 768, 2048, 12)),
    "moh_transformer_lm_large": ("dense_transformer_lm_base", 16, llm(24, 1536, 4096, 16)),
}


@pytest.mark.parametrize("arch", ARCHS)
def test_the_dense_models_parameters_and_a_router(arch):
    dense, heads, flags = ARCHS[arch]
    ours = complexity(arch, 1000)
    theirs = complexity(dense, 1000, model_flags=flags)
    assert ours.total_parameters - ours.parameters["router"] == theirs.total_parameters
    # three quarters of the heads have queries, outputs and rows of attention
    assert ours.macs["attention_matmul"] * 4 == theirs.macs["attention_matmul"] * 3
    for part in ("encoder_attention", "decoder_self_attention"):
        assert ours.macs[part] * 8 == theirs.macs[part] * 7
    # W_s, W_r and W_h: a row for each head, and two
    assert ours.parameters["router"] % (heads + 2) == 0


@pytest.mark.thorough
def test_it_trains_translates_and_shows_its_loads(loads_after_training):
    flags = (
        "--moh-scaling",
        "released",
        "--moh-skip",
        "always",
        "--balance-loss",
        "moh-released",
    )
    flags += ("--aux-loss-reduce", "mean", "--z-loss-coef", 0)
    modules = loads_after_training(
        "moh_transformer_tiny", *flags, logged=["balance_loss", "max_load"]
    )
    assert len(modules) == 3  # two of the four heads are shared: nothing to show there
    assert all(row["num_experts"] == 2 == len(row["gate_share"]) for row in modules)
    assert all(row["experts_per_token"] == 1 and row["tokens"] > 20 for row in modules)


@pytest.mark.thorough
def test_a_causal_language_model_trains_and_is_evaluated(fairseq, toy_wiki_data, tmp_path):
    user_dir = ("--user-dir", "moa_fairseq", "--cpu", "--task", "language_modeling")
    fairseq(
        *(
            "train",
            toy_wiki_data,
            *user_dir,
            "--arch",
            "moh_transformer_lm_small",
            "--max-epoch",
            1,
        ),
        *("--decoder-layers", 2, "--decoder-embed-dim", 24, "--decoder-ffn-embed-dim", 24),
        *("--tokens-per-sample", 24, "--max-tokens", 240, "--optimizer", "adam", "--lr", 0.01),
        *(
            "--criterion",
            "cross_entropy_with_routing",
            "--balance-loss",
            "moh",
            "--save-dir",
            tmp_path,
        ),
    )
    path = (
        "--path",
        tmp_path / "checkpoint_last.pt",
        "--tokens-per-sample",
        24,
        "--max-tokens",
        240,
    )
    assert "Perplexity" in "".join(
        vars(fairseq("eval_lm", toy_wiki_data, *user_dir, *path, "--gen-subset", "valid"))[
            stream
        ]
        for stream in ("stdout", "stderr")
    )
