"""Joint training of MAE's experts and gates (--bcd none, NOBCD): who moves what, and by how much."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.amp_optimizer import AMPOptimizer
from trainer_updates import (
    HALF,
    changed,
    is_gate,
    is_statistic,
    manual_gate_gradient,
    snapshot,
    update,
)

from moa_fairseq.layers.sequence_gate import SequenceGate, gates_of
from moa_fairseq.plugin.coordinate_descent.gate_steps import JointStep


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_joint_training_moves_gates_by_plain_sgd(build_trainer, precision, clip):
    """Of one update's own backward passes: two micro-batches and one that fills a gap among the workers."""
    flags = (
        "--bcd",
        "none",
        "--gate-dropout",
        0,
        "--gate-clip-norm",
        clip,
        "--weight-decay",
        0.1,
    )
    common = HALF[precision] if precision == "fp16" else {}
    trainer, samples = build_trainer(*flags, "--clip-norm", 1e-6, common=common)
    batches = [samples[0], {}, samples[1]]
    gates = sum(p.numel() for gate in gates_of(trainer.get_model()) for p in gate.parameters())
    optimized = sum(p.numel() for p in trainer.optimizer.params)
    assert optimized + gates == sum(p.numel() for p in trainer.get_model().parameters())
    passes = []
    trainer.get_model().register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):  # the second finds what the first has left behind
        expected = manual_gate_gradient(trainer, samples[:2])
        before = snapshot(trainer)
        forward_passes = len(passes)
        log = update(trainer, 5, batches)
        after = snapshot(trainer)
        assert len(passes) - forward_passes == 3 and "bcd_step" not in log
        norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
        factor = min(1.0, clip / norm) if clip else 1.0
        assert log["gate_gnorm"] == pytest.approx(
            norm, rel=1e-3 if precision == "float32" else 0.1, abs=1e-3
        )
        for name, gradient in expected.items():
            close = (
                dict(rtol=1e-4, atol=1e-6)
                if precision == "float32"
                else dict(rtol=0.2, atol=0.02 * norm)
            )
            torch.testing.assert_close(after[name], before[name] - factor * gradient, **close)
        frozen = [p for gate in gates_of(trainer.get_model()) for p in gate.parameters()]
        assert not any(p.requires_grad or p.grad is not None for p in frozen)


@pytest.mark.parametrize(
    "flags", [("--bcd", "none", "--gate-optimizer", "fairseq"), ("--finetune", "ftg")]
)
def test_fairseqs_optimizer_can_have_the_gates(build_trainer, flags):
    trainer, samples = build_trainer(*flags)
    gates = {id(p) for gate in gates_of(trainer.get_model()) for p in gate.parameters()}
    assert gates <= {id(p) for p in trainer.optimizer.params}
    before = snapshot(trainer)
    log = update(trainer, 1, samples[:1])
    assert any(is_gate(n) and not is_statistic(n) for n in changed(before, snapshot(trainer)))
    assert "gate_gnorm" not in log


def test_joint_training_moves_everything(build_trainer):
    trainer, samples = build_trainer("--bcd", "none")
    before = snapshot(trainer)
    log = update(trainer, 5, samples[:2])
    still = before.keys() - changed(before, snapshot(trainer))
    assert {
        n for n in still if not n.endswith(("k_proj.bias", "version", "_float_tensor"))
    } == set()
    assert "bcd_step" not in log and log["gate_entropy"] > 1.9
    assert trainer.get_model().encoder.layers[0].self_attn.gate.norm.num_batches_tracked == 1


class Scaled(AMPOptimizer):
    """fairseq's optimizer under --amp, of which the scale is all that counts here."""

    def __init__(self, *scales):
        self._scaler = SimpleNamespace(get_scale=iter(scales).__next__, is_enabled=lambda: True)

    @property
    def scaler(self):
        return self._scaler


@pytest.mark.parametrize(
    "scales, steps",
    [
        *[((1.0,) * 4, True), ((8.0,) * 4, True), ((8.0, 4.0, 4.0), False)],
        ((8.0, 16.0, 16.0), True),  # after so many steps without an overflow it grows
    ],
)
def test_under_amp_gates_skip_an_update_only_if_its_scale_was_lowered(scales, steps):
    """On a CPU the scale is 1 throughout."""
    gate = SequenceGate(4, 3, dropout=0.0).requires_grad_(False)
    step = JointStep(gate, lr=1.0, clip_norm=0.0)
    before = gate.fc2.weight.clone()
    with step.in_backward():
        (gate(torch.randn(5, 4))[0].square().sum() * scales[0]).backward()
    step.sample_size = 5.0
    with step.around_step(Scaled(*scales)):
        pass
    assert torch.equal(gate.fc2.weight, before) != steps
