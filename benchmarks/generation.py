"""Beam search: sentences and tokens per second, beam 5, of MoA beside fairseq's dense Transformers.

    python benchmarks/generation.py                base and big
    python benchmarks/generation.py --size tiny    the quickstart's models

fairseq's own SequenceGenerator with models prepared as fairseq-generate prepares them. Weights are random,
so every hypothesis is made to run for the same number of steps, as long as its source.

A step of one sentence on a CPU takes about as long as reading the decoder's weights once: its speed beside
dense can hardly exceed `weights_over_own`, the dense model's weights divided by its own.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from _bench import arguments, report, take_turns
from _models import BASE, SIZE, build, pairs, sentences, vocabulary
from fairseq.sequence_generator import SequenceGenerator
from matplotlib.figure import Figure

BEAM = 5
BATCHES = {"cpu": (1, 16), "cuda": (1, 16, 128)}
LENGTH = 25


def searched(args: Any) -> dict[str, str]:
    """MoA's architectures and MAE's, each with the dense one beside it."""
    if args.size == "tiny":
        return pairs(args)
    mae = (
        ("mae_transformer_tiny", "transformer_tiny")
        if args.miniature
        else ("mae_transformer_base", BASE)
    )
    return {**pairs(args), mae[0]: mae[1]}


def step_weights(model: Any) -> int:
    """Parameters that a step of the decoder reads at most: all but the projections of the memory's keys."""
    names = (".encoder_attn.k_proj.", ".encoder_attn.v_proj.")
    parameters = model.decoder.named_parameters()
    return sum(p.numel() for name, p in parameters if not any(kept in name for kept in names))


def translate(model: Any, words: Any, batch: int, args: Any) -> Callable[[], Any]:
    """Translate one batch."""
    model.prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(beam=BEAM)))
    search = SequenceGenerator(
        [model], words, beam_size=BEAM, max_len_a=0, max_len_b=LENGTH, min_len=LENGTH - 1
    )
    sample = {"net_input": sentences(batch, LENGTH, words, args.device)["net_input"]}
    return lambda: search.generate([model], sample)


def measure(batch: int, words: Any, args: Any) -> dict[str, Any]:
    archs = [name for pair in searched(args).items() for name in pair]
    archs = list(dict.fromkeys(archs))
    models = {arch: build(arch, words, args.device, args.torch_dtype).eval() for arch in archs}
    weights = {arch: step_weights(model) for arch, model in models.items()}
    calls = {arch: translate(model, words, batch, args) for arch, model in models.items()}
    times = take_turns(calls, args.rounds, args.device)
    rows = {
        arch: {
            "seconds": seconds,
            "sentences_per_second": batch / seconds,
            "tokens_per_second": batch * LENGTH / seconds,
            "step_weights": weights[arch],
        }
        for arch, seconds in times.items()
    }
    return {
        "sentences": batch,
        "rows": rows,
        "speed_over_dense": {
            arch: times[dense] / times[arch] for arch, dense in searched(args).items()
        },
        "weights_over_own": {
            arch: weights[dense] / weights[arch] for arch, dense in searched(args).items()
        },
    }


def draw(results: "list[dict[str, Any]]", args: Any) -> Figure:
    figure = Figure(figsize=(4.5 * len(results), 3.2), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, found in zip(panels, results):
        names = list(found["rows"])
        speeds = [found["rows"][name]["tokens_per_second"] for name in names]
        panel.barh(
            names,
            speeds,
            color=["#0072B2" if n in found["speed_over_dense"] else "#999999" for n in names],
        )
        for place, name in enumerate(names):
            if name in found["speed_over_dense"]:
                text = f" {found['speed_over_dense'][name]:.2f} × dense"
                panel.text(speeds[place], place, text, va="center", fontsize=8)
        panel.set_xlim(right=1.4 * max(speeds))
        panel.invert_yaxis()
        panel.set(xlabel="tokens per second", title=f"sentences a batch: {found['sentences']}")
        panel.spines[["top", "right"]].set_visible(False)
        if panel is not panels[0]:
            panel.set_yticklabels([])
    figure.suptitle(f"Beam {BEAM}, {LENGTH} steps, {args.device}, {args.dtype}")
    return figure


def main() -> None:
    args = arguments(__doc__, more={"--size": SIZE})
    words = vocabulary(args)
    results = []
    for batch in (3,) if args.miniature else BATCHES[args.device]:
        results.append(measure(batch, words, args))
        for arch, row in results[-1]["rows"].items():
            ratio = results[-1]["speed_over_dense"].get(arch)
            beside = f"  {ratio:.2f} × {searched(args)[arch]}" if ratio else ""
            rate = f"{row['sentences_per_second']:8.2f} sentences/s {row['tokens_per_second']:8.0f} tokens/s"
            print(f"{batch:4d} sentences  {arch:36s} {rate}{beside}")
    report(
        "generation", args, {"beam": BEAM, "steps": LENGTH, "batches": results}, draw(results, args)
    )


if __name__ == "__main__":
    main()
