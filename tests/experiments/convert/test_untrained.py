"""Conversions of models as they are initialised: files that stay, uneven heads, gates of all kinds, NaN."""

import argparse
import os

import pytest
import torch

from moa_fairseq.experiments.convert.models import build
from moa_fairseq.experiments.records import provenance
from moa_fairseq.files import checksum
from moa_fairseq.plugin.patches.checkpoint_reading import load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint


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


@pytest.mark.parametrize("sizes", [(24, 20), (20, 24)])
def test_each_side_has_its_own_dictionary_and_the_architectures_width(sizes):
    """The settings of a checkpoint may lack flags that are newer than it is."""
    names = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    weights = {name: torch.zeros(size, 64) for name, size in zip(names, sizes)}
    state = build(argparse.Namespace(arch="transformer_tiny"), weights).state_dict()
    assert [state[name].shape for name in names] == [(size, 64) for size in sizes]


@pytest.mark.parametrize("kind", ["itself", "link", "hard link", "folder"])
def test_the_trained_checkpoint_is_never_overwritten(kind, convert, tmp_path):
    given = untrained(tmp_path / "trained.pt", 4, 4)
    before = given.read_bytes()
    out = tmp_path / "out.pt"
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
    for flags in (("--to", "mae"), ("--to", "mae", "--force")):
        assert "is the same file as the input" in convert(given, out, *flags, status=2)
        assert given.read_bytes() == before and given.samefile(out)


def test_a_converted_file_says_what_made_it_and_of_what(convert, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: "abc")
    source = untrained(tmp_path / "in.pt", 4, 4)
    convert(source, tmp_path / "out.pt", "--to", "mae")
    made_by = load_checkpoint(tmp_path / "out.pt")["made_by"]
    assert (made_by["commit"], made_by["converted_from"]) == (
        "abc",
        ["in.pt", checksum(source)],
    )


def test_an_existing_file_needs_force(convert, tmp_path):
    out = tmp_path / "out.pt"
    out.write_text("of another run")
    source = untrained(tmp_path / "in.pt", 4, 4)
    assert "--force" in convert(source, out, "--to", "mae", status=2)
    assert out.read_text() == "of another run"
    convert(source, out, "--to", "mae", "--force")
    assert load_checkpoint(out)["cfg"]["model"].arch == "mae_transformer_base"
    for odd, kind in (
        (tmp_path, "a folder"),
        ("/dev/null", "a device"),
    ):  # before IN is even read
        assert f"OUT {odd} is {kind}" in convert(
            "none.pt", odd, "--to", "mae", "--force", status=2
        )


@pytest.mark.parametrize(
    ("heads", "flags", "expected"),
    [
        ((4, 2), ("--to", "moh"), {"moh_shared_heads": 1, "experts_per_token": 1}),
        ((2, 8), ("--to", "moh"), {"moh_shared_heads": 1, "experts_per_token": 1}),
        ((4, 1), ("--to", "moh"), {"moh_shared_heads": 0, "experts_per_token": 1}),
        ((4, 2), ("--to", "mae"), {"mae_dropped_heads": 1}),
        ((4, 2), ("--to", "moh", "--moh-shared-heads", 2), "at most 1"),
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


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_diverged_are_named(value, convert, tmp_path):
    source = untrained(tmp_path / "in.pt", 4, 4)
    state = load_checkpoint(source)
    state["model"]["encoder.layers.0.fc1.weight"][0, 0] = float(value)
    save_checkpoint(state, source)
    printed = convert(source, tmp_path / "out.pt", "--to", "mae", status=2)
    assert "encoder.layers.0.fc1.weight" in printed and "report" not in printed
