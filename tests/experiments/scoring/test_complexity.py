"""Counts by hand and against torch's own FLOP counter; test_compare.py has the papers' printed numbers."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moa_fairseq.cli import main
from moa_fairseq.experiments.scoring.complexity import PARTS, as_json, complexity, count
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.layers.attention import Attention


def test_one_moa_layer_by_hand():
    d = 16
    ffn = 24
    vocab = 50
    S = 7
    T = 5
    K = 2
    E = 3
    D = 4
    flags = f"--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim {d} --decoder-embed-dim {d} "
    flags += f"--encoder-ffn-embed-dim {ffn} --decoder-ffn-embed-dim {ffn} "
    flags += f"--experts-per-token {K} --num-experts {E} --expert-dim {D}"
    cost = complexity("moa_transformer_tiny", vocab, S, T, model_flags=flags.split())
    experts = K * D * d * 2
    router = E * d
    keys = 2 * D * d
    assert cost.macs["encoder_attention"] == S * (experts + keys)
    assert cost.macs["decoder_self_attention"] == T * (experts + keys)
    assert cost.macs["cross_attention"] == T * experts + S * keys
    assert cost.macs["router"] == (S + 2 * T) * router
    assert cost.macs["feed_forward"] == (S + T) * 2 * d * ffn
    assert cost.macs["output"] == T * d * vocab
    assert cost.macs["attention_matmul"] == 2 * K * D * (S * S + T * T + T * S)
    everything = (
        (S + 2 * T) * (experts + router) + (2 * S + T) * keys + cost.macs["attention_matmul"]
    )
    assert cost.attention_macs == everything
    assert (
        cost.attention_macs == cost.total_macs - cost.macs["feed_forward"] - cost.macs["output"]
    )
    assert cost.attention_parameters == 3 * (E * D * d * 2 + keys + router)
    assert cost.parameters["encoder_attention"] == E * D * d * 2 + keys
    assert cost.parameters["router"] == 3 * router
    assert cost.parameters["embedding"] == vocab * d
    assert cost.parameters["output"] == 0  # tied
    assert cost.parameters["norms"] == 5 * 2 * d


@pytest.mark.parametrize("arch", ["transformer_tiny", "moa_transformer_tiny"])
def test_plain_macs_equal_torchs_flop_counter(arch):
    S = 9
    T = 6
    # K = E: a backend may then compute nothing but the products that are needed
    flags = ["--dropout", "0"] + (["--num-experts", "4"] if arch.startswith("moa") else [])
    # training mode: torch's fused inference path of the dense encoder hides its products
    model = build_meta_model(arch, 60, model_flags=flags).to_empty(device="cpu").train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for stack in (model.encoder, model.decoder):
        stack.embed_positions.weights = torch.zeros(50, stack.embed_positions.embedding_dim)
    source = torch.randint(4, 60, (1, S))
    target = torch.randint(4, 60, (1, T))
    counter = FlopCounterMode(display=False)
    # The fused kernels are not counted on CPU
    with (
        counter,
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        model(src_tokens=source, src_lengths=torch.tensor([S]), prev_output_tokens=target)
    assert count(model, S, T).total_macs == counter.get_total_flops() // 2


def test_cross_self_attention_projects_the_source_too():
    """Of one layer: q and out of T tokens, k and v of S + T, and T·(S + T) scores."""
    S = 30
    T = 20
    d = 128
    flags = ["--decoder-layers=1", "--cross-self-attention", "--no-cross-attention"]
    ours = complexity("dense_transformer_tiny", 60, S, T, model_flags=flags)
    sizes = {"embed-dim": d, "ffn-embed-dim": 256, "attention-heads": 4}
    small = [
        f"--{side}-{name}={size}"
        for name, size in sizes.items()
        for side in ("encoder", "decoder")
    ]
    theirs = complexity(
        "transformer", 60, S, T, model_flags=[*flags, "--encoder-layers=4", *small]
    )
    assert ours.macs["decoder_self_attention"] == (2 * T + 2 * (S + T)) * d * d
    scores = 2 * d * (4 * S * S + T * (S + T))
    assert ours.macs["attention_matmul"] == theirs.macs["attention_matmul"] == scores
    assert theirs.macs["decoder_self_attention"] == ours.macs["decoder_self_attention"]


def test_attention_is_counted_alike_in_fairseqs_model_and_ours():
    sizes = {"layers": 4, "embed-dim": 128, "ffn-embed-dim": 256, "attention-heads": 4}
    small = [
        f"--{side}-{name}={size}"
        for name, size in sizes.items()
        for side in ("encoder", "decoder")
    ]
    theirs = complexity("transformer", 9700, model_flags=small)
    ours = complexity("dense_transformer_tiny", 9700)
    assert as_json(theirs) == as_json(ours)
    assert ours.attention_parameters == 12 * 4 * (128 * 128 + 128)
    # Of two models a tenth apart in all, the attentions are three tenths apart.
    gates = complexity(
        "moa_transformer_tiny", 9700, model_flags=["--num-experts", "4", "--expert-dim", "64"]
    )
    assert gates.total_macs / ours.total_macs == pytest.approx(1.09, abs=0.01)
    assert gates.attention_macs / ours.attention_macs == pytest.approx(1.29, abs=0.01)
    # A mixture in the feed-forward is not attention.
    mixed = complexity(
        "dense_transformer_tiny", 9700, model_flags=["--sigma-moe-num-experts", "4"]
    )
    assert mixed.attention_macs == ours.attention_macs and mixed.macs["router"] > 0


@pytest.mark.parametrize(
    ("arch", "flags", "numbers"),
    [
        ("transformer_lm_gpt", "", 2 * 768),
        ("dense_transformer_lm_base", "", 2 * 8 * 64),
        ("dense_transformer_lm_base", "--key-heads 1", 2 * 64),
        ("moa_lm_base", "", 2 * 128),
        ("switchhead_lm_base", "--switchhead-heads 2 --expert-dim 100", 2 * 2 * 100),
        ("gqe_lm_base", "--gqe-groups 4 --expert-dim 72", 2 * 4 * 72),
        (
            "namoh_lm_base",
            "--experts-per-token 4 --expert-dim 32",
            2 * 4 * 32 + 4 * 4,
        ),  # and 4 indices
        ("dense_transformer_tiny", "", 2 * 128),
    ],
)
def test_bytes_of_cache(arch, flags, numbers):
    assert complexity(arch, 100, model_flags=flags.split()).cache_bytes == 2 * numbers


@torch.no_grad()
@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        (
            "dense_transformer_lm_base",
            "--attention-head-dim 48 --key-heads 2 --positions rope --window 3",
        ),
        ("latent_transformer_lm_base", "--latent-dim 20"),
        ("moa_lm_base", "--query-key-norm head --positions rope"),
        ("moh_transformer_lm_base", ""),
        ("switchhead_lm_base", "--switchhead-heads 3 --expert-dim 20"),
        ("gqe_lm_base", "--gqe-groups 3 --expert-dim 40"),
    ],
)
def test_a_cache_of_one_size_has_these_bytes(arch, flags, capsys):
    flags = ["--decoder-layers", "1", *flags.split()]
    assert (
        main(["complexity", "--arch", arch, "--vocab-size", "100", "--json", "--", *flags]) == 0
    )
    stated = json.loads(capsys.readouterr().out)["cache_bytes"]
    model = build_meta_model(arch, 100, "shared", flags, weights=True)
    attention = model.decoder.layers[0].self_attn.bfloat16().eval()
    cache = attention.new_cache(batch=3, max_length=7)
    x = torch.zeros(3, 2, attention.embed_dim, dtype=torch.bfloat16)
    Attention.forward(attention, x, causal=True, cache=cache)
    assert sum(tensor.nbytes for tensor in cache.tensors() if tensor.dim()) == 3 * 7 * stated


def test_an_encoder_has_no_cache():
    assert complexity("dense_roberta_tiny", 100).cache_bytes is None


def test_every_parameter_is_counted_once():
    model = build_meta_model(
        "moa_transformer_tiny", 100, "separate", ["--expert-bias", "--routing-noise"]
    )
    cost = count(model, 3, 3)
    assert cost.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.parameters["output"] == 100 * 128
    assert cost.parameters["other"] == 0
    assert cost.not_counted == []


def test_noise_costs_parameters_but_no_macs():
    plain = complexity("moa_transformer_tiny")
    noisy = complexity("moa_transformer_tiny", model_flags=["--routing-noise"])
    assert noisy.total_macs == plain.total_macs
    assert noisy.parameters["router"] == 2 * plain.parameters["router"]


def test_feed_forwards_of_experts_attend_to_nothing():
    flags = ["--encoder-layers=1", "--decoder-layers=1"]
    plain = complexity("moa_transformer_tiny", model_flags=flags)
    flags += ["--sigma-moe-num-experts=4", "--sigma-moe-experts-per-token=2"]
    experts = complexity("moa_transformer_tiny", model_flags=flags)
    assert experts.macs["attention_matmul"] == plain.macs["attention_matmul"]


def test_modules_without_a_rule_are_named():
    assert complexity("lightconv_wmt_en_de").not_counted != []


def test_language_model():
    cost = complexity("transformer_lm_gpt", 1000, 10, 20, model_flags=["--decoder-layers", "1"])
    assert cost.macs["decoder_self_attention"] == 20 * 4 * 768 * 768
    assert cost.macs["encoder_attention"] == 0


@pytest.mark.parametrize(
    "arch", ["switchhead_roberta_listops", "transformer_xl_roberta_listops"]
)
def test_an_encoder_carries_no_chunk(arch):
    model = build_meta_model(arch, 20)
    cost = count(model, 10, 10)
    attention = model.encoder.sentence_encoder.layers[0].self_attn
    assert cost.macs["attention_matmul"] == 6 * attention.macs(10, 10)["scores"]
    assert cost.switchhead_layer is None or cost.switchhead_layer["plain_macs"] == sum(
        attention.macs(10, 10).values()
    )


def test_json_keys(capsys):
    flags = ["--num-experts", "16", "--json", "--", "--encoder-layers", "2"]
    assert main(["complexity", "--arch", "moa_transformer_tiny", "--src-len", "4", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    for key in (
        "parameters",
        "macs",
        "macs_paper_convention",
        "macs_attention_twice",
        "attention_macs",
    ):
        assert type(report[key]) is int
    assert report["parameters"] == sum(report["parameters_by_part"].values())
    assert report["macs"] == sum(report["macs_by_part"].values())
    assert set(report["macs_by_part"]) == set(PARTS)
    expected = complexity("moa_transformer_tiny", src_len=4, model_flags=report["model_flags"])
    assert report["macs"] == expected.total_macs == as_json(expected)["macs"]
    assert report["model_flags"] == ["--encoder-layers", "2", "--num-experts", "16"]


def test_text_report(capsys):
    assert main(["complexity", "--arch", "moa_transformer_base"]) == 0
    printed = capsys.readouterr().out
    assert all(
        part in printed for part in ("628,", "cross-attention", "attention, total", "router")
    )
    assert "not counted" not in printed


@pytest.mark.thorough(keep="moh_transformer_tiny")
@pytest.mark.parametrize(
    "arch", ["dense_transformer_lm_base", "moa_roberta_tiny", "moh_transformer_tiny"]
)
def test_the_size_of_the_branch_follows_its_scale(arch, capsys):
    small = ["--encoder-layers", "1"] if "lm" not in arch else ["--decoder-layers", "1"]
    sizes = []
    for scale in ("1", "0.25"):
        scaled = [*small, "--attention-branch-scale", scale]
        assert main(["complexity", "--arch", arch, "--branch", "--json", "--", *scaled]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["branch"])
    # Deeper layers see what the first ones leave
    rel = 1e-5 if "transformer_tiny" not in arch else 0.3
    assert sizes[1] / sizes[0] == pytest.approx(0.25, rel=rel)


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--arch", "moa_transformer_bas"], "did you mean moa_transformer_base"),
        (["--arch", "moa_transformer_base", "--vocab-size", "3"], "--vocab-size 3"),
        (
            ["--arch", "moa_transformer_base", "--experts-per-token", "9"],
            "--experts-per-token 9",
        ),
        (["--arch", "moa_transformer_base", "--", "--no-such-flag"], "--no-such-flag"),
        (["--arch", "transformer_tiny", "--", "--encoder-layers", "x"], "invalid int value"),
        (
            ["--arch", "lightconv_lm_gbw", "--", "--decoder-layers", "1"],
            "doesn't match decoder_layers",
        ),
        pytest.param(  # which it has to build with weights
            ["--arch", "lightconv_lm_gbw", "--branch"],
            "--branch: lightconv_lm_gbw",
            marks=pytest.mark.thorough,
        ),
        (
            ["--arch", "levenshtein_transformer", "--branch"],
            "--branch: levenshtein_transformer",
        ),
        (
            ["--arch", "moa_roberta_tiny", "--branch", "--", "--max-positions", "10"],
            "20 random tokens",
        ),
        (["--arch", "transformer_lm_gpt3_175", "--branch"], "650 GiB"),
        (["--arch", "wav2vec2"], "fairseq cannot build wav2vec2"),
        (["--arch", "multilingual_transformer"], "AssertionError"),
    ],
)
def test_bad_input(capsys, flags, says):
    assert main(["complexity", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_shared_selection_costs_one_selection_less():
    """SwitchHead, section 3.6: k, E, C and T of the 47M model on C4; one router of H * E rows is left out."""
    both = [
        as_json(
            complexity(
                "switchhead_lm_47m",
                8000,
                tgt_len=256,
                model_flags=["--experts-per-token", "3", *more],
            )
        )
        for more in ((), ("--switchhead-shared-selection",))
    ]
    saved = {
        key: both[0][key] - both[1][key] for key in ("parameters", "switchhead_layer_macs")
    }
    width = 412
    experts = 5
    chunks = 2
    length = 256
    assert saved == {
        "parameters": 16 * 2 * experts * width,
        "switchhead_layer_macs": experts * chunks * width * length,
    }
    assert (
        both[0]["switchhead_layer_floats"] - both[1]["switchhead_layer_floats"]
        == experts * chunks * length
    )
