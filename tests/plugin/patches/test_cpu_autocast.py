"""--amp on the CPU."""

import json

import pytest
import torch
from fairseq.optim import AMPOptimizer
from omegaconf import OmegaConf


def losses(output):
    lines = [
        line for line in output.splitlines() if '"loss"' in line and '"num_updates"' in line
    ]
    return [float(json.loads(line[line.index("{") :])["loss"]) for line in lines]


@pytest.mark.thorough(keep="moa")
@pytest.mark.parametrize("arch", ["moa_transformer_tiny", "mae_transformer_tiny"])
def test_amp_on_the_cpu_is_bfloat16(arch, tmp_path, fairseq, toy_data):
    """Through fairseq-train: losses are near those of float32, not equal; checkpoints are float32."""
    found = {}
    for name, flags in (("fp32", ()), ("amp", ("--amp",))):
        folder = tmp_path / name
        run = fairseq.train(
            toy_data, folder, *flags, "--max-update", 3, "--disable-validation", arch=arch
        )
        found[name] = losses(run.stdout + run.stderr)
        weights = torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]
        assert all(
            value.dtype == torch.float32
            for value in weights.values()
            if value.is_floating_point()
        )
        assert "CUDA is not available" not in run.stdout + run.stderr
    assert found["amp"] == pytest.approx(found["fp32"], rel=0.02)
    assert found["amp"] != found["fp32"]


def test_nan_on_the_cpu_ends_a_training_as_without_amp():
    """fairseq asks a scaler that is switched off for its next scale, which is an AttributeError."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = {
        "_name": "adam",
        "adam_betas": (0.9, 0.98),
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
    }
    optimizer.update(lr=[0.1], use_old_adam=False, fp16_adam_stats=False, tpu=False)
    common = {"fp16_init_scale": 4, "amp_scale_window": None, "min_loss_scale": 1e-4}
    cfg = OmegaConf.create({"optimizer": optimizer, "common": common})
    amp = AMPOptimizer.build_optimizer(cfg, [parameter])
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    assert float(amp.clip_grad_norm(1.0)) == pytest.approx(5.0)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.0, 0.8], abs=1e-5)
    parameter.grad[1] = float("nan")
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        amp.clip_grad_norm(1.0)


@pytest.mark.parametrize(
    "sample, plain",
    [
        (
            {"net_input": {"src_tokens": torch.zeros(2, 128), "src_lengths": torch.zeros(2)}},
            True,
        ),
        (
            {
                "net_input": {
                    "src_tokens": torch.zeros(2, 9),
                    "prev_output_tokens": torch.zeros(2, 129),
                }
            },
            False,
        ),
        ({"net_input": {"source": torch.zeros(2, 9, 80)}}, False),  # frames of speech
        ({"net_input1": {"src_tokens": torch.zeros(2, 9)}}, False),  # sentence ranking
    ],
)
def test_short_sentences_attend_in_plain_products(sample, plain):
    """torch's fused attention pays for each head of each sentence; afterwards the switch stands as before."""
    from moa_fairseq.plugin.patches.cpu_autocast import autocast_on_the_cpu

    seen = []

    def train_step(task, sample, model, criterion, optimizer):
        criterion(model, sample)

    def criterion(model, sample):
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        query = torch.randn(1, 2, 3, 4, requires_grad=True)
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        seen.append("Flash" not in type(out.grad_fn).__name__)

    optimizer = AMPOptimizer.__new__(AMPOptimizer)
    autocast_on_the_cpu(train_step, None, sample, torch.nn.Linear(1, 1), criterion, optimizer)
    assert seen == [not plain, plain]
    assert torch.backends.cuda.flash_sdp_enabled()
