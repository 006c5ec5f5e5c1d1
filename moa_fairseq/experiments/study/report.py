"""What the records of a study say: tables of systems, contrasts and translations, and pictures."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import textwrap
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.plots import COLOURS, GREY, label_points, style
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING
from moa_fairseq.experiments.json_files import MAPPING, NUMBER, TEXT, check_kinds, read_json
from moa_fairseq.experiments.recipes.loading import check_flags
from moa_fairseq.experiments.scoring.against import against, interval_of
from moa_fairseq.experiments.scoring.chains import RunningText, Texts, running_text
from moa_fairseq.experiments.scoring.complexity import branch_size, complexity
from moa_fairseq.experiments.scoring.generate_log import lines_of, read_lines
from moa_fairseq.experiments.scoring.significance import (
    EQUIVALENT,
    GAIN,
    LOSS,
    UNDECIDED,
    holm,
    paired,
    verdict,
)
from moa_fairseq.experiments.study.design import (
    Run,
    Study,
    common_levels,
    fitting_records,
    losses_of,
    pairs_of,
)
from moa_fairseq.experiments.study.records import DIVERGED, outputs_of
from moa_fairseq.experiments.tables import Column, Table, page
from moa_fairseq.process import flags

log = logging.getLogger(__name__)
# Label, colour, differences of single seeds, and their mean with its interval, of one row of a picture.
Mark = tuple[str, str, list[float], dict[str, Any] | None]


SYSTEM_COLUMNS = (
    Column("system", ""),
    Column("label", "system"),
    Column("n", "n", "d"),
    Column("loss", "bits", ".4f"),
    Column("deviation", "deviation", ".4f"),
    Column("diverged", "diverged", "d"),
    Column("parameters", "parameters", ","),
    Column("cost", "× attention MACs", ".2f"),
    Column("start", "× branch", ".2f"),
    Column("speed", "× tokens/s", ".2f"),
)
CONTRAST_COLUMNS = (
    Column("contrast", "contrast"),
    Column("first", "first"),
    Column("second", "second"),
    Column("n", "n", "d"),
    Column("mean", "first − second", "+.4f"),
    Column("interval", "95 %", ">"),
    Column("p_holm", "p (Holm)", ".3g"),
    Column("visible", "visible", ".4f"),
    Column("verdict", "verdict"),
)
CACHE_COLUMNS = (
    Column("system", ""),
    Column("label", "system"),
    Column("cache_bytes", "cache, bytes", ","),
    Column("loss", "bits", ".4f"),
    Column("mean", "− first", "+.4f"),
    Column("interval", "95 %", ">"),
    Column("cost", "× attention MACs", ".2f"),
    Column("decoding", "× decoding", ">"),
    Column("ahead", "ahead of all as small"),
)
CACHE_HEADING = (
    "Bits beside the bytes that a token leaves in a layer's cache, two for each number. − first: to the "
    "first system, with the interval of a paired t test, not corrected. × decoding: seconds a token ÷ those "
    "of the first system, device and texts at a time, all systems in turn in one process. Ahead: no system "
    "with as many bytes or fewer has fewer bits in the mean. Verdicts are those of the contrasts alone."
)
CONTRAST_TABLES = {
    "contrasts": "Negative: the first is better. p: paired t test, two-sided. Equivalent: within ± {margin} "
    "bits. Visible: what this many seeds find in 80 % of studies.",
    "at_equal_training_loss": "The same at equal training loss: mean over levels of it, from the lowest that "
    "all runs of the two systems reached to one bit above, as far as every run has one so high. Training "
    "losses are those with dropout, so contrasts of unequal dropout are left out.",
}
# What losses are drawn against, and what it is called.
COSTS = {"attention_macs": "attention's multiplications", "speed": "tokens a second"}
START = {"branch": "size of attention's output before training"}
TRANSLATION_COLUMNS = (
    Column("metric", "metric"),
    Column("contrast", "contrast"),
    Column("n", "n", "d"),
    Column("first", "first", ".2f"),
    Column("second", "second", ".2f"),
    Column("difference", "first − second", "+.2f"),
    Column("interval", "95 %", ">"),
    Column("p_seeds_holm", "p, seeds (Holm)", ".3g"),
    Column("p_holm", "p, sentences (Holm)", ".3g"),
)


def report(study: Study, runs: list[Run], references: Path | None = None) -> dict[str, Any]:
    """The tables as data: systems, contrasts, and what made the records, of the seeds that are complete.

    Args:
        study: its systems and contrasts.
        runs: all of its runs.
        references: the test set's target side in words, to score the recorded translations with.

    Raises:
        UserError: where no seed is complete.
    """
    records = fitting_records(study, runs)
    planned = runs
    left = Counter(run.block for run in runs if run.name not in records)
    runs = [run for run in planned if run.block not in left]
    for block, number in left.items():
        if number < sum(run.block == block for run in planned):
            log.warning("seed %d %s does not count: %d of its runs are left", *block, number)
    found = [records[run.name] for run in runs]
    if not found:
        folder = planned[0].records
        raise UserError(f"{folder} has no complete seed of this study: run it without --report.")
    _warn_of_unequal_runs(runs, records)
    losses = losses_of(study, runs, records)
    systems = [
        {
            "system": name,
            "label": study.systems[name].label,
            "family": study.systems[name].family,
            "n": len(rows),
            "loss": float(np.mean(list(losses[name].values()))),
            "deviation": float(np.std(list(losses[name].values()), ddof=1)) if len(rows) > 1 else None,
            "diverged": sum(row["end"] == DIVERGED for row in rows),
            "parameters": rows[0]["parameters"],
            **_attention(one := next(run for run in runs if run.system == name)),
            "speed": _speed(rows, next(iter(study.systems)), found),
            "by_seed": losses[name],
            **({"curve": _mean_curve(rows), "dropout": _dropout(one)} if study.levels else {}),
        }
        for name in study.systems
        if (rows := [row for row in found if row["system"] == name])
    ]
    kinds = ("commit", "hardware", "precision", "versions")
    made_by = {key: sorted({str(row.get(key, "not recorded")) for row in found}) for key in kinds}
    counts = {"runs": len(found), "planned": len(planned)}
    tables = {"systems": systems, "contrasts": _contrasts(study, dict.fromkeys(study.contrasts, losses))}
    if len({row.get("cache_bytes") for row in systems}) > 1:
        tables["cache"] = _cache(study, systems, planned[0].records)
    if study.levels:
        dropout = {row["system"]: row["dropout"] for row in systems}
        at_equal = {}
        for name, contrast in study.contrasts.items():
            both = [run for run in runs if run.system in (contrast.first, contrast.second)]
            if dropout[contrast.first] == dropout[contrast.second]:
                levels = common_levels(study, [records[run.name] for run in both])
                if not len(levels):
                    log.warning("%s has no training loss that all of its runs have: it is left out", name)
                    continue
                at_equal[name] = losses_of(study, both, records, levels)
        tables["at_equal_training_loss"] = _contrasts(study, at_equal)
    if references:
        tables["translations"] = _translations(study, runs, references)
    return {"study": study.study, **counts, **tables, "made_by": made_by}


def _warn_of_unequal_runs(runs: list[Run], records: dict[str, dict[str, Any]]) -> None:
    """Say where runs that are compared differ in more than the system."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        seed, system = run.block
        block = f"seed {seed} {system}".strip()
        parts = {"hardware": block, "precision": block, "commit": "the study", "data": "the study"}
        for key, whole in parts.items():
            if value := records[run.name].get(key):
                found[whole, key].add(value)
    for (whole, key), values in found.items():
        if len(values) > 1:
            what = f"unequal {key} ({'; '.join(sorted(values))})"
            log.warning("%s counts, but its runs have %s: differences may come from that", whole, what)


def _speed(rows: list[dict[str, Any]], first: str, found: list[dict[str, Any]]) -> float | None:
    """Tokens a second ÷ those of the first system with the same seed, and so machine: median of the seeds.

    The median, because some runs go beside other work.
    """
    base = {row["seed"]: row["tokens_per_second"] for row in found if row["system"] == first}
    pairs = [(row["tokens_per_second"], base.get(row["seed"])) for row in rows]
    ratios = [speed / other for speed, other in pairs if speed and other]
    return float(np.median(ratios)) if ratios else None


def _mean_curve(records: list[dict[str, Any]]) -> list[list[float]]:
    """Training and validation loss, means over the runs that did not diverge, at each validation of all."""
    curves = [pairs_of(record) for record in records if record["end"] != DIVERGED]
    if not curves:
        return []
    common = sorted(set(curves[0]).intersection(*curves))
    return [np.mean([curve[updates] for curve in curves], axis=0).tolist() for updates in common]


def _dropout(run: Run) -> dict[str, Any]:
    """Its model's rates of dropout."""
    return {key: value for key, value in run.load().model.as_flags().items() if "dropout" in key}


def _contrasts(study: Study, losses: dict[str, dict[str, dict[int, float]]]) -> list[dict[str, Any]]:
    """Contrasts with tests. losses: contrast → system → seed → bits; of the seeds that both sides have."""
    judged = {}
    for name, of_system in losses.items():
        first = of_system[study.contrasts[name].first]
        second = of_system[study.contrasts[name].second]
        if len(seeds := first.keys() & second.keys()) > 1:
            judged[name] = paired([first[seed] - second[seed] for seed in sorted(seeds)], study.margin)
    p = holm({name: difference.p for name, difference in judged.items()})
    p_equivalent = holm({name: difference.p_equivalent for name, difference in judged.items()})
    return [
        {
            "contrast": name,
            **vars(study.contrasts[name]),
            **difference._asdict(),
            "p_holm": p[name],
            "p_equivalent_holm": p_equivalent[name],
            "verdict": verdict(difference, p[name], p_equivalent[name]),
        }
        for name, difference in judged.items()
    ]


def _to_first(
    row: dict[str, Any], base: dict[str, Any], margin: float
) -> tuple[list[float], dict[str, Any] | None]:
    """A system's differences to the first one, a seed each, and what `paired` says of two or more."""
    seeds = row["by_seed"].keys() & base["by_seed"].keys()
    differences = [row["by_seed"][seed] - base["by_seed"][seed] for seed in seeds]
    if len(differences) > 1:
        return differences, paired(differences, margin)._asdict()
    return differences, None


def _cache(study: Study, systems: list[dict[str, Any]], records: Path) -> list[dict[str, Any]]:
    """Bits beside bytes of cache, the smallest first, with the difference to the first system.

    Decoding is what `benchmarks/decoding.py` measured of the study's systems: device, with the dtype where it
    is not float32 on a CPU, and texts at a time → seconds a token ÷ those of the first system.
    """
    base = systems[0]
    names = [row["system"] for row in systems]
    kinds = {"device": TEXT, "dtype": TEXT, "seconds_per_token": MAPPING}
    remedy = "Run benchmarks/decoding.py again, or remove the file."
    measured = {}
    for path in sorted(records.glob("decoding-*.json")):
        found = read_json(path, remedy)
        check_kinds(found, kinds, str(path), remedy, required=("device", "seconds_per_token"))
        device = f"{found['device']} {found.get('dtype') or 'float32'}"
        if device == "cpu float32":  # the dtype goes without saying
            device = "cpu"
        for texts, seconds in found["seconds_per_token"].items():
            where = f"{path}: seconds_per_token.{texts[:20]}"
            check_kinds(seconds, dict.fromkeys(names, NUMBER), where, remedy, required=names)
            if wrong := next((name for name in names if seconds[name] <= 0), None):
                raise UserError(f"{where}: {wrong} must be above 0, not {seconds[wrong]}. {remedy}")
            measured[f"{device}, {texts}"] = seconds
    rows = []
    least = math.inf
    for row in sorted(systems, key=lambda row: (row["cache_bytes"], row["loss"])):
        line = {key: row[key] for key in ("system", "cache_bytes", "loss")}
        line["ahead"] = row["loss"] < least
        least = min(least, row["loss"])
        if row is not base:
            _, interval = _to_first(row, base, study.margin)
            line.update(interval or {})
        line["decoding"] = {
            where: seconds[row["system"]] / seconds[base["system"]] for where, seconds in measured.items()
        }
        rows.append(line)
    return rows


def _translations(study: Study, runs: list[Run], references: Path) -> list[dict[str, Any]]:
    """BLEU and chrF of each contrast over the seeds that both have translated, tested as `against` does."""
    texts: dict[str, dict[int, RunningText]] = {name: {} for name in study.systems}
    target = read_lines(references)
    outputs = outputs_of(runs[0].records)
    for run in runs:
        recipe = run.load()
        if not recipe.generate:
            raise UserError(f"{run.recipe} translates nothing: leave --references out.")
        name = f"{run.name}.{recipe.subsets[0]}.txt"
        if name not in outputs:  # not run, or diverged
            continue
        if len(lines := lines_of(outputs[name], name)) != len(target):
            problem = f"--references {references} has {len(target)} lines, {name} has {len(lines)}"
            raise UserError(f"{problem}: give the target side of subset {recipe.subsets[0]}.")
        texts[run.system][run.seed] = running_text(Texts(lines, [target], recipe.data.target or "de"))
    rows = []
    for name, contrast in study.contrasts.items():
        first = texts[contrast.first]
        second = texts[contrast.second]
        if seeds := sorted(first.keys() & second.keys()):
            log.info("%s: dealing the outputs of %d seeds anew", name, len(seeds))
            found = against([first[seed] for seed in seeds], [second[seed] for seed in seeds])["metrics"]
            rows += [{"contrast": name, "n": len(seeds), **row} for row in found]
    rows.sort(key=lambda row: row["metric"])  # each metric's contrasts in their order
    for metric, p in itertools.product(("BLEU", "chrF"), ("p", "p_seeds")):
        judged = {row["contrast"]: row for row in rows if row["metric"] == metric and p in row}
        for name, adjusted in holm({name: row[p] for name, row in judged.items()}).items():
            judged[name][f"{p}_holm"] = adjusted
    return rows


def _attention(run: Run) -> dict[str, Any]:
    """Its MACs, for a sample of a language model, or a pair of 20 and 20 tokens; how large it starts.

    Language models have their bytes of cache, too. In a translation most of the cache are the memory's keys.
    """
    recipe = run.load()
    training = check_flags(recipe)  # before its flags build a model
    length = getattr(training, "tokens_per_sample", 20)
    words = flags({**recipe.model.as_flags(), "arch": None})
    found = dict(_attention_of(recipe.model.arch, length, tuple(words)))
    if recipe.kind != LANGUAGE_MODELING:
        del found["cache_bytes"]
    return found


@functools.lru_cache(maxsize=64)
def _attention_of(arch: str, length: int, words: tuple[str, ...]) -> dict[str, Any]:
    """Systems that differ in their training alone have one model, which is built once."""
    cost = complexity(arch, 1000, length, length, "shared", list(words))
    branch = round(branch_size(arch, 1000, "shared", list(words)), 6)  # beyond that processors differ
    return {"attention_macs": cost.attention_macs, "branch": branch, "cache_bytes": cost.cache_bytes}


def as_text(study: Study, content: dict[str, Any], markdown: bool = False) -> str:
    """The report as tables, for a terminal or as Markdown."""
    base = content["systems"][0]
    systems = [
        {
            **row,
            "cost": row["attention_macs"] / base["attention_macs"],
            "start": row["branch"] / base["branch"],
            "diverged": row["diverged"] or None,
        }
        for row in content["systems"]
    ]
    blocks: list[str | Table] = [
        f"{study.question} {content['runs']} of {content['planned']} runs. Validation loss in bits, "
        f"{f'mean of the last {study.last} validations' if study.last > 1 else 'of the last validation'}. "
        "× branch: size of attention's output before training, ÷ the first system's. "
        "× tokens/s: ÷ those of the first system with the same seed, median of the seeds.",
        Table(SYSTEM_COLUMNS, systems),
    ]
    for key, heading in CONTRAST_TABLES.items():
        if rows := content.get(key):
            lines = [
                {
                    **row,
                    **{side: study.systems[row[side]].label for side in ("first", "second")},
                    "interval": interval_of(row, 4),
                }
                for row in rows
            ]
            blocks += [heading.format(margin=study.margin), Table(CONTRAST_COLUMNS, lines)]
    if rows := content.get("cache"):
        cost = {row["system"]: row["cost"] for row in systems}
        lines = [
            {
                **row,
                "label": study.systems[row["system"]].label,
                "interval": interval_of(row, 4),
                "cost": cost[row["system"]],
                "decoding": "; ".join(f"{ratio:.2f} ({where})" for where, ratio in row["decoding"].items()),
                "ahead": "yes" if row["ahead"] else "",
            }
            for row in rows
        ]
        blocks += [CACHE_HEADING, Table(CACHE_COLUMNS, lines)]
    if rows := content.get("translations"):
        blocks += [
            "Translations, positive: the first is better. p, seeds, and the interval: paired t test. p, "
            "sentences: approximate randomisation, which covers the choice of sentences, not the luck of a "
            f"training. {rows[0]['signature']}, {rows[-1]['signature']}",
            Table(TRANSLATION_COLUMNS, [{**row, "interval": interval_of(row)} for row in rows]),
        ]
    return page(blocks, markdown)


def draw(study: Study, content: dict[str, Any]) -> dict[str, Figure]:
    """The pictures by their names."""
    families = list(dict.fromkeys(row["family"] for row in content["systems"]))
    colours = {family: (GREY, *COLOURS)[number % 8] for number, family in enumerate(families)}
    figures = {
        "cost": _against(study, content, colours, COSTS),
        "branch": _against(study, content, colours, START),
    }
    if len(content["systems"]) > 1:
        figures["differences"] = _differences(study, content, colours)
    if content.get("cache"):
        figures["cache"] = _beside_cache(content, study, colours)
    if study.levels:
        figures["generalisation"] = _generalisation(study, content)
    if rows := content["contrasts"]:
        of_verdict = {GAIN: COLOURS[2], LOSS: COLOURS[1], EQUIVALENT: COLOURS[0], UNDECIDED: GREY}
        marks: list[Mark] = [
            (f"{row['contrast']}: {row['verdict']}", of_verdict[row["verdict"]], [], row) for row in rows
        ]
        axis = "difference of validation losses (bits; left is better)"
        axis += "\nintervals of one test, corrected verdicts"
        figures["contrasts"] = _intervals(study, marks, study.margin, axis)
    return figures


def _differences(study: Study, content: dict[str, Any], colours: dict[str, str]) -> Figure:
    """To the first system: a dot for each seed, means with intervals, a band of the first one's own seeds."""
    base, *others = content["systems"]
    marks: list[Mark] = []
    for row in others:
        dots, interval = _to_first(row, base, study.margin)
        marks.append((row["label"], colours[row["family"]], dots, interval))
    axis = f"validation loss − that of “{base['label']}” (bits; left is better)"
    axis += "\ngrey: ± 2 deviations of its seeds"
    return _intervals(study, marks, 2 * (base["deviation"] or 0), axis)


def _intervals(study: Study, marks: list[Mark], band: float, axis: str) -> Figure:
    """A row for each mark, from the top: its dots, and its mean with the interval. band: ± around 0, grey."""
    figure = Figure(figsize=(7.5, 1.2 + 0.3 * len(marks)), layout="constrained")
    panel = figure.subplots()
    style(panel)
    panel.axvline(0, color=GREY, linewidth=0.8)
    figure.suptitle(textwrap.fill(study.question, 90), x=0.01, ha="left", fontsize=10)
    panel.axvspan(-band, band, color="#eeeeee", zorder=0)
    for place, (_, colour, dots, interval) in enumerate(marks):
        panel.plot(dots, [place] * len(dots), "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
        if interval:
            panel.plot([interval["low"], interval["high"]], [place, place], color=colour, linewidth=2)
            panel.plot([interval["mean"]], [place], "o", color=colour, markersize=6)
    panel.set_yticks(range(len(marks)), [label for label, *_ in marks])
    panel.set_ylim(len(marks) - 0.5, -0.5)  # the first on top
    panel.set_xlabel(axis)
    return figure


def _against(study: Study, content: dict[str, Any], colours: dict[str, str], names: dict[str, str]) -> Figure:
    """Loss against each of names, ÷ that of the first system."""
    base = content["systems"][0]
    figure = Figure(figsize=(9.5, 5.5 if len(names) == 1 else 4.2), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    # there is space for labels beside one panel alone
    if len(names) == 1:
        key_of_name = "label"
    else:
        key_of_name = "system"
    labels: dict[str, list[tuple[float, float, str]]] = {key: [] for key in names}
    for panel, (key, name) in zip(panels, names.items()):
        style(panel)
        for family, colour in colours.items():
            points = [row for row in content["systems"] if row["family"] == family]
            ratios = [(row[key] or math.nan) / base[key] if base[key] else math.nan for row in points]
            panel.plot(ratios, [row["loss"] for row in points], "o", color=colour, label=family)
            labels[key] += [(x, row["loss"], row[key_of_name]) for x, row in zip(ratios, points)]
        panel.set_xlabel(f"{name} ÷ that of “{base['label']}”")
        if names is START:  # factors from 1/10 to 1: most are small
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
        panel.margins(0.18 if len(names) == 1 else 0.05, 0.1)
        low, high = panel.get_xlim()
        panel.set_xlim(min(low, 0.9), max(high, 1.1))  # no axis of a few per cent
    panels[0].set_ylabel("validation loss (bits)")
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(textwrap.fill(study.question, 90), fontsize=10)
    for panel, points in zip(panels, labels.values()):
        label_points(panel, points)
    return figure


def _beside_cache(content: dict[str, Any], study: Study, colours: dict[str, str]) -> Figure:
    """Bits to the first system, with intervals, against bytes of cache; a line along those that are ahead."""
    base = content["systems"][0]
    family = {row["system"]: row["family"] for row in content["systems"]}
    figure = Figure(figsize=(9.5, 3.5 + 0.2 * len(content["cache"])), layout="constrained")
    panel = figure.subplots()
    style(panel)
    points = []
    bars = []
    for row in content["cache"]:
        colour = colours[family[row["system"]]]
        bits = row["loss"] - base["loss"]
        points.append((row["cache_bytes"], bits, study.systems[row["system"]].label))
        panel.plot([row["cache_bytes"]], [bits], "o", color=colour)
        if "low" in row:
            bars.append((row["cache_bytes"], row["low"], row["high"]))
            panel.vlines(*bars[-1], color=colour, linewidth=1.5)
    ahead = [(row["cache_bytes"], row["loss"] - base["loss"]) for row in content["cache"] if row["ahead"]]
    panel.step(*zip(*ahead), where="post", color=GREY, linewidth=0.8, zorder=0)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.margins(0.4, 0.05)  # names stand beside the outermost points
    axis = "bytes of cache a token and layer, two a number"
    panel.set_xlabel(f"{axis}\ngrey line: the fewest bits of all with as many bytes or fewer")
    panel.set_ylabel(f"validation loss − that of “{base['label']}” (bits)")
    figure.suptitle(textwrap.fill(study.question, 90), fontsize=10)
    label_points(panel, points, bars)
    return figure


def _generalisation(study: Study, content: dict[str, Any]) -> Figure:
    """Validation loss against training loss, a line for each system: the mean of its seeds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    style(panel)
    base = content["systems"][0]
    for number, row in enumerate(content["systems"]):
        curve = np.reshape(row["curve"][len(row["curve"]) // 4 :], (-1, 2))  # without the steep beginning
        look = {"color": (GREY, *COLOURS)[number % 8], "markersize": 3, "label": row["label"]}
        panel.plot(*curve.T, "o-" if row["dropout"] == base["dropout"] else "o:", **look)
    panel.set_xlabel("training loss, with dropout (bits)\ndotted: other dropout; compare dotted with dotted")
    panel.set_ylabel("validation loss (bits)")
    panel.set_title(textwrap.fill(study.question, 66), fontsize=10, loc="left")
    panel.legend(fontsize=8, frameon=False)
    return figure
