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
from moa_fairseq.experiments.data.catalogue import TRANSLATION
from moa_fairseq.experiments.inference import text_model
from moa_fairseq.experiments.inference.text_model import (
    TextModel,
    hypotheses,
    lines_of,
    open_output,
    shown,
    status_of,
)
from moa_fairseq.experiments.recipes.loading import build, read_mapping
from moa_fairseq.experiments.recipes.schema import Generate
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

ANY_ORDER = True  # FILE may be after the flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq translate`."""
    text_model.add_arguments(parser, "text file with one sentence per line")
    parser.add_argument(
        "--beam", type=int, metavar="N", help="beam size (default: the recipe's, else 5)"
    )
    parser.add_argument(
        "--lenpen", type=float, metavar="X", help="length penalty (the recipe's, else 1)"
    )
    parser.add_argument(
        "--n-best", type=int, default=1, metavar="N", help="translations per sentence (1)"
    )
    parser.add_argument(
        "--show-experts",
        action="store_true",
        help="show the experts of each token below each translation",
    )
    parser.add_argument(
        "--layer", type=int, metavar="N", help="layer of --show-experts, from 1 (default: the last)"
    )


def run(args: argparse.Namespace) -> int:
    """Translate line by line. Returns the exit status."""
    text_model.resolve_model(args)
    settings = generation(args.run_dir, args.beam, args.lenpen)
    if args.layer is not None and not args.show_experts:
        raise UserError(f"--layer {args.layer} needs --show-experts.")
    if not 1 <= args.n_best <= settings["beam"]:
        raise UserError(f"--n-best {args.n_best} is not between 1 and --beam {settings['beam']}.")
    model = text_model.load(args, TRANSLATION)
    if args.show_experts and not any(isinstance(part, Attention) for part in model.modules()):
        raise UserError("--show-experts: this model has no router; its attention has no experts.")
    left_out = 0
    with open_output(args) as stream, torch.no_grad():
        for batch in lines_of(args.file):
            for symbols, translations in hypotheses(model, batch, settings):
                left_out += symbols is not None and not translations
                _print_translations(model, symbols, translations, args, stream)
            stream.flush()
    return status_of(left_out)


def _print_translations(
    model: TextModel,
    symbols: Tensor | None,
    translations: list[dict[str, Any]],
    args: argparse.Namespace,
    stream: Any,
) -> None:
    """Print --n-best translations of a sentence, and its experts with --show-experts.

    Without translations, print as many empty lines.
    """
    if not translations:
        print("\n" * args.n_best, end="", file=stream)
        return
    for hypothesis in translations[: args.n_best]:
        score = f"{hypothesis['score'].item():.3f}\t" if args.n_best > 1 else ""
        print(score + shown(model.decode(hypothesis["tokens"]), stream), file=stream)
    if args.show_experts and symbols is not None:
        is_coloured = stream.isatty() and "NO_COLOR" not in os.environ
        best = translations[0]["tokens"]
        for line in _experts(model, symbols, best, args.layer, is_coloured):
            print(line, file=stream)


def generation(
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
    mapping = read_mapping(recipe, "recipe").get("generate") if os.path.lexists(recipe) else None
    if mapping is not None:
        section = build(Generate, mapping, str(recipe), "generate")
        settings.update(beam=section.beam, lenpen=section.lenpen)
        ignored = []
        for flag, value in section.flags.items():
            name = flag.replace("-", "_")
            if name in _SEARCH_FLAGS:
                settings[name] = value
            elif name in _IGNORED_FLAGS:
                ignored.append(name)
        if ignored:
            log.warning(
                "generate.flags of %s: translate ignores %s", recipe, ", ".join(sorted(ignored))
            )
    flags = {"beam": beam, "lenpen": lenpen}
    settings.update({key: value for key, value in flags.items() if value is not None})
    for key, least in (("beam", 1), ("lenpen", -math.inf)):
        origin = f"{recipe}: generate.{key}" if flags[key] is None else f"--{key}"
        if not (least <= settings[key] and math.isfinite(settings[key])):
            hint = ", at least 1" if key == "beam" else ""
            raise UserError(f"{origin} {settings[key]}: give a number{hint}.")
    return settings


def _experts(
    model: TextModel, source: Tensor, target: Tensor, layer: int | None, coloured: bool
) -> Iterator[str]:
    """One line for each router of a layer: tokens with the experts they chose, the heaviest first.

    source, target: symbols [T] with the end of the sentence. Raises UserError for a model without routers,
    and for a layer that has none.
    """
    shifted = torch.cat([target.new_tensor([model.tgt_dict.eos()]), target[:-1]])
    inputs = [tokens.to(model.device)[None] for tokens in (source, shifted)]
    with collect_routings() as routings:
        model.models[0](inputs[0], torch.tensor([len(source)], device=model.device), inputs[1])
    if not routings:
        raise UserError("--show-experts: this model has no router; its attention has no experts.")
    depth: dict[str, int] = {}  # encoder, decoder → its last layer with a router
    for name, _ in routings:
        stack = name.split(".")[0]
        depth[stack] = max(depth.get(stack, 0), _layer(name))
    if layer is not None and not 1 <= layer <= max(depth.values()):
        raise UserError(f"--layer {layer}: the model has layers 1 to {max(depth.values())}.")
    for name, routing in routings:
        if _layer(name) != (layer or depth[name.split(".")[0]]):
            continue
        words = [model.tgt_dict[index] for index in shifted.tolist()]
        if name.startswith("encoder") or (routing.side == "keys" and "encoder_attn" in name):
            words = [model.src_dict[index] for index in source.tolist()]
        yield f"  {name}: {' '.join(_marked(words, routing, coloured))}"


def _layer(name: str) -> int:
    """The number of a module's layer, from 1."""
    return next((1 + int(part) for part in name.split(".") if part.isdigit()), 1)


def _marked(words: Sequence[str], routing: Routing, coloured: bool) -> list[str]:
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
