"""MAE's training beside fairseq's dense Transformer of the same shape: F steps, and G steps before them.

    python benchmarks/coordinate_descent.py

An F step is forward, criterion, backward and Adam with drawn experts; a G step forward with mixed experts and
the gradients of the gates, by plain SGD. In every 5th epoch each update takes both, so an update costs
(4 F + (G + F)) / 5 on average; the paper reports about 1.2 times the dense model's.
"""

from collections.abc import Callable
from typing import Any

import torch
from _bench import arguments, report, take_turns
from _models import BASE, batch_shape, build, criterion, training_batch
from matplotlib.figure import Figure
from torch import nn

from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.running_statistics import running_statistics_of, update_running_statistics
from moa_fairseq.layers.sequence_gate import gates_of
from moa_fairseq.plugin.coordinate_descent.gate_sgd import GateGradients, sgd_step
from moa_fairseq.plugin.forward_context import forward_context

MAE = "mae_transformer_base"
G_EVERY = 5
DENSE = "dense"
F = "F step"
GF = "G and F step"
JOINT = "joint update (NOBCD)"


def f_step(
    model: nn.Module, loss_of: nn.Module, sample: dict[str, Any], drawn: bool
) -> Callable[[], None]:
    """One update of all parameters that require gradients, with drawn or with mixed experts: gates by SGD."""
    gates = {parameter for gate in gates_of(model) for parameter in gate.parameters()}
    learning = [parameter for parameter in gates if parameter.requires_grad]
    moving = [p for p in model.parameters() if p.requires_grad and p not in gates]
    optimizer = torch.optim.Adam(moving, lr=1e-6, betas=(0.9, 0.98))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if drawn:
            with forward_context(draw=ExpertDraw(sample["id"], 1, 0)):
                loss_of(model, sample)[0].backward()
        else:
            loss_of(model, sample)[0].backward()
        optimizer.step()
        if learning:
            sgd_step(learning, [parameter.grad for parameter in learning], lr=1e-6)

    return step


def g_step(model: nn.Module, loss_of: nn.Module, sample: dict[str, Any]) -> Callable[[], None]:
    """One update of the gates (MAE Algorithm 1), as `translation_bcd` does it."""
    gates = gates_of(model)
    parameters = [parameter for gate in gates for parameter in gate.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.requires_grad_(True)
        gradients = GateGradients(parameters)
        gradients.add(loss_of(model, sample)[0], sample["ntokens"])
        for parameter in parameters:
            parameter.requires_grad_(False)
        update_running_statistics(running_statistics_of(model))
        sgd_step(parameters, gradients.mean(), lr=1e-6)

    return step


def candidates(words: Any, sample: dict[str, Any], args: Any) -> dict[str, Callable[[], None]]:
    """The updates to be compared, by name."""
    archs = (
        ("transformer_tiny", *["mae_transformer_tiny"] * 2) if args.miniature else (BASE, MAE, MAE)
    )
    loss_of = criterion(BASE, words)
    dense, joint, alternating = (
        build(arch, words, args.device, args.torch_dtype).train() for arch in archs
    )
    for gate in gates_of(alternating):
        gate.requires_grad_(False)
    only_f = f_step(alternating, loss_of, sample, drawn=True)
    only_g = g_step(alternating, loss_of, sample)

    def both() -> None:
        only_g()
        only_f()

    return {
        DENSE: f_step(dense, loss_of, sample, drawn=False),
        JOINT: f_step(joint, loss_of, sample, drawn=False),
        F: only_f,
        GF: both,
    }


def draw(ratios: dict[str, float], args: Any) -> Figure:
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    panel = figure.subplots()
    colours = ["#999999" if name == DENSE else "#0072B2" for name in ratios]
    bars = panel.barh(list(ratios), list(ratios.values()), color=colours)
    panel.bar_label(bars, fmt=" %.2f", fontsize=8)
    panel.invert_yaxis()
    panel.set(
        xlabel="time of an update ÷ dense base model",
        title=f"MAE-7 base, {args.device}, {args.dtype}",
    )
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    args = arguments(__doc__)
    words, sample = training_batch(args)
    seconds = take_turns(candidates(words, sample, args), args.rounds, args.device)
    ratios = {name: value / seconds[DENSE] for name, value in seconds.items()}
    mean = f"mean, G step in every {G_EVERY}th epoch"
    ratios[mean] = ((G_EVERY - 1) * ratios[F] + ratios[GF]) / G_EVERY
    for name, ratio in ratios.items():
        print(f"{name:36s} {ratio:5.2f} × dense")
    batch, length = batch_shape(args)
    payload = {"batch": batch, "length": length, "seconds": seconds, "time_over_dense": ratios}
    report("coordinate_descent", args, payload, draw(ratios, args))


if __name__ == "__main__":
    main()
