"""Positions that would reach no attention of a decoder."""

import pytest


@pytest.mark.parametrize("positions, refused", [("rope", True), ("sinusoidal", False)])
def test_rotation_and_cross_self_attention(toy_data, tmp_path, fairseq, positions, refused):
    """--cross-self-attention makes a decoder's self-attention one over the source, too: it is not rotated."""
    done = fairseq.train(
        toy_data, tmp_path, "--cross-self-attention", "--positions", positions, "--max-update", 1, check=False
    )
    assert bool(done.returncode) == refused, done.stderr
    assert ("--positions rope is for self-attention" in done.stderr) == refused
