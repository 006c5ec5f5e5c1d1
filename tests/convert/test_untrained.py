"""Conversions of models as they are initialised: files that stay, uneven heads, gates of all kinds, NaN."""

import argparse
import importlib.util
import os

import pytest
import torch

from moa_fairseq.convert.models import build
from moa_fairseq.fairseq_patches.checkpoint_files import load_checkpoint, save_checkpoint


def untrained(path, encoder_heads, decoder_heads, encoder_dim=16, decoder_dim=16):
    """A dense translation model of one layer each way, as it is initialised."""
    settings = argparse.Namespace(arch="transformer", _name="transformer")
    for side, heads, dim in (
        ("encoder", encoder_heads, encoder_dim),
        ("decoder", decoder_heads, decoder_dim),
    ):
        vars(settings).update({f"{side}_layers": 1, f"{side}_attention_heads": heads})
        vars(settings).update({f"{side}_embed_dim": dim, f"{side}_ffn_embed_dim": 16})
    symbols = {
        "encoder.embed_tokens.weight": torch.zeros(20, encoder_dim),
        "decoder.embed_tokens.weight": torch.zeros(20, decoder_dim),
    }
    weights = build(settings, symbols).state_dict()
    save_checkpoint({"cfg": {"model": settings}, "args": None, "model": weights}, path)
    return path


@pytest.mark.parametrize("kind", ["itself", "link", "hard link", "folder"])
def test_the_trained_checkpoint_is_never_overwritten(kind, convert, tmp_path):
    given = untrained(tmp_path / "trained.pt", 4, 4)
    before, out = given.read_bytes(), tmp_path / "out.pt"
    if kind == "itself":
        out = tmp_path / "x" / ".." / "trained.pt"
        (tmp_path / "x").mkdir()
    elif kind == "link":
        out.symlink_to("trained.pt")
    elif kind == "hard link":
        os.link(given, out)
    else:
        (tmp_path / "folder").symlink_to(".")
        out = tmp_path / "folder" / "trained.pt"
    for flags in (("--to", "mae"), ("--to", "mae", "--force"), ("--force",)):
        assert "is the same file as the input" in convert(given, out, *flags, status=2)
        assert given.read_bytes() == before and given.samefile(out)


def test_an_existing_file_needs_force(convert, tmp_path):
    out = tmp_path / "out.pt"
    out.write_text("of another run")
    source = untrained(tmp_path / "in.pt", 4, 4)
    assert "--force" in convert(source, out, "--to", "mae", status=2)
    assert out.read_text() == "of another run"
    convert(source, out, "--to", "mae", "--force")
    assert load_checkpoint(out)["cfg"]["model"].arch == "mae_transformer_base"
    if importlib.util.find_spec("safetensors"):
        (tmp_path / "new.json").write_text("notes")
        assert "new.json" in convert(out, tmp_path / "new.safetensors", status=2)
        assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("heads", "flags", "expected"),
    [
        ((4, 2), ("--to", "moh"), {"moh_shared_heads": 1, "experts_per_token": 1}),
        ((2, 8), ("--to", "moh"), {"moh_shared_heads": 1, "experts_per_token": 1}),
        ((4, 1), ("--to", "moh"), {"moh_shared_heads": 0, "experts_per_token": 1}),
        ((4, 2), ("--to", "mae"), {"mae_dropped_heads": 1}),
        ((4, 2, 32, 16), ("--to", "moa"), {"num_experts": 4, "expert_dim": 8}),
        ((4, 2), ("--to", "moa"), "encoder has 4 heads of 4 dimensions and the decoder has 2 heads of 8"),
        ((4, 2, 32, 16), ("--to", "moa", "--expert-keys-values", "own"), "the decoder has 2 heads"),
        ((4, 2), ("--to", "moh", "--moh-shared-heads", 2), "at most 1"),
        ((4, 4), ("--to", "moa", "--expert-dim", 2), "--expert-dim (2 here)"),
    ],
)
def test_sides_with_different_heads(heads, flags, expected, convert, tmp_path):
    """The defaults suit both sides; where none can, no flag is blamed that was not given."""
    out = tmp_path / "out.pt"
    printed = convert(
        untrained(tmp_path / "in.pt", *heads), out, *flags, status=2 * isinstance(expected, str)
    )
    if isinstance(expected, str):
        assert expected in printed and not out.exists()
    else:
        settings = vars(load_checkpoint(out)["cfg"]["model"])
        assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", ["detached", "full", "none"])
def test_gates_of_any_kind_are_undone(activation, renormalize, convert, tmp_path):
    """A sigmoid of 0 is 1/2, whatever the number of experts."""
    source = untrained(tmp_path / "in.pt", 4, 4)
    state = load_checkpoint(source)
    for name, tensor in state["model"].items():
        tensor.add_(0.5 * name.endswith("bias"))
    save_checkpoint(state, source)
    flags = ("--to", "moa", "--expert-keys-values", "own", "--force")
    flags += ("--router-activation", activation, "--router-renormalize", renormalize)
    assert convert(source, tmp_path / "out.pt", *flags).startswith("exact: ")
    assert "--no-expert-bias" in convert(source, tmp_path / "out.pt", *flags, "--no-expert-bias")


def test_more_experts_than_heads_share_the_heads_output(convert, tmp_path):
    """Eight experts made of four heads, all of them chosen: every head counts once."""
    source = untrained(tmp_path / "in.pt", 4, 4)
    weights = load_checkpoint(source)["model"]
    convert(source, tmp_path / "out.pt", "--to", "moa", "--num-experts", 8)
    experts = load_checkpoint(tmp_path / "out.pt")["model"]["encoder.layers.0.self_attn.out_experts.weight"]
    dense = weights["encoder.layers.0.self_attn.out_proj.weight"].t().reshape(4, 4, 16)
    torch.testing.assert_close((experts / 8).view(2, 4, 4, 16).sum(0), dense)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_diverged_are_named(value, convert, tmp_path):
    source = untrained(tmp_path / "in.pt", 4, 4)
    state = load_checkpoint(source)
    state["model"]["encoder.layers.0.fc1.weight"][0, 0] = float(value)
    save_checkpoint(state, source)
    printed = convert(source, tmp_path / "out.pt", "--to", "mae", status=2)
    assert "encoder.layers.0.fc1.weight" in printed and "report" not in printed
