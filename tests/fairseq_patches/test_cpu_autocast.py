"""--amp on the CPU."""

import json

import pytest
import torch


def losses(output):
    lines = [line for line in output.splitlines() if '"loss"' in line and '"num_updates"' in line]
    return [float(json.loads(line[line.index("{") :])["loss"]) for line in lines]


@pytest.mark.parametrize("arch", ["moa_transformer_tiny", "transformer_tiny", "mae_transformer_tiny"])
def test_amp_on_the_cpu_is_bfloat16(arch, tmp_path, fairseq, toy_data):
    """Through fairseq-train: losses are near those of float32, not equal; checkpoints are float32."""
    found = {}
    for name, flags in (("fp32", ()), ("amp", ("--amp",))):
        folder = tmp_path / name
        run = fairseq.train(toy_data, folder, *flags, "--max-update", 6, arch=arch)
        found[name] = losses(run.stdout + run.stderr)
        weights = torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]
        assert all(value.dtype == torch.float32 for value in weights.values() if value.is_floating_point())
        assert "CUDA is not available" not in run.stdout + run.stderr
    assert found["amp"] == pytest.approx(found["fp32"], rel=0.02)
    assert found["amp"] != found["fp32"]
