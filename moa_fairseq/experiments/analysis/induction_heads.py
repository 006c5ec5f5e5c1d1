"""Which heads look up what followed the last time: prefix matching and copying (arXiv 2209.11895).

  moa-fairseq analyze induction-heads runs/wikitext2_lm_switchhead_tiny --output heads.png
  moa-fairseq analyze induction-heads RUN --length 40 --sequences 32 --output heads.png --json heads.json

Random symbols, all different, are read twice in a row, behind </s>. At each symbol of the second time:

- prefix matching: the attention that a head pays to the symbol after the earlier occurrence. Even attention
  would pay about 1 / (1.5 * length).
- copying: what the head writes there goes through the last norm's gain and the output matrix, without what
  stands between (its direct effect). Of all that it raises the logits of the sequence's symbols above their
  mean over the vocabulary, this is the share of the symbol after the earlier occurrence; 1 / length is even.

A head that does both is an induction head. The picture shows their attention, as SwitchHead's Figure 6 does.
The paper repeats 25 tokens four times, and leaves out the most and the least common ones; here each sequence
is read twice, and all symbols of the dictionary can occur.

Scores are means over the second time of all sequences. In MoA, MoH and their relatives a head is an expert,
with means over the symbols that chose it. In SwitchHead each head is also split by the experts that wrote the
value of the symbol attended to.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_maps import (
    draw_map,
    gates_by_expert,
    pass_with_weights,
    routings_of,
)
from moa_fairseq.experiments.analysis.direct_effects import (
    Copying,
    Places,
    direct_effects,
    value_routing,
)
from moa_fairseq.experiments.analysis.plots import Analysis
from moa_fairseq.experiments.scoring.trained_model import device_for, symbols_at
from moa_fairseq.experiments.tables import Column, Table
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.plugin.forward_context import NamedRoutings

NAME = "induction-heads"
SUMMARY = "which heads find and copy what followed an earlier occurrence (SwitchHead Fig. 6)"
_SHOWN = 4  # number of heads whose maps are drawn
_LISTED = 10  # number of heads in the printed table
_MOST_SEQUENCES = 1024
_COLUMNS = (
    Column("name", "Module"),
    Column("label", "Head"),
    Column("prefix", "Prefix matching", ".3f"),
    Column("copying", "Copying", ".3f"),
    Column("chosen", "Chosen by", ".1%"),
    Column("experts", "Prefix matching by the value's expert"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add = parser.add_argument
    add("--length", type=int, default=25, metavar="N", help="symbols that are read twice (25)")
    add("--sequences", type=int, default=16, metavar="N", help="how many sequences (16)")
    add("--seed", type=int, default=1, metavar="N", help="of the symbols (1)")


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """The scores of every head of a causal language model.

    Args:
        args: the flags: length, sequences, seed, model (a path, for the title) and cpu.
        model, task: what `load_trained` returns.

    Raises:
        UserError: for another kind of model, and for sequences that are too long for it.
    """
    if not hasattr(model, "decoder") or hasattr(model, "encoder"):
        raise UserError(
            f"induction-heads is for causal language models, and this is a {type(model).__name__}."
        )
    dictionary = task.source_dictionary
    counts = torch.tensor(dictionary.count)
    counts[: dictionary.nspecial] = 0
    symbols = counts.nonzero()[:, 0]
    _check_sizes(args, len(symbols), task.args.tokens_per_sample, model)
    tokens = _repeated_symbols(args, symbols, dictionary.eos())
    heads, predicted = measure_heads(model, tokens, device_for(args.cpu))
    heads.sort(key=lambda head: -head.prefix)
    even_attention = (1 / torch.arange(args.length + 2, 2 * args.length + 1)).mean().item()
    even_copying = 1 / args.length
    title = f"{args.model.name}: {args.length} random symbols, read twice"
    figure = draw_scores(heads, symbols_at(dictionary, tokens[0]), title)
    lines = [
        _table(heads[:_LISTED]).text().rstrip("\n"),
        f"even attention: {even_attention:.3f}; copying by chance: {even_copying:.3f}",
        f"the model predicts {predicted:.1%} of the symbols' second time",
    ]
    content = {
        "length": args.length,
        "sequences": args.sequences,
        "seed": args.seed,
        "even_attention": even_attention,
        "even_copying": even_copying,
        "predicted": predicted,
        "heads": [head.record() for head in heads],
    }
    return Analysis(lines, figure, content)


def _check_sizes(args: argparse.Namespace, num_symbols: int, block: int, model: Any) -> None:
    """Raise UserError unless the model can read --sequences of --length different symbols twice."""
    longest = min(num_symbols, (min(block, model.max_positions()) - 1) // 2)
    limits = (
        ("--length", args.length, 2, longest),
        ("--sequences", args.sequences, 1, _MOST_SEQUENCES),
    )
    for flag, value, least, largest in limits:
        if not least <= value <= largest:
            raise UserError(
                f"{flag} {value}: give {least} to {largest:,}. The model reads {block:,} symbols at once, of "
                f"{num_symbols:,} different ones, and a sequence has twice --length and one more."
            )


def _repeated_symbols(args: argparse.Namespace, symbols: Tensor, eos: int) -> Tensor:
    """Sequences of </s> and N random symbols twice, [B, 2 N + 1]."""
    generator = torch.Generator().manual_seed(args.seed)
    start = torch.tensor([eos])
    sequences = []
    for _ in range(args.sequences):
        pattern = symbols[torch.randperm(len(symbols), generator=generator)[: args.length]]
        sequences.append(torch.cat([start, pattern, pattern]))
    return torch.stack(sequences)


class HeadMap(NamedTuple):
    """The attention of a head in the first sequence.

    Args:
        weights: the weights, [T, T]; zero for symbols that did not choose the head.
        gates: side → the gates of the head's experts, [E, T].
    """

    weights: Tensor
    gates: dict[str, Tensor]


@dataclasses.dataclass
class HeadScore:
    """The scores of a head, or of a value expert of a head.

    Args:
        name: the module's path in the model.
        kind: "head", or "expert" if an expert is a head.
        number: the number of the head or expert, from 1.
        prefix: the score of prefix matching.
        copying: the score of copying; None if the module's output is not a sum over heads, or if the model
            has an adaptive softmax.
        chosen: the share of the symbols that chose the head or expert.
        experts: the scores of the head's value experts; empty without value experts.
        map: the attention in the first sequence; None for a value expert.
    """

    name: str
    kind: str
    number: int
    prefix: float
    copying: float | None
    chosen: float
    experts: list[HeadScore] = dataclasses.field(default_factory=list)
    map: HeadMap | None = None

    @property
    def label(self) -> str:
        """The kind with the number, such as "expert 3"."""
        return f"{self.kind} {self.number}"

    def record(self) -> dict[str, Any]:
        """The scores as JSON values; "map" is None."""
        keys = ("name", "label", "prefix", "copying", "chosen")
        record = {key: getattr(self, key) for key in keys}
        return record | {"experts": [part.record() for part in self.experts], "map": None}


def _table(heads: Sequence[HeadScore]) -> Table:
    """The printed table, with the value experts that were chosen."""
    rows = []
    for head in heads:
        experts = [f"{part.number}: {part.prefix:.2f}" for part in head.experts if part.chosen]
        rows.append(head.record() | {"experts": ", ".join(experts)})
    return Table(_COLUMNS, rows)


def measure_heads(
    model: nn.Module, tokens: Tensor, device: torch.device
) -> tuple[list[HeadScore], float]:
    """The scores of every head in forward order.

    Args:
        model: a causal language model; it stays on the device, in evaluation mode.
        tokens: the symbols of B sequences, [B, 1 + 2·N]: </s>, and N different symbols twice.
        device: the device that the model runs on.

    Returns:
        The scores, and the share of the repeated symbols for which the model's likeliest symbol is right.

    Raises:
        UserError: for a model without attention of a kind that this analysis knows.
    """
    model = model.to(device).eval()
    tokens = tokens.to(device)
    length = tokens.size(1) // 2
    places = Places(tokens, torch.arange(length + 1, 2 * length), torch.arange(2, length + 1))
    effects: dict[str, Copying] = {}

    def watch(name: str, module: nn.Module, call: dict[str, Any], routings: NamedRoutings) -> None:
        if isinstance(module, Attention):
            sides = dict(routings_of(name, routings))
            effects[name] = direct_effects(model, module, call, places, sides)

    with torch.no_grad():
        weights_by_name, routings, _ = pass_with_weights(model, {"src_tokens": tokens}, watch)
        likeliest = model(tokens)[0][:, places.queries].argmax(-1)
    heads: list[HeadScore] = []
    for name, weights in weights_by_name.items():
        module = model.get_submodule(name)
        sides = dict(routings_of(name, routings))
        heads += _scores(name, module, weights, sides, effects.get(name, Copying()), places)
    return heads, (likeliest == tokens[:, places.keys]).double().mean().item()


def _scores(
    name: str,
    module: nn.Module,
    weights: Tensor,
    routings: dict[str, Routing],
    effects: Copying,
    places: Places,
) -> list[HeadScore]:
    """The scores of a module's heads from its weights, [H, B, T, S]."""
    copying = torch.stack(effects.heads) if effects.heads else None
    chosen = torch.ones(weights.shape[:3], dtype=torch.bool)
    kind = "head"
    routing = routings.get("queries")
    # In other families, tokens choose heads: MAE's experts share all heads, and SwitchHead's are projections
    shared = (MixtureOfAttentiveExperts, SwitchHeadAttention)
    if routing is not None and not isinstance(module, shared):
        kind = "expert"
        weights, chosen, copying = _by_expert(module, routing, weights, copying, places)
    attention = weights[:, :, places.queries, places.keys]  # [H, B, N − 1]
    chosen = chosen[:, :, places.queries]
    gates = _gates_of_heads(module, routings, places)
    values = value_routing(module, routings)
    scores = []
    for head, head_attention in enumerate(attention):
        effect = None if copying is None else copying[head]
        score = _head_score(name, kind, head + 1, head_attention, effect, chosen[head])
        if values is not None:
            score.experts = _value_scores(name, head, values, head_attention, effects, places)
        score.map = HeadMap(weights[head, 0], {side: gate[head] for side, gate in gates.items()})
        scores.append(score)
    return scores


def _gates_of_heads(
    module: nn.Module, routings: dict[str, Routing], places: Places
) -> dict[str, Tensor]:
    """Side → the gates of SwitchHead's experts in the first sequence, [H, E, T]; {} for other families."""
    gates: dict[str, Tensor] = {}
    if not isinstance(module, SwitchHeadAttention):
        return gates
    for side, routing in routings.items():
        by_expert = gates_by_expert(routing).cpu()
        gates[side] = by_expert.view(module.num_heads, -1, *places.tokens.shape)[:, :, 0]
    if module.shares_selection:
        gates["keys"] = gates["queries"]
    return gates


def _by_expert(
    module: nn.Module, routing: Routing, weights: Tensor, copying: Tensor | None, places: Places
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort the weights and the copying of each slot by the expert in it, which is a head.

    Args:
        module: the attention.
        routing: the routing of its B·T queries.
        weights: the weights of the K slots, [K, B, T, S].
        copying: the copying of the slots or experts, [K or E, B, N − 1], or None.
        places: the positions of the scores.

    Returns:
        The weights of the experts, [E, B, T, S]; the tokens that chose each expert, [E, B, T] bool; the
        copying of the experts, [E, B, N − 1], or None.
    """
    count, batch, length, _ = weights.shape
    index = routing.expert_ids
    experts = routing.num_experts
    if isinstance(module, MixtureOfAttention):
        index = module.head_index(routing)
        experts *= module.heads_per_expert
    # [N, slots] → [slots, B, T]
    slots = index.view(batch, length, count).permute(2, 0, 1).cpu()
    by_expert = weights.new_zeros(experts, *weights.shape[1:])
    by_expert = by_expert.scatter(0, slots[..., None].expand_as(weights), weights)
    chosen = torch.zeros(experts, batch, length, dtype=torch.bool).scatter(0, slots, True)
    # NAMOH attends in packed rows, whose copying belongs to no single expert
    if copying is not None and len(copying) not in (count, experts):
        copying = None
    # The copying of MoH is already sorted by head
    if copying is not None and not isinstance(module, MixtureOfHeads):
        zeros = copying.new_zeros(experts, *copying.shape[1:])
        copying = zeros.scatter(0, slots[:, :, places.queries], copying)
    return by_expert, chosen, copying


def _value_scores(
    name: str, head: int, values: Routing, attention: Tensor, effects: Copying, places: Places
) -> list[HeadScore]:
    """The scores of a head's value experts, over the queries whose key has a value from that expert."""
    scores = []
    size = values.num_experts // values.groups
    for expert in range(size):
        index = head * size + expert
        is_chosen = (values.expert_ids == index).any(1).view_as(places.tokens)[:, places.keys]
        effect = effects.value_experts[index] if effects.value_experts else None
        score = _head_score(name, "expert", expert + 1, attention, effect, is_chosen.cpu())
        scores.append(score)
    return scores


def _head_score(
    name: str, kind: str, number: int, attention: Tensor, copying: Tensor | None, chosen: Tensor
) -> HeadScore:
    """The means over the queries that chose the head; attention, copying and chosen are [B, N − 1]."""
    prefix = _mean(attention[chosen])
    effect = None if copying is None else _mean(copying[chosen])
    return HeadScore(name, kind, number, prefix, effect, _mean(chosen))


def _mean(values: Tensor) -> float:
    """The mean; 0 if no query chose the head."""
    return values.double().mean().item() if values.numel() else 0.0


def draw_scores(heads: Sequence[HeadScore], names: list[str], title: str = "") -> Figure:
    """Draw both scores of all heads, and the maps of the first heads for the first sequence.

    Args:
        heads: the scores, those with the highest prefix matching first.
        names: the T symbols of the first sequence.
        title: the title of the picture.
    """
    with_maps = heads[:_SHOWN]
    layers = sorted({head.name for head in heads}, key=_numbers_in)
    figure = Figure(figsize=(4.4 * len(with_maps) + 0.4, 7.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.7])
    top, bottom = parts
    prefix_panel, copying_panel = top.subplots(1, 2)
    _draw_matrix(prefix_panel, heads, layers, "prefix", "prefix matching")
    _draw_matrix(copying_panel, heads, layers, "copying", "copying")
    for head, place in zip(with_maps, bottom.subfigures(1, len(with_maps), squeeze=False)[0]):
        weights, gates = head.map or HeadMap(torch.zeros(1, 1), {})
        layer = layers.index(head.name) + 1
        draw_map(place, weights, names, gates, f"layer {layer}, {head.label}: {head.prefix:.2f}")
    figure.suptitle(title, fontsize=10)
    return figure


def _numbers_in(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _draw_matrix(
    panel: Any, heads: Sequence[HeadScore], layers: list[str], score: str, title: str
) -> None:
    """Draw one score of all heads: a row for each layer, by the names of the modules."""
    columns = max(head.number for head in heads)
    values = torch.full((len(layers), columns), torch.nan)
    for head in heads:
        value = getattr(head, score)
        if value is not None:
            values[layers.index(head.name), head.number - 1] = value
    image = panel.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    panel.set_xticks(range(columns), list(map(str, range(1, columns + 1))), fontsize=6)
    panel.set_yticks(range(len(layers)), list(map(str, range(1, len(layers) + 1))), fontsize=6)
    panel.set_xlabel(heads[0].kind, fontsize=7)
    panel.set_ylabel("layer", fontsize=7)
    panel.set_title(title, fontsize=8)
    panel.figure.colorbar(image, ax=panel).ax.tick_params(labelsize=6)
