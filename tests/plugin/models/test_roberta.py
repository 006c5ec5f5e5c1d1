"""Masked language models with mixtures: what is replaced, what stays RoBERTa's, and using them afterwards."""

import json

import pytest
import torch
from fairseq.models import MODEL_REGISTRY
from whole_models import batch, build

import moa_fairseq
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.sigma_moe import SigmaMoE
from moa_fairseq.plugin.fairseq_compat import load_checkpoint

assert moa_fairseq.__version__
ARCH = "moa_roberta_tiny"


def test_every_attention_is_a_mixture_and_the_rest_is_robertas():
    model = build(ARCH)
    dense = build("roberta_tiny")
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfAttention)]
    assert [m.name for m in mixtures] == [
        f"encoder.sentence_encoder.layers.{i}.self_attn" for i in range(4)
    ]
    assert {m.router.renormalize for m in mixtures} == {
        "detached"
    } and model.max_positions() == 128
    assert not any(type(m).__name__ == "MultiheadAttention" for m in model.modules())
    ours, theirs = (
        {name: p.shape for name, p in m.state_dict().items() if "self_attn." not in name}
        for m in (model, dense)
    )
    assert ours == theirs
    assert model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight


def test_flags_override_the_architecture_and_noise_starts_at_zero():
    model = build(ARCH, "--num-experts", 5, "--no-expert-bias", "--routing-noise")
    attention = model.encoder.sentence_encoder.layers[0].self_attn
    assert attention.num_experts == 5 and attention.k_proj.bias is None
    assert not attention.router.noise_projection.weight.any()


@pytest.mark.parametrize(
    ("initialization", "scale"), [("own", 1.0), ("depth-scaled", 0.5**0.5)]
)
def test_sigma_moe_starts_as_its_authors_do_and_not_as_bert(initialization, scale):
    """√(2/n) / √fan-in of 4 layers; rows of a router have one length."""
    model = build(ARCH, "--sigma-moe-num-experts", 4, "--initialization", initialization)
    layers = [module for module in model.modules() if isinstance(module, SigmaMoE)]
    assert len(layers) == 4
    for layer in layers:
        lengths = layer.router.projection.weight.norm(dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, scale))
        assert layer.up.weight.std().item() == pytest.approx(scale / 128**0.5, rel=0.05)


def test_a_checkpoint_brings_its_heads_and_old_names_along():
    model = build(ARCH)
    model.register_classification_head("mood", num_classes=3)
    state = {
        key.replace("layernorm_embedding", "emb_layer_norm").replace(
            "encoder.", "decoder.", 1
        ): value
        for key, value in model.state_dict().items()
    }
    plain = build(ARCH)
    with_heads = build(ARCH, "--load-checkpoint-heads")
    with_heads.load_state_dict(dict(state))
    torch.testing.assert_close(with_heads.state_dict(), model.state_dict())
    plain.load_state_dict(dict(state))
    assert not plain.classification_heads
    scores, _ = with_heads.eval()(**batch(ARCH), classification_head_name="mood")
    assert scores.shape == (3, 3)


def test_from_pretrained_encodes_fills_and_extracts(toy_masked_lm, toy_wiki_data):
    folder = str(toy_masked_lm.parent)
    name = toy_masked_lm.name
    encoding = {
        "gpt2_encoder_json": str(toy_wiki_data / "encoder.json"),
        "gpt2_vocab_bpe": str(toy_wiki_data / "vocab.bpe"),
    }
    model = MODEL_REGISTRY["moa_roberta"]
    hub = model.from_pretrained(folder, name, str(toy_wiki_data), bpe="gpt2", **encoding)
    encoded = hub.encode("the cat")
    assert (
        encoded.tolist()[0] == 0
        and encoded.tolist()[-1] == 2
        and hub.decode(encoded) == "the cat"
    )
    assert hub.eval().extract_features(encoded).shape == (1, len(encoded), 16)
    assert len(hub.extract_features(encoded, return_all_hiddens=True)) == 2
    ((text, probability, token),) = hub.fill_mask("the <mask> sat", topk=1)
    assert text == f"the{token} sat" and 0 < probability < 1


def log_records(done, field):
    """The records of a training's JSON log that have `field`."""
    lines = [
        line[line.index("{") :]
        for line in (done.stdout + done.stderr).splitlines()
        if f'"{field}"' in line
    ]
    return [json.loads(line) for line in lines]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arch, criterion, flags",
    [
        ("moh_roberta_tiny", "masked_lm_with_routing", ("--balance-loss", "moh")),
        (
            "dense_roberta_tiny",
            "masked_lm",
            (
                "--dropped-heads",
                1,
                "--attention-branch-scale",
                0.25,
                "--attention-head-dim",
                6,
                "--amp",
            ),
        ),
    ],
)
def test_other_families_train(arch, criterion, flags, train_masked_lm, tmp_path):
    log = train_masked_lm(
        tmp_path, "--max-epoch", 1, *flags, arch=arch, criterion=criterion
    ).stdout
    assert '"valid_loss"' in log and ('"train_balance_loss"' in log) == ("routing" in criterion)


@pytest.mark.thorough
def test_any_number_of_data_workers_trains_the_same(train_masked_lm, tmp_path):
    final = {}
    for workers in (0, 1, 2):
        folder = tmp_path / str(workers)
        train_masked_lm(
            folder, "--max-epoch", 3, "--update-freq", "2,1", "--num-workers", workers
        )
        state = load_checkpoint(folder / "checkpoint_last.pt")
        final[workers] = {**state["model"], **state["last_optimizer_state"]["state"]}
    for workers in (1, 2):
        torch.testing.assert_close(final[workers], final[0], rtol=0, atol=0)


@pytest.mark.thorough
def test_a_model_that_stands_still_shows_masks_that_move(train_masked_lm, tmp_path):
    """Learning rate 0, no dropout: only masks tell epochs apart, and validation's never change."""
    still = ("--lr", 0, "--dropout", 0, "--attention-dropout", 0, "--activation-dropout", 0)
    done = train_masked_lm(tmp_path, "--max-epoch", 3, "--num-workers", 1, *still, "--no-save")
    trained = [float(record["train_loss"]) for record in log_records(done, "train_loss")]
    valid = [float(record["valid_loss"]) for record in log_records(done, "valid_loss")]
    assert len(trained) == len(set(trained)) == 3
    assert len(valid) == 3 and len(set(valid)) == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_fine_tuning_through_fairseqs_sentence_prediction(
    tmp_path, fairseq, preprocess, toy_masked_lm, toy_wiki_data
):
    """Which of two tokens comes first: a head on the pre-trained encoder learns it."""
    texts = ["12 13 14", "15 13 14"] * 20
    labels = ["a", "b"] * 20
    for name, lines in (("input0", texts), ("label", labels)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
        prefixes = {"trainpref": str(tmp_path / name), "validpref": str(tmp_path / name)}
        source = str(toy_wiki_data / "dict.txt") if name == "input0" else None
        destination = str(tmp_path / "data" / name)
        preprocess({"only-source": True, **prefixes, "srcdict": source, "destdir": destination})
    user_dir = str(moa_fairseq.__path__[0])
    done = fairseq(
        *(
            "train",
            tmp_path / "data",
            "--user-dir",
            user_dir,
            "--cpu",
            "--arch",
            "moa_roberta_tiny",
        ),
        *(
            "--task",
            "sentence_prediction",
            "--criterion",
            "sentence_prediction",
            "--num-classes",
            2,
        ),
        *(
            "--restore-file",
            toy_masked_lm,
            "--reset-optimizer",
            "--reset-dataloader",
            "--reset-meters",
        ),
        *("--init-token", 0, "--separator-token", 2, "--max-positions", 24),
        *("--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16),
        *(
            "--optimizer",
            "adam",
            "--lr",
            0.01,
            "--max-tokens",
            100,
            "--max-epoch",
            6,
            "--num-workers",
            0,
        ),
        *("--log-format", "json", "--save-dir", tmp_path / "tuned", "--no-epoch-checkpoints"),
    )
    assert float(log_records(done, "valid_accuracy")[-1]["valid_accuracy"]) == 100
    assert "Loaded checkpoint" in done.stderr + done.stdout
