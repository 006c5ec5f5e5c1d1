"""Which tokens attend to which, and which experts they choose: one sentence (SwitchHead Figs. 2, 5 and 6).

moa-fairseq analyze attention-maps runs/B --sentence 3 --output maps.png            every layer
moa-fairseq analyze attention-maps runs/B --sentence 3 --layer 2 --output heads.png one layer, head by head

Without --layer a map shows the largest weight of any head. With it each head has a map of its own (for MoA
and MoH each slot, since the experts differ from token to token). Strips beside it show the gates of the
experts that a token chose: on the left for the attending tokens, below for the tokens that they attend to.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fairseq import utils
from fairseq.modules import MultiheadAttention
from matplotlib.figure import Figure
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.analysis.routed_model import kind_of
from moa_fairseq.experiments.scoring.trained_model import device_for, load_subset, symbols_at
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.plugin.forward_context import NamedRoutings, collect_routings

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
    if args.layer is not None:
        if not 1 <= args.layer <= layers:
            raise UserError(f"--layer {args.layer}: the model has layers 1 to {layers}.")
        maps = [attention for attention in maps if attention.layer == args.layer]
    draw = draw_layers if args.layer is None else draw_heads
    lines = []
    modules = []
    for attention in maps:
        heads, queries, keys = attention.weights.shape
        share = torch.special.entr(attention.weights).sum(2).mean().item() / math.log(max(keys, 2))
        entropy = f"entropy {share:.0%} of an even one's"
        lines.append(f"{attention.name}: {heads} maps of {queries} x {keys} tokens, {entropy}")
        module = {
            "name": attention.name,
            "queries": attention.queries,
            "keys": attention.keys,
            "weights": attention.weights.tolist(),
            "gates": {side: gate.tolist() for side, gate in attention.gates.items()},
        }
        modules.append(module)
    figure = draw(maps, f"{args.model.name}, sentence {args.sentence} of {args.subset}")
    return Analysis(lines, figure, {"sentence": args.sentence, "modules": modules})


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
        """The number of the layer, from 1."""
        return next(int(part) for part in self.name.split(".") if part.isdigit()) + 1


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
    weights_by_name, routings, _ = pass_with_weights(model.to(device).eval(), sample["net_input"])
    net_input = sample["net_input"]
    source = symbols_at(task.source_dictionary, net_input["src_tokens"][0])
    target = []
    if "prev_output_tokens" in net_input:
        target = symbols_at(task.target_dictionary, net_input["prev_output_tokens"][0])
    maps = []
    for name, batch in weights_by_name.items():
        weights = batch[:, 0]
        # The decoder of a language model reads the source tokens
        queries = target if target and name.startswith("decoder.") else source
        keys = source if name.endswith(".encoder_attn") else queries
        gates: dict[str, Tensor] = {}
        groups = 1
        for side, routing in routings_of(name, routings):
            if routing.scope == "tokens":
                groups = groups if gates else routing.groups
                gates[side] = gates_by_expert(routing)
        # One routing is recorded for both sides
        if getattr(model.get_submodule(name), "shares_selection", False):
            gates["keys"] = gates["queries"]
        maps.append(AttentionMap(name, weights, queries, keys[-weights.size(2) :], gates, groups))
    return maps


def routings_of(name: str, routings: NamedRoutings) -> Iterator[tuple[str, Routing]]:
    """The side, "queries" or "keys", and the routing of each router of a module.

    Args:
        name: the name of the module.
        routings: the routings of all modules.
    """
    for path, routing in routings:
        if path.removesuffix(f".{routing.side}") == name:
            yield routing.side, routing


@torch.no_grad()
def pass_with_weights(
    model: nn.Module,
    net_input: dict[str, Any],
    watch: Callable[..., None] | None = None,
    features_only: bool = True,
) -> tuple[dict[str, Tensor], NamedRoutings, Any]:
    """One forward pass that keeps the weights of every attention.

    Args:
        model: the model, in evaluation mode.
        net_input: fairseq's arguments of the model.
        watch: a function that is called as soon as an attention has run, with the attention's name, the
            module, the keywords of its call, and the routings so far.
        features_only: whether the output layer is left out.

    Returns:
        Name of an attention → the weights of each head or slot, [H, B, T, S]; the routings; the output.

    Raises:
        UserError: for a model without such attention.
    """
    weights_by_name: dict[str, Tensor] = {}
    hooks = []

    def ask(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"need_weights": True, "need_head_weights": True}

    def keep(
        name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        weights_by_name[name] = result[1].float().cpu()
        if watch is not None:
            watch(name, module, kwargs, routings)

    for name, module in model.named_modules():
        # Otherwise fairseq calls torch's fused layer, which returns no weights
        if hasattr(module, "ever_training"):
            vars(module)["ever_training"] = True
        if not isinstance(module, (Attention, MultiheadAttention)):
            continue
        if isinstance(module, MultiheadAttention):
            module.skip_embed_dim_check = True  # else fairseq averages the weights over the heads
        hooks.append(module.register_forward_pre_hook(ask, with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(keep, name), with_kwargs=True))
    try:
        with collect_routings() as routings:
            output = model(**net_input, features_only=features_only)
    finally:
        for hook in hooks:
            hook.remove()
    if not weights_by_name:
        raise UserError(f"{type(model).__name__} has no attention that this analysis knows.")
    return weights_by_name, routings, output


def gates_by_expert(routing: Routing) -> Tensor:
    """The gate of each expert for each token, [E, N]; zero if the token did not choose the expert."""
    gate = routing.gates.detach().float()
    gates = gate.new_zeros(gate.size(0), routing.num_experts)
    return gates.scatter(1, routing.expert_ids, gate).t().cpu()


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
    columns = 0
    longest = 0
    for attention in maps:
        columns = max(columns, attention.weights.size(0))
        longest = max(longest, len(attention.queries), len(attention.keys))
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
    """Draw the map of one head, with the queries' gates on its left and the keys' gates below it."""
    group = head if attention.groups > 1 else 0
    strips = {}
    for side, gates in attention.gates.items():
        strips[side] = gates.view(attention.groups, -1, gates.size(1))[group]
    title = f"{'head' if attention.groups > 1 or not attention.gates else 'slot'} {head + 1}"
    draw_map(subfigure, attention.weights[head], attention.queries, strips, title, attention.keys)


def draw_map(
    subfigure: Any,
    weights: Tensor,
    rows: list[str],
    strips: dict[str, Tensor],
    title: str,
    columns: list[str] | None = None,
) -> None:
    """Draw the attention of one head, with the gates of the experts that the tokens chose next to it.

    Args:
        subfigure: a figure or a subfigure.
        weights: the weights of the head, [T, S].
        rows: the T attending tokens.
        strips: "queries" and "keys" → the gates, [E, T] and [E, S]; without a side that is not routed.
        title: the title of the map.
        columns: the S tokens that they attend to (None: the tokens in `rows`).
    """
    columns = rows if columns is None else columns
    wide = len(strips.get("queries", ()))
    tall = len(strips.get("keys", ()))
    unit = max(1, len(rows) // 24)
    panels = subfigure.subplots(
        1 + bool(tall),
        1 + bool(wide),
        squeeze=False,
        width_ratios=[wide * unit] * bool(wide) + [len(columns)],
        height_ratios=[len(rows)] + [tall * unit] * bool(tall),
    )
    for panel in panels.flat:
        panel.set_axis_off()
    main = panels[0][-1]
    _show(main, weights, [] if wide else rows, [] if tall else columns)
    main.set_title(title, fontsize=7)
    largest = max((gates.max().item() for gates in strips.values()), default=0.0) or 1.0
    experts = list(map(str, range(1, max(wide, tall) + 1)))
    if wide:
        _show(panels[0][0], strips["queries"].t(), rows, experts[:wide], "Oranges", largest)
    if tall:
        _show(panels[-1][-1], strips["keys"], experts[:tall], columns, "Oranges", largest)


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
