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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
from moa_fairseq.experiments.analysis.plots import Analysis
from moa_fairseq.experiments.scoring.trained_model import device_for, symbols_at
from moa_fairseq.experiments.tables import Column, Table
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.routing import Routing
from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.plugin.forward_context import NamedRoutings, forward_context

NAME = "induction-heads"
SUMMARY = "which heads find and copy what followed an earlier occurrence (SwitchHead Fig. 6)"
_SHOWN = 4  # maps of the heads with the highest scores
_LISTED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this analysis."""
    add = parser.add_argument
    add("--length", type=int, default=25, metavar="N", help="symbols that are read twice (25)")
    add("--sequences", type=int, default=16, metavar="N", help="how many sequences (16)")
    add("--seed", type=int, default=1, metavar="N", help="of the symbols (1)")


def analyze(args: argparse.Namespace, model: nn.Module, task: Any) -> Analysis:
    """The scores of every head of a causal language model.

    Args:
        args: the flags: length, sequences, seed, model (its path, for the title) and cpu.
        model, task: as `load_trained` gives them.

    Raises:
        UserError: for another kind of model, and for sequences that it does not read.
    """
    if not hasattr(model, "decoder") or hasattr(model, "encoder"):
        raise UserError(
            f"induction-heads is for causal language models, and this is a {type(model).__name__}."
        )
    dictionary = task.source_dictionary
    counts = torch.tensor(dictionary.count)
    counts[: dictionary.nspecial] = 0
    symbols = counts.nonzero()[:, 0]
    block = task.args.tokens_per_sample
    network: Any = model
    most = min(len(symbols), (min(block, network.max_positions()) - 1) // 2)
    limits = {"--length": (args.length, 2, most), "--sequences": (args.sequences, 1, 1024)}
    for flag, (value, least, largest) in limits.items():
        if not least <= value <= largest:
            raise UserError(
                f"{flag} {value}: give {least} to {largest:,}. The model reads {block:,} symbols at once, of "
                f"{len(symbols):,} different ones, and a sequence has twice --length and one more."
            )
    generator = torch.Generator().manual_seed(args.seed)
    patterns = torch.empty(args.sequences, args.length, dtype=torch.long)  # [B, N]
    for row in patterns:
        row.copy_(symbols[torch.randperm(len(symbols), generator=generator)[: args.length]])
    beginning = torch.full((args.sequences, 1), dictionary.eos())
    tokens = torch.cat([beginning, patterns, patterns], dim=1)
    heads, predicted = measure_heads(model, tokens, device_for(args.cpu))
    heads.sort(key=lambda head: -head.prefix)
    columns = [Column("name", "Module"), Column("label", "Head")]
    columns += [Column("prefix", "Prefix matching", ".3f"), Column("copying", "Copying", ".3f")]
    columns += [Column("chosen", "Chosen by", ".1%")]
    columns += [Column("experts", "Prefix matching by the value's expert")]
    listed = []
    for head in heads[:_LISTED]:
        experts = []
        for part in head.experts:
            if part.chosen:
                experts.append(f"{part.label[7:]}: {part.prefix:.2f}")
        listed.append(dict(vars(head), experts=", ".join(experts)))
    summary = {
        "even_attention": (1 / torch.arange(args.length + 2, 2 * args.length + 1)).mean().item(),
        "even_copying": 1 / args.length,
        "predicted": predicted,
        "heads": [dataclasses.asdict(dataclasses.replace(head, map=None)) for head in heads],
    }
    title = f"{args.model.name}: {args.length} random symbols, read twice"
    figure = draw_scores(heads, symbols_at(dictionary, tokens[0]), title)
    lines = [
        Table(columns, listed).text().rstrip("\n"),
        f"even attention: {summary['even_attention']:.3f}; copying by chance: {summary['even_copying']:.3f}",
        f"the model predicts {predicted:.1%} of the symbols' second time",
    ]
    settings = {"length": args.length, "sequences": args.sequences, "seed": args.seed}
    return Analysis(lines, figure, settings | summary)


@dataclasses.dataclass
class HeadScore:
    """The scores of one head, or of one expert of its values.

    Args:
        name: the module's path in the model.
        label: "head 3", or "expert 3" where an expert is a head; the first is 1.
        prefix: prefix matching.
        copying: None where the module's output is not one sum over heads, and for an adaptive softmax.
        chosen: by which share of the symbols.
        experts: of the values at what is attended to, where they have any.
        map: the attention in the first sequence, [T, T], zero where the head was not chosen; and the gates of
            the output's and the value's experts, [E, T].
    """

    name: str
    label: str
    prefix: float
    copying: float | None
    chosen: float
    experts: list[HeadScore] = dataclasses.field(default_factory=list)
    map: tuple[Tensor, dict[str, Tensor]] | None = None


def measure_heads(
    model: nn.Module, tokens: Tensor, device: torch.device
) -> tuple[list[HeadScore], float]:
    """The scores of every head in forward order.

    Args:
        model: a causal language model; it stays on the device, in evaluation mode.
        tokens: [B, 1 + 2·N]: a beginning, and N different symbols twice.
        device: where the model runs.

    Returns:
        The scores, and the share of the second time's symbols that the model's likeliest symbol is.

    Raises:
        UserError: for a model without attention that this analysis knows.
    """
    model = model.to(device).eval()
    tokens = tokens.to(device)
    length = tokens.size(1) // 2
    places = _Places(tokens, torch.arange(length + 1, 2 * length), torch.arange(2, length + 1))
    written: dict[str, _Written] = {}

    def watch(name: str, module: nn.Module, call: dict[str, Any], routings: NamedRoutings) -> None:
        if isinstance(module, Attention):
            sides = dict(routings_of(name, routings))
            written[name] = _direct_effects(model, module, call, places, sides)

    with torch.no_grad():
        weights_by_name, routings, _ = pass_with_weights(model, {"src_tokens": tokens}, watch)
        likeliest = model(tokens)[0][:, places.queries].argmax(-1)
    heads: list[HeadScore] = []
    for name, weights in weights_by_name.items():
        module = model.get_submodule(name)
        sides = dict(routings_of(name, routings))
        heads += _scores(name, module, weights, sides, written.get(name), places)
    return heads, (likeliest == tokens[:, places.keys]).double().mean().item()


@dataclasses.dataclass
class _Places:
    """Where scores are taken: at place queries[i] the symbol to copy stands at keys[i], both [N − 1]."""

    tokens: Tensor
    queries: Tensor
    keys: Tensor


@dataclasses.dataclass
class _Written:
    """Copying of each head or slot at the queries, [H, B, N − 1]; of each value expert, [H·E, B, N − 1]."""

    heads: list[Tensor] = dataclasses.field(default_factory=list)
    value_experts: list[Tensor] = dataclasses.field(default_factory=list)


def _value_routing(module: nn.Module, routings: dict[str, Routing]) -> Routing | None:
    """What chose the experts of the values, of SwitchHead with any."""
    if not isinstance(module, SwitchHeadAttention) or "v" not in module.experts:
        return None
    return routings["queries" if module.shares_selection else "keys"]


def _direct_effects(
    model: nn.Module,
    module: Attention,
    call: dict[str, Any],
    places: _Places,
    routings: dict[str, Routing],
) -> _Written:
    """The copying of each head, by passes of the module in which only that head has a result."""
    decoder: Any = model.decoder
    written = _Written()
    if decoder.adaptive_softmax is not None:
        return written
    gain = getattr(decoder.layer_norm, "weight", 1.0)
    zero = decoder.output_layer(torch.zeros_like(call["query"][:1, :1]))

    def copying() -> Tensor:
        with forward_context(routings=()):
            out = type(module).forward(module, **call)[0] - nothing  # [T, B, C]
        x = out.transpose(0, 1)[:, places.queries]
        if isinstance(decoder.layer_norm, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        logits = decoder.output_layer(x * gain) - zero  # [B, N − 1, V]
        raised = (logits - logits.mean(-1, keepdim=True)).relu()
        every = places.tokens[:, None, 1 : 1 + places.keys.numel() + 1].expand(-1, x.size(1), -1)
        copied = places.tokens[:, places.keys, None]
        total = raised.gather(2, every).sum(-1)
        return torch.where(total > 0, raised.gather(2, copied)[..., 0] / total, 0.0).cpu()

    nothing: Any = 0.0
    with _ablate_all_but(module, None) as heads, forward_context(routings=()):
        nothing = type(module).forward(module, **call)[0]  # biases
    if len(heads) != 1:  # it attends in several parts
        return written
    for head in range(heads[0]):
        with _ablate_all_but(module, head):
            written.heads.append(copying())
    values = _value_routing(module, routings)
    if values is not None:
        v_proj: Any = module.v_proj
        for expert in range(values.num_experts):
            chosen = values.expert_ids == expert

            def keep(part: nn.Module, args: tuple, chosen: Tensor = chosen) -> tuple:
                rows, permutation, gates, *options = args
                return rows, permutation, gates * chosen, *options

            hook = v_proj.register_forward_pre_hook(keep)
            written.value_experts.append(copying())
            hook.remove()
    return written


@contextmanager
def _ablate_all_but(module: Attention, head: int | None) -> Iterator[list[int]]:
    """Inside the block the results of all heads but one are zero; fills the list with the number of heads."""
    calls: list[int] = []

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        heads, weights = type(module).attend(module, *args, **kwargs)
        calls.append(heads.size(1))
        results = torch.zeros_like(heads)
        if head is not None:
            results[:, head] = heads[:, head]
        return results, weights

    vars(module)["attend"] = attend
    try:
        yield calls
    finally:
        del vars(module)["attend"]


def _scores(
    name: str,
    module: nn.Module,
    weights: Tensor,
    routings: dict[str, Routing],
    written: _Written | None,
    places: _Places,
) -> list[HeadScore]:
    """The scores of a module's heads from its weights, [H, B, T, S]."""
    count, batch, length, _ = weights.shape
    written = written or _Written()
    copying = torch.stack(written.heads) if written.heads else None
    chosen = torch.ones(count, batch, length, dtype=torch.bool)
    word = "head"
    routing = routings.get("queries")
    # MAE's experts share all heads, SwitchHead's stand around them; elsewhere tokens choose the heads.
    shared = (MixtureOfAttentiveExperts, SwitchHeadAttention)
    if routing is not None and not isinstance(module, shared):
        word = "expert"
        index = routing.expert_ids
        every = routing.num_experts
        if isinstance(module, MixtureOfAttention):
            index = module.head_index(routing)
            every *= module.heads_per_expert
        # [N, slots] → [slots, B, T]
        slots = index.view(batch, length, count).permute(2, 0, 1).cpu()
        index = slots[..., None].expand_as(weights)
        weights = weights.new_zeros(every, *weights.shape[1:]).scatter(0, index, weights)
        chosen = torch.zeros(every, batch, length, dtype=torch.bool).scatter(0, slots, True)
        # NAMOH attends in packed rows
        if copying is not None and len(copying) not in (count, every):
            copying = None
        # Whose results stand by head
        if copying is not None and not isinstance(module, MixtureOfHeads):
            place = slots[:, :, places.queries]
            copying = copying.new_zeros(every, *copying.shape[1:]).scatter(0, place, copying)
    at = weights[:, :, places.queries, places.keys]  # [H, B, N − 1]
    chosen = chosen[:, :, places.queries]
    gates = {}
    if isinstance(module, SwitchHeadAttention):
        gates = {side: gates_by_expert(each).cpu() for side, each in routings.items()}
        if module.shares_selection:
            gates["keys"] = gates["queries"]
    values = _value_routing(module, routings)
    scores = []
    for head in range(weights.size(0)):
        experts = []
        if values is not None:
            size = values.num_experts // values.groups
            for expert in range(size):
                number = head * size + expert
                wrote = (values.expert_ids == number).any(1).view(batch, length)[:, places.keys]
                effect = written.value_experts[number] if written.value_experts else None
                label = f"expert {expert + 1}"
                experts.append(_head_score(name, label, at[head], effect, wrote.cpu()))
        head_copying = None if copying is None else copying[head]
        score = _head_score(name, f"{word} {head + 1}", at[head], head_copying, chosen[head])
        first = {}
        for side, each in gates.items():
            first[side] = each.view(len(weights), -1, batch, length)[head, :, 0]
        scores.append(dataclasses.replace(score, experts=experts, map=(weights[head, 0], first)))
    return scores


def _head_score(
    name: str, label: str, at: Tensor, copying: Tensor | None, chosen: Tensor
) -> HeadScore:
    """Means where the head was chosen; at, copying, chosen: [B, N − 1]."""
    share = chosen.double().mean().item()
    if not share:
        return HeadScore(name, label, 0.0, None if copying is None else 0.0, share)
    effect = None if copying is None else copying[chosen].double().mean().item()
    return HeadScore(name, label, at[chosen].double().mean().item(), effect, share)


def draw_scores(heads: Sequence[HeadScore], names: list[str], title: str = "") -> Figure:
    """Both scores of all heads, and the maps of the heads that match most in the first sequence.

    Args:
        heads: sorted, the highest first.
        names: of the T symbols of that sequence.
        title: of the picture.
    """
    with_maps = [head for head in heads[:_SHOWN] if head.map is not None]
    figure = Figure(figsize=(4.4 * len(with_maps) + 0.4, 7.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.7])
    top, bottom = parts
    names_of_modules = {head.name for head in heads}
    modules = sorted(names_of_modules, key=lambda name: list(map(int, re.findall(r"\d+", name))))
    most = max(int(head.label.split()[1]) for head in heads)
    for panel, score in zip(top.subplots(1, 2), ("prefix", "copying")):
        values = torch.full((len(modules), most), torch.nan)
        for head in heads:
            value = getattr(head, score)
            if value is not None:
                values[modules.index(head.name), int(head.label.split()[1]) - 1] = value
        image = panel.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        panel.set_xticks(range(most), list(map(str, range(1, most + 1))), fontsize=6)
        layers = range(len(modules))
        panel.set_yticks(layers, [str(layer + 1) for layer in layers], fontsize=6)
        panel.set_xlabel(heads[0].label.split()[0], fontsize=7)
        panel.set_ylabel("layer", fontsize=7)
        panel.set_title({"prefix": "prefix matching", "copying": "copying"}[score], fontsize=8)
        top.colorbar(image, ax=panel).ax.tick_params(labelsize=6)
    for head, place in zip(with_maps, bottom.subfigures(1, len(with_maps), squeeze=False)[0]):
        weights, gates = head.map or (torch.zeros(1, 1), {})
        layer = modules.index(head.name) + 1
        draw_map(place, weights, names, gates, f"layer {layer}, {head.label}: {head.prefix:.2f}")
    figure.suptitle(title, fontsize=10)
    return figure
