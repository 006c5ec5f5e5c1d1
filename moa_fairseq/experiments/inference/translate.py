"""Translate raw text with a trained run; it has the tokeniser, BPE, languages and model.

moa-fairseq translate runs/quickstart_moa english.txt > german.txt
echo "The file was not saved." | moa-fairseq translate runs/quickstart_moa --n-best 3
moa-fairseq translate runs/quickstart_moa english.txt --show-experts
"""

import argparse
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moa_fairseq.errors import UserError, printable
from moa_fairseq.experiments.analysis.routed_model import layer_of
from moa_fairseq.experiments.data.catalogue import TRANSLATION
from moa_fairseq.experiments.inference import text_model
from moa_fairseq.experiments.inference.text_model import (
    Answer,
    TextModel,
    answers,
    lines_of,
    open_output,
    shown,
    status_of,
)
from moa_fairseq.experiments.recipes.loading import build, read_mapping
from moa_fairseq.experiments.recipes.schema import Generate
from moa_fairseq.experiments.scoring.trained_model import symbols_at
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.routing import Routing
from moa_fairseq.plugin.forward_context import collect_routings

log = logging.getLogger(__name__)
# Flags of fairseq-generate that change the translations, and that fairseq's `generate` takes as arguments
_SEARCH_FLAGS = {
    "max_len_a",
    "max_len_b",
    "min_len",
    "match_source_len",
    "unnormalized",
    "no_early_stop",
    "unkpen",
    "no_repeat_ngram_size",
    "sampling",
    "sampling_topk",
    "sampling_topp",
    "temperature",
    "diverse_beam_groups",
    "diverse_beam_strength",
    "diversity_rate",
}
# Flags of fairseq-generate that change the translations, but that `generate` does not take
_IGNORED_FLAGS = {
    "replace_unk",
    "prefix_size",
    "constraints",
    "lm_path",
    "lm_weight",
    "retain_dropout",
}
# Those of the terminal's 256 colours that differ most on a dark and on a light background
_COLOURS = (33, 166, 36, 162, 178, 75, 99, 70, 131, 67, 208, 30)

_NO_ROUTER = "--show-experts: this model has no router; its attention has no experts."

ANY_ORDER = True  # FILE may be after the flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq translate`."""
    text_model.add_arguments(parser, "text file with one sentence per line")
    add = parser.add_argument
    add("--beam", type=int, metavar="N", help="beam size (default: the recipe's, else 5)")
    add("--lenpen", type=float, metavar="X", help="length penalty (the recipe's, else 1)")
    add("--n-best", type=int, default=1, metavar="N", help="translations per sentence (1)")
    add(
        "--show-experts",
        action="store_true",
        help="show the experts of each token below each translation",
    )
    add(
        "--layer", type=int, metavar="N", help="layer of --show-experts, from 1 (default: the last)"
    )


def run(args: argparse.Namespace) -> int:
    """Translate line by line. Returns the exit status."""
    text_model.resolve_model(args)
    settings = search_settings(args.run_dir, args.beam, args.lenpen)
    if args.layer is not None and not args.show_experts:
        raise UserError(f"--layer {args.layer} needs --show-experts.")
    if not 1 <= args.n_best <= settings["beam"]:
        raise UserError(f"--n-best {args.n_best} is not between 1 and --beam {settings['beam']}.")
    model = text_model.load(args, TRANSLATION)
    if args.show_experts and not any(isinstance(part, Attention) for part in model.modules()):
        raise UserError(_NO_ROUTER)
    left_out = 0
    with open_output(args) as stream, torch.no_grad():
        for batch in lines_of(args.file):
            for answer in answers(model, batch, settings):
                left_out += answer.is_left_out
                _print_translations(model, answer, args, stream)
            stream.flush()
    return status_of(left_out)


def _print_translations(
    model: TextModel, answer: Answer, args: argparse.Namespace, stream: Any
) -> None:
    """Print --n-best translations of a sentence, and its experts with --show-experts.

    Without translations, print as many empty lines.
    """
    if not answer.hypotheses:
        print("\n" * args.n_best, end="", file=stream)
        return
    for hypothesis in answer.hypotheses[: args.n_best]:
        score = f"{hypothesis['score'].item():.3f}\t" if args.n_best > 1 else ""
        print(score + shown(model.decode(hypothesis["tokens"]), stream), file=stream)
    if args.show_experts:
        is_coloured = stream.isatty() and "NO_COLOR" not in os.environ
        best = answer.hypotheses[0]["tokens"]
        for line in _expert_lines(model, answer.symbols, best, args.layer, is_coloured):
            print(line, file=stream)


def search_settings(
    run_dir: Path, beam: int | None = None, lenpen: float | None = None
) -> dict[str, Any]:
    """The settings of the search for translations: those of the run's recipe, where no flag is given.

    Args:
        run_dir: the run folder.
        beam: the --beam flag, or None.
        lenpen: the --lenpen flag, or None.

    Returns:
        Arguments of fairseq's `generate`.

    Raises:
        UserError: for a value that is not a finite number, a beam below 1, and a damaged recipe.yaml.
    """
    recipe = run_dir / "recipe.yaml"
    settings: dict[str, Any] = {"beam": 5, "lenpen": 1.0}
    if os.path.lexists(recipe):
        settings |= _recipe_settings(recipe)
    for key, flag, least in (("beam", beam, 1), ("lenpen", lenpen, -math.inf)):
        origin = f"{recipe}: generate.{key}"
        if flag is not None:
            settings[key] = flag
            origin = f"--{key}"
        if not (least <= settings[key] and math.isfinite(settings[key])):
            hint = ", at least 1" if key == "beam" else ""
            raise UserError(f"{origin} {settings[key]}: give a number{hint}.")
    return settings


def _recipe_settings(recipe: Path) -> dict[str, Any]:
    """The settings in a recipe's section `generate`; a warning names the flags that have no effect here."""
    mapping = read_mapping(recipe, "recipe").get("generate")
    if mapping is None:
        return {}
    section = build(Generate, mapping, str(recipe), "generate")
    settings = {"beam": section.beam, "lenpen": section.lenpen}
    ignored = []
    for flag, value in section.flags.items():
        name = flag.replace("-", "_")
        if name in _SEARCH_FLAGS:
            settings[name] = value
        elif name in _IGNORED_FLAGS:
            ignored.append(name)
    if ignored:
        names = ", ".join(sorted(ignored))
        log.warning(f"generate.flags of {recipe}: translate ignores {names}")
    return settings


def _expert_lines(
    model: TextModel, source: Tensor, target: Tensor, layer: int | None, coloured: bool
) -> Iterator[str]:
    """One line for each router of a layer: tokens with the experts they chose, the heaviest first.

    Args:
        model: the model.
        source: the symbols of the sentence, [S], with </s>.
        target: the symbols of its translation, [T], with </s>.
        layer: the number of the layer, from 1; None: the last layer with a router, of encoder and decoder.
        coloured: whether a word has the colour of its first expert.

    Raises:
        UserError: for a model without routers, and for a layer that does not exist.
    """
    prefix = target.roll(1)  # the decoder reads </s>, the last symbol, first
    inputs = [tokens.to(model.device)[None] for tokens in (source, prefix)]
    with collect_routings() as routings:
        model.models[0](inputs[0], torch.tensor([len(source)], device=model.device), inputs[1])
    if not routings:
        raise UserError(_NO_ROUTER)
    last_layers: dict[str, int] = {}  # encoder, decoder → its last layer with a router
    for name, _ in routings:
        stack = name.split(".")[0]
        last_layers[stack] = max(last_layers.get(stack, 0), layer_of(name))
    if layer is not None and not 1 <= layer <= max(last_layers.values()):
        raise UserError(f"--layer {layer}: the model has layers 1 to {max(last_layers.values())}.")
    for name, routing in routings:
        if layer_of(name) != (layer or last_layers[name.split(".")[0]]):
            continue
        words = symbols_at(model.tgt_dict, prefix)
        if name.startswith("encoder") or (routing.side == "keys" and "encoder_attn" in name):
            words = symbols_at(model.src_dict, source)
        yield f"  {name}: {' '.join(_words_with_experts(words, routing, coloured))}"


def _words_with_experts(words: Sequence[str], routing: Routing, coloured: bool) -> list[str]:
    """Each word with its experts in brackets, the heaviest first; the word has the colour of that expert."""
    chosen = routing.expert_ids[:, routing.shared :]
    gates = routing.gates[:, routing.shared :]
    order = gates.argsort(dim=-1, descending=True, stable=True)
    rows = chosen.gather(-1, order).tolist()
    marked = []
    for word, experts in zip(words if routing.scope == "tokens" else ["sentence"], rows):
        text = f"{printable(word)}[{','.join(str(expert) for expert in experts)}]"
        if coloured and experts:
            text = f"\033[38;5;{_COLOURS[experts[0] % len(_COLOURS)]}m{text}\033[0m"
        marked.append(text)
    return marked
