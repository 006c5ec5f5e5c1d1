"""The plain Transformer of a fairseq model: equal logits, or an error that names what it lacks."""

import sys
from pathlib import Path

import pytest
import torch

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert import models, plain

sys.path.insert(0, str(Path(__file__).parents[2] / "plugin" / "models"))
import whole_models

BANDS = ("--adaptive-softmax-cutoff", "9,20")
INPUT = ("--adaptive-input", "--adaptive-input-cutoff", "9,20")
TWO = ("--encoder-layers", 2, "--decoder-layers", 2)
NARROW = ("--decoder-embed-dim", 64, "--decoder-output-dim", 64)


@pytest.mark.parametrize(
    "words",
    [
        ("moa_transformer_tiny", *TWO, "--share-all-embeddings", "--layernorm-embedding"),
        ("moa_transformer_tiny", *TWO, *NARROW, "--activation-fn", "gelu_accurate"),
        (
            "moa_transformer_tiny",
            *TWO,
            "--sigma-moe-num-experts",
            4,
            "--sigma-moe-experts-per-token",
            2,
        ),
        ("dense_transformer_tiny", *TWO, "--key-heads", 2, "--attention-output-scale", 0.5),
        ("dense_transformer_tiny", *TWO, "--initialization", "admin", "--no-cross-attention"),
        (
            "dense_transformer_lm_base",
            "--decoder-layers",
            2,
            "--gated-feed-forward",
            "--rms-norm",
        ),
        ("dense_transformer_lm_base", "--decoder-layers", 2, *BANDS),
        ("dense_transformer_lm_base", "--decoder-layers", 2, *BANDS, *INPUT),
        (
            "dense_transformer_lm_base",
            "--decoder-layers",
            2,
            *BANDS,
            *INPUT,
            "--tie-adaptive-weights",
        ),
        (
            *("mae_transformer_lm_base", "--decoder-layers", 2, *BANDS, *INPUT),
            *("--tie-adaptive-weights", "--tie-adaptive-proj"),
        ),
        ("moa_transformer_tiny", *TWO, *BANDS),
        ("transformer_xl_lm_tiny",),
        ("dense_roberta_tiny", "--untie-weights-roberta"),
    ],
    ids=lambda words: "-".join(str(word).strip("-") for word in words[:1] + words[-2:]),
)
def test_logits_are_equal(words, monkeypatch):
    monkeypatch.setattr(plain, "TOLERANCE", 1e-10)
    model = whole_models.build(*words)
    for parameter in model.parameters():
        if not parameter.any():  # gates and biases that start at zero show nothing
            torch.nn.init.normal_(parameter, std=0.1)
    assert next(plain.plain_model(model).parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("dense_transformer_tiny", *TWO, "--cross-self-attention"), "--cross-self-attention"),
        (("dense_transformer_tiny", *TWO, "--decoder-layerdrop", 0.1), "--decoder-layerdrop"),
    ],
)
def test_what_is_not_exported_is_named(words, named):
    with pytest.raises(UserError, match=named):
        plain.plain_model(whole_models.build(*words))


def test_each_dropout_is_the_models():
    rates = {"dropout": 0.4, "output_dropout": 0.3, "attention_dropout": 0.2}
    rates["activation_dropout"] = 0.1
    flags = [f"--{name.replace('_', '-')}={rate}" for name, rate in rates.items()]
    stack = plain.plain_model(whole_models.build("moa_lm_tiny", *flags)).decoder
    assert {name: getattr(stack.settings, name) for name in rates} == rates
    assert (stack.dropout_module.p, stack.output_dropout_module.p) == (0.4, 0.3)
    stack.layers, stack.layer_norm = torch.nn.ModuleList(), None
    embedded, _ = stack.train()(torch.full((1, 20), 5))
    assert (embedded == 0).any()


def test_a_classification_head_is_named():
    model = whole_models.build("moa_roberta_tiny")
    model.register_classification_head("sentences", num_classes=2)
    with pytest.raises(UserError, match="classification_heads"):
        plain.plain_model(model)


def test_another_computation_is_noticed(monkeypatch):
    model = whole_models.build("dense_transformer_tiny", *TWO)
    model.decoder.layers[0].activation_fn = torch.tanh  # which no setting tells
    with pytest.raises(UserError, match="differ"):
        plain.plain_model(model)


def test_a_folder_becomes_a_fairseq_checkpoint(tmp_path, capsys):
    save_file = pytest.importorskip("safetensors.torch").save_file
    words = ("moa_transformer_tiny", *TWO, "--share-all-embeddings")
    model = whole_models.build(*words)
    args = whole_models.settings(*words)
    models.write(
        models.Checkpoint(model.state_dict(), {"model": args}, True), tmp_path / "run.pt", {}
    )
    trained = plain.tensors_of(plain.plain_model(model), "model.")
    for tensor in trained.values():
        tensor += torch.randn_like(tensor)
    (tmp_path / "folder").mkdir()
    save_file(trained, tmp_path / "folder" / plain.WEIGHTS)
    line = f"convert {tmp_path}/folder --to fairseq {tmp_path}/back.pt".split()
    assert main(line) == 2
    assert "--like" in capsys.readouterr().err
    assert main([*line, "--like", str(tmp_path / "run.pt")]) == 0
    back = models.read(tmp_path / "back.pt").model
    assert back.keys() == model.state_dict().keys()
    for name, tensor in trained.items():
        assert torch.equal(back[name.removeprefix("model.")], tensor)
    assert (
        back["encoder.embed_tokens.weight"].data_ptr()
        == back["decoder.embed_tokens.weight"].data_ptr()
    )
    other = whole_models.build("dense_transformer_tiny", *TWO)
    state = model.state_dict()
    with_another_parameter = state | {"more": torch.ones(2)}
    with_another_shape = state | {"decoder.layers.0.fc1.bias": torch.ones(2)}
    for like in (other.state_dict(), with_another_parameter, with_another_shape):
        with pytest.raises(UserError, match="not the same model"):
            plain.weights_of(tmp_path / "folder", like)
