"""Which tokens attend to which, and which experts they choose: one sentence (SwitchHead Figs. 2, 5 and 6).

moa-fairseq analyze attention-maps runs/B --sentence 3 --output maps.png            every layer
moa-fairseq analyze attention-maps runs/B --sentence 3 --layer 2 --output heads.png one layer, head by head

Without --layer a map shows the largest weight of any head. With it each head has a map of its own (for MoA
and MoH each slot, since the experts differ from token to token). Strips beside it show the gates of the
experts that a token chose: on the left for the attending tokens, below for the tokens that they attend to.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import utils
from matplotlib.figure import Figure
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_pass import pass_with_weights, routings_of
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.analysis.routed_model import kind_of, layer_of
from moa_fairseq.experiments.scoring.trained_model import device_for, load_subset, symbols_at

NAME = "attention-maps"
SUMMARY = "who attends to whom in one sentence, and by which experts (SwitchHead Figs. 2, 5 and 6)"
_MOST_LABELS = 60  # the names of more tokens would be too small to read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    parser.add_argument(
        "--sentence", type=int, default=0, metavar="N", help="which one of the subset (0)"
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="one layer, head by head; the first is 1"
    )


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """The attention in one sentence.

    Args:
        args: the flags: model (a path, for the title), subset, sentence, layer and cpu.
        model, task: what `load_trained` returns.

    Raises:
        UserError: for a layer, a subset or a sentence that does not exist, and a model without such
            attention.
    """
    maps = measure_attention(model, task, args.subset, args.sentence, device_for(args.cpu))
    layers = max(attention.layer for attention in maps)
    draw = draw_layers
    if args.layer is not None:
        draw = draw_heads
        if not 1 <= args.layer <= layers:
            raise UserError(f"--layer {args.layer}: the model has layers 1 to {layers}.")
        maps = [attention for attention in maps if attention.layer == args.layer]
    title = f"{args.model.name}, sentence {args.sentence} of {args.subset}"
    report = {"sentence": args.sentence, "modules": [attention.record() for attention in maps]}
    return Analysis([attention.summary() for attention in maps], draw(maps, title), report)


@dataclass
class AttentionMap:
    """The attention of one module on one sentence, from T attending tokens to S tokens.

    Args:
        name: the module's path in the model.
        weights: the weights of each head or slot, [H, T, S] float32.
        queries: the T attending tokens.
        keys: the S tokens that they attend to.
        gates: "queries" and "keys" → the gate of each expert for each token, [E, T] or [E, S]; zero if the
            token did not choose the expert. A side that is not routed has no entry.
        groups: the number of equal groups of experts: that of the heads if each head has its own experts.
    """

    name: str
    weights: Tensor
    queries: list[str]
    keys: list[str]
    gates: dict[str, Tensor]
    groups: int = 1

    @property
    def kind(self) -> str:
        return kind_of(self.name)

    @property
    def layer(self) -> int:
        return layer_of(self.name)

    def summary(self) -> str:
        """A line with the sizes and the mean entropy of the maps."""
        heads, queries, keys = self.weights.shape
        share = torch.special.entr(self.weights).sum(2).mean().item() / math.log(max(keys, 2))
        entropy = f"entropy {share:.0%} of an even one's"
        return f"{self.name}: {heads} maps of {queries} x {keys} tokens, {entropy}"

    def record(self) -> dict[str, Any]:
        """The maps as JSON values."""
        return {
            "name": self.name,
            "queries": self.queries,
            "keys": self.keys,
            "weights": self.weights.tolist(),
            "gates": {side: gates.tolist() for side, gates in self.gates.items()},
        }


def measure_attention(
    model: nn.Module, task: Any, subset: str, sentence: int, device: torch.device
) -> list[AttentionMap]:
    """The attention of every module, in forward order, with teacher forcing.

    Args:
        model: the model, which stays on the device, in evaluation mode.
        task: fairseq's task, which reads the data.
        subset: the name of the subset, such as "valid".
        sentence: the number of the sentence in the subset, from 0.
        device: the device that the model runs on; the maps are on the CPU.

    Raises:
        UserError: for a subset or a sentence that does not exist, and a model without such attention.
    """
    dataset = load_subset(task, subset)
    if not 0 <= sentence < len(dataset):
        raise UserError(f"--sentence {sentence}: {subset} has sentences 0 to {len(dataset) - 1:,}.")
    sample = dataset.collater([dataset[sentence]])
    if device.type == "cuda":
        sample = utils.move_to_cuda(sample)
    net_input = sample["net_input"]
    source = symbols_at(task.source_dictionary, net_input["src_tokens"][0])
    target = source  # the decoder of a language model reads the source tokens
    if "prev_output_tokens" in net_input:
        target = symbols_at(task.target_dictionary, net_input["prev_output_tokens"][0])
    maps = []
    attention_pass = pass_with_weights(model.to(device).eval(), net_input)
    for name, weights in attention_pass.weights.items():
        queries = target if name.startswith("decoder.") else source
        keys = source if name.endswith(".encoder_attn") else queries
        attention = AttentionMap(name, weights[:, 0], queries, keys, {})
        for side, routing in routings_of(name, attention_pass.routings).items():
            if routing.scope == "tokens":
                attention.groups = routing.groups  # as many on both sides
                attention.gates[side] = routing.gates_by_expert.t().float().cpu()
        # One routing is recorded for both sides
        if getattr(model.get_submodule(name), "shares_selection", False):
            attention.gates["keys"] = attention.gates["queries"]
        maps.append(attention)
    return maps


def draw_layers(maps: Sequence[AttentionMap], title: str = "") -> Figure:
    """One map per layer and kind of attention: the largest weight of any head (SwitchHead Fig. 2)."""
    kinds = list(dict.fromkeys(attention.kind for attention in maps))
    columns = max(attention.layer for attention in maps)
    side = 2.2 if columns > 3 else 3.2
    figure = Figure(figsize=(side * columns + 0.6, side * len(kinds) + 0.6), layout="constrained")
    panels = figure.subplots(len(kinds), columns, squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for attention in maps:
        panel = panels[kinds.index(attention.kind)][attention.layer - 1]
        _show(panel, attention.weights.amax(0), attention.queries, attention.keys, size=4)
        panel.set_title(f"{attention.kind}, layer {attention.layer}", fontsize=7)
    figure.suptitle(title and f"{title}: largest weight of any head", fontsize=10)
    return figure


def draw_heads(maps: Sequence[AttentionMap], title: str = "") -> Figure:
    """The maps of each module's heads with the experts of both sides (SwitchHead Figs. 5 and 6)."""
    columns = max(attention.weights.size(0) for attention in maps)
    longest = max(max(attention.weights.shape[1:]) for attention in maps)
    side = max(2.6, 0.11 * longest)
    figure = Figure(figsize=(side * columns + 0.6, side * len(maps) + 0.6), layout="constrained")
    rows = figure.subfigures(len(maps), 1, squeeze=False)[:, 0]
    for attention, row in zip(maps, rows):
        row.suptitle(attention.name, fontsize=8)
        subfigures = row.subfigures(1, columns, squeeze=False)[0]
        for head, subfigure in zip(range(attention.weights.size(0)), subfigures):
            _draw_head(subfigure, attention, head)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_head(subfigure: Any, attention: AttentionMap, head: int) -> None:
    """Draw the map of one head, with the gates of its experts."""
    group = head if attention.groups > 1 else 0
    gates_of_head = {}
    for side, gates in attention.gates.items():
        gates_of_head[side] = gates.view(attention.groups, -1, gates.size(1))[group]
    # In other routed attention a token has a slot for each expert that it chose
    kind = "head" if attention.groups > 1 or not attention.gates else "slot"
    weights = attention.weights[head]
    title = f"{kind} {head + 1}"
    draw_map(subfigure, weights, attention.queries, attention.keys, gates_of_head, title)


def draw_map(
    subfigure: Any,
    weights: Tensor,
    queries: list[str],
    keys: list[str],
    gates: dict[str, Tensor],
    title: str,
) -> None:
    """Draw one head: its attention, the gates of the queries on the left, the gates of the keys below.

    Args:
        subfigure: a figure or a subfigure.
        weights: the weights of the head, [T, S].
        queries: the T attending tokens.
        keys: the S tokens that they attend to.
        gates: "queries" and "keys" → the gates of the experts, [E, T] and [E, S]; without a side that is not
            routed.
        title: the title of the map.
    """
    query_experts = len(gates.get("queries", ()))
    key_experts = len(gates.get("keys", ()))
    thickness = max(1, len(queries) // 24)  # of an expert, in tokens
    widths = [len(keys)]
    if query_experts:
        widths = [query_experts * thickness, len(keys)]
    heights = [len(queries)]
    if key_experts:
        heights = [len(queries), key_experts * thickness]
    panels = subfigure.subplots(
        len(heights), len(widths), squeeze=False, width_ratios=widths, height_ratios=heights
    )
    for panel in panels.flat:
        panel.set_axis_off()
    main = panels[0][-1]
    _show(main, weights, [] if query_experts else queries, [] if key_experts else keys)
    main.set_title(title, fontsize=7)
    largest = max((side.max().item() for side in gates.values()), default=0.0) or 1.0
    experts = list(map(str, range(1, max(query_experts, key_experts) + 1)))
    if query_experts:
        names = experts[:query_experts]
        _show(panels[0][0], gates["queries"].t(), queries, names, "Oranges", largest)
    if key_experts:
        _show(panels[-1][-1], gates["keys"], experts[:key_experts], keys, "Oranges", largest)


def _show(
    panel: Any,
    values: Tensor,
    rows: list[str],
    columns: list[str],
    cmap: str = "Blues",
    largest: float = 1.0,
    size: int = 5,
) -> None:
    """Draw a matrix as shades from 0 to `largest`; the axes have names if there is space to read them."""
    panel.set_axis_on()
    panel.imshow(values.numpy(), cmap=cmap, vmin=0, vmax=largest, aspect="auto")
    if len(rows) > _MOST_LABELS:
        rows = []
    if len(columns) > _MOST_LABELS:
        columns = []
    panel.set_yticks(range(len(rows)), rows, fontsize=size)
    rotation = 90 if max(map(len, columns), default=0) > 2 else 0
    panel.set_xticks(range(len(columns)), columns, fontsize=size, rotation=rotation)
    panel.tick_params(length=1, pad=1)
