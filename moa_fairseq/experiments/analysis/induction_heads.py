"""Which heads look up what followed the last time: prefix matching and copying (arXiv 2209.11895).

  moa-fairseq analyze induction-heads runs/wikitext2_lm_switchhead_tiny --output heads.png
  moa-fairseq analyze induction-heads RUN --length 40 --sequences 32 --output heads.png --json heads.json

Each sequence is </s> and then --length random symbols, all different, twice. Two scores are measured at every
symbol of the second time but the last, where the next symbol can be looked up:

- prefix matching: the head's attention to the first occurrence of the next symbol. If the attention were even
  over all symbols so far, this would be about 1 / (1.5 * length).
- copying: the share of the next symbol in what the head raises. The head's output goes through the last
  norm's gain and the output matrix, without the layers between (its direct effect). This raises logits of the
  sequence's symbols above the mean over the vocabulary. An even share would be 1 / length.

A head that does both is an induction head. The picture shows both scores of all heads, and the attention of
the heads with the most prefix matching, as SwitchHead's Figure 6 does. The paper repeats 25 tokens four times
and leaves out the most and the least common ones; here all symbols of the dictionary can occur.

Scores are means over all sequences. In MoA, MoH and their relatives a head is an expert, and its scores are
means over the symbols that chose it. In SwitchHead each head is also split by the experts that wrote the
value of the symbol attended to.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.attention_maps import draw_map
from moa_fairseq.experiments.analysis.head_scores import HeadScore, measure_heads
from moa_fairseq.experiments.analysis.result import Analysis
from moa_fairseq.experiments.scoring.trained_model import device_for, symbols_at
from moa_fairseq.experiments.tables import Column, Table, terminal_width

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
    symbols = counts.nonzero()[:, 0]  # that occur in the training text
    _check_sizes(args, len(symbols), task.args.tokens_per_sample, model)
    tokens = _repeated_symbols(args, symbols, dictionary.eos())
    heads, predicted = measure_heads(model, tokens, device_for(args.cpu))
    heads.sort(key=lambda head: -head.prefix)
    num_keys = torch.arange(args.length + 2, 2 * args.length + 1)  # of each measured symbol
    even_attention = (1 / num_keys).mean().item()
    even_copying = 1 / args.length
    title = f"{args.model.name}: {args.length} random symbols, read twice"
    figure = draw_scores(heads, symbols_at(dictionary, tokens[0]), title)
    lines = [
        _table(heads[:_LISTED]).text(terminal_width()).rstrip("\n"),
        f"even attention: {even_attention:.3f}; copying by chance: {even_copying:.3f}",
        f"the model predicts {predicted:.1%} of the symbols' second time",
    ]
    report = {
        "length": args.length,
        "sequences": args.sequences,
        "seed": args.seed,
        "even_attention": even_attention,
        "even_copying": even_copying,
        "predicted": predicted,
        "heads": [head.record() for head in heads],
    }
    return Analysis(lines, figure, report)


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


def _table(heads: Sequence[HeadScore]) -> Table:
    """The printed table, with the value experts that were chosen."""
    rows = []
    for head in heads:
        experts = [f"{item.number}: {item.prefix:.2f}" for item in head.experts if item.chosen]
        rows.append(head.record() | {"experts": ", ".join(experts)})
    return Table(_COLUMNS, rows)


def draw_scores(heads: Sequence[HeadScore], names: list[str], title: str = "") -> Figure:
    """Draw both scores of all heads, and the maps of the first heads for the first sequence.

    Args:
        heads: the scores, those with the highest prefix matching first.
        names: the T symbols of the first sequence.
        title: the title of the picture.
    """
    with_maps = heads[:_SHOWN]
    modules = sorted({head.name for head in heads}, key=_numbers_in)
    figure = Figure(figsize=(4.4 * len(with_maps) + 0.4, 7.6), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.7])
    top, bottom = parts
    prefix_panel, copying_panel = top.subplots(1, 2)
    _draw_matrix(prefix_panel, heads, modules, "prefix", "prefix matching")
    _draw_matrix(copying_panel, heads, modules, "copying", "copying")
    for head, subfigure in zip(with_maps, bottom.subfigures(1, len(with_maps), squeeze=False)[0]):
        assert head.map is not None  # only value experts have none
        weights, gates = head.map
        layer = modules.index(head.name) + 1
        title_of_map = f"layer {layer}, {head.label}: {head.prefix:.2f}"
        draw_map(subfigure, weights, names, names, gates, title_of_map)
    figure.suptitle(title, fontsize=10)
    return figure


def _numbers_in(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _draw_matrix(
    panel: Any, heads: Sequence[HeadScore], modules: list[str], score: str, title: str
) -> None:
    """Draw one score of all heads as a heat map: a row for each module, a column for each head."""
    columns = max(head.number for head in heads)
    values = torch.full((len(modules), columns), torch.nan)
    for head in heads:
        value = getattr(head, score)
        if value is not None:
            values[modules.index(head.name), head.number - 1] = value
    image = panel.imshow(values.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    panel.set_xticks(range(columns), range(1, columns + 1), fontsize=6)
    panel.set_yticks(range(len(modules)), range(1, len(modules) + 1), fontsize=6)
    panel.set_xlabel(heads[0].kind, fontsize=7)
    panel.set_ylabel("layer", fontsize=7)
    panel.set_title(title, fontsize=8)
    panel.figure.colorbar(image, ax=panel).ax.tick_params(labelsize=6)
