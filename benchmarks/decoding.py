"""Seconds per token of decoding, for every system of a study of language models, in turn in one process.

    python benchmarks/decoding.py configs/studies/frontier.yaml

Each model, with random weights, reads texts of the first one's --tokens-per-sample tokens one by one, with a
cache, as fairseq-generate does: 1, 16 or 128 texts at a time. The study's --report takes what this writes
into its table of caches.
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _bench import RESULTS, arguments, report, take_turns
from matplotlib.figure import Figure

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.experiments.study.design import runs_of
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.process import flags

TEXTS = {"cpu": (1, 16), "cuda": (1, 16, 128)}
SYMBOLS = 512


def decode(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Every token of the texts, one after the other."""

    @torch.inference_mode()
    def call() -> None:
        state: dict[str, Any] = {}
        for length in range(1, tokens.size(1) + 1):
            model.decoder(tokens[:, :length], incremental_state=state)[0][:, -1].argmax(-1)

    return call


def draw(study: Any, seconds: dict[int, dict[str, float]], args: Any) -> Figure:
    figure = Figure(figsize=(5.6, 1.6 + 0.27 * len(study.systems)), layout="constrained")
    panels = figure.subplots(1, len(seconds), sharey=True, squeeze=False)[0]
    first = next(iter(study.systems))
    labels = [textwrap.fill(system.label, 24) for system in study.systems.values()]
    for panel, (texts, of_system) in zip(panels, seconds.items()):
        ratios = [of_system[name] / of_system[first] for name in study.systems]
        panel.barh(labels, ratios, color="#0072B2")
        panel.axvline(1, color="#666666", linewidth=0.8)
        panel.set_title(f"{texts} text{'s' * (texts > 1)} at a time", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)
    panels[0].invert_yaxis()
    figure.suptitle("How long does decoding take?", x=0.01, ha="left", fontsize=11)
    figure.supxlabel(
        f"seconds per token, relative to {first} ({args.device}, {args.dtype})", fontsize=10
    )
    return figure


def main() -> None:
    args = arguments(__doc__, more={"study": {"type": Path, "metavar": "STUDY.yaml"}})
    records = RESULTS.parent / "studies"
    study = load_study(args.study, records)
    runs = {run.system: run for run in runs_of(study, args.study.parent, records)}
    if args.output == RESULTS:
        args.output = records / study.study
    models = {}
    length = 8
    for name, run in runs.items():
        recipe = run.load()
        if recipe.kind != LANGUAGE_MODELING:
            raise UserError(
                f"{args.study}: system {name} is no language model, so this cannot time it."
            )
        if not models and not args.miniature:
            length = check_flags(recipe).tokens_per_sample
        # every model has positions for the first one's texts
        words = flags({**recipe.model.as_flags(), "arch": None, "tokens-per-sample": length})
        model = build_meta_model(recipe.model.arch, SYMBOLS, "shared", words, weights=True)
        model = model.to(args.device, args.torch_dtype).eval()
        model.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace()))
        models[name] = model
    seconds = {}
    for texts in TEXTS[args.device]:
        tokens = torch.randint(4, SYMBOLS, (texts, length), device=args.device)
        times = take_turns(
            {name: decode(model, tokens) for name, model in models.items()},
            args.rounds,
            args.device,
        )
        seconds[texts] = {name: found / (texts * length) for name, found in times.items()}
        for name, found in seconds[texts].items():
            ratio = found / seconds[texts][next(iter(models))]
            print(
                f"{texts:3d} {study.systems[name].label:40s} {1000 * found:8.2f} ms per token  {ratio:5.2f}"
            )
    measured = {"study": study.study, "tokens": length, "seconds_per_token": seconds}
    report("decoding", args, measured, draw(study, seconds, args))


if __name__ == "__main__":
    main()
