"""The report of a study's records as data: systems, contrasts, caches and translations."""

import functools
import itertools
import logging
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.records.json_files import (
    MAPPING,
    NUMBER,
    TEXT,
    check_kinds,
    read_json,
    selected,
)
from moa_fairseq.experiments.scoring.against import compare_systems
from moa_fairseq.experiments.scoring.branch import branch_size
from moa_fairseq.experiments.scoring.chains import RunningText, Texts, running_text
from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.experiments.scoring.generate_log import lines_of, read_lines
from moa_fairseq.experiments.scoring.significance import holm, paired, verdict
from moa_fairseq.experiments.study.design import Records, Run, Study, fitting_records
from moa_fairseq.experiments.study.losses import Losses, common_levels, losses_of, pairs_of
from moa_fairseq.experiments.study.records import DIVERGED, Content, outputs_of
from moa_fairseq.experiments.tables import values_of
from moa_fairseq.process import flags

log = logging.getLogger(__name__)
VOCABULARY = 1000  # of the models that are built to find the cost of their attention
Row = dict[str, Any]  # a row of a table
Report = dict[str, Any]  # what `report` returns


def report(study: Study, runs: list[Run], references: Path | None = None) -> Report:
    """The tables as data, and the provenance of the records; only complete seeds count.

    Args:
        study: the study.
        runs: all runs of the study.
        references: the target side of the test set in words, with which the recorded translations are scored;
            None: they are not scored.

    Returns:
        "systems" and "contrasts", and "cache", "at_equal_training_loss" and "translations" where they apply,
        each a list of rows; "study", the name; "runs" and "planned", numbers of runs; "unknown", the largest
        share of <unk>, if it was recorded; and "made_by".

    Raises:
        UserError: if no seed is complete.
    """
    records = fitting_records(study, runs)
    complete = _complete_runs(runs, records)
    complete_records = [records[run.name] for run in complete]
    if not complete_records:
        raise UserError(
            f"{runs[0].records} has no complete seed of this study. Run it without --report."
        )
    _warn_of_unequal_runs(complete, records)
    losses = losses_of(study, complete, records)
    systems = _systems(study, complete, records, losses)
    tables = {
        "systems": systems,
        "contrasts": _contrasts(study, dict.fromkeys(study.contrasts, losses)),
    }
    if len({row.get("cache_bytes") for row in systems}) > 1:
        tables["cache"] = _cache(study, systems, runs[0].records)
    if study.levels:
        tables["at_equal_training_loss"] = _at_equal_training_loss(
            study, complete, records, systems
        )
    if references:
        tables["translations"] = _translations(study, complete, references)
    content: Report = {"study": study.study, "runs": len(complete), "planned": len(runs)}
    shares = [record.get("unknown") for record in complete_records]
    unknown = [share for share in shares if share is not None]
    if unknown:
        content["unknown"] = max(unknown)
    return content | tables | {"made_by": _provenance_of(complete_records)}


def _complete_runs(runs: list[Run], records: Records) -> list[Run]:
    """The runs of the seeds that are complete; a warning names each seed of which runs are missing."""
    missing = Counter(run.block for run in runs if run.name not in records)
    for block, number in missing.items():
        if number < sum(run.block == block for run in runs):
            log.warning("seed %d %s is ignored: %d of its runs are missing", *block, number)
    return [run for run in runs if run.block not in missing]


def _systems(study: Study, runs: list[Run], records: Records, losses: Losses) -> list[Row]:
    """A row for each system that has runs. The first system is the baseline of the speeds."""
    all_records = [records[run.name] for run in runs]
    systems = []
    for name, system in study.systems.items():
        runs_of_system = [run for run in runs if run.system == name]
        if not runs_of_system:
            continue
        own_records = [records[run.name] for run in runs_of_system]
        bits = list(losses[name].values())
        row = {
            "system": name,
            "label": system.label,
            "family": system.family,
            "n": len(own_records),
            "loss": float(np.mean(bits)),
            "deviation": float(np.std(bits, ddof=1)) if len(own_records) > 1 else None,
            "diverged": values_of(own_records, "end").count(DIVERGED),
            "parameters": own_records[0]["parameters"],
        }
        row.update(_attention(runs_of_system[0]))
        row["speed"] = _speed(own_records, next(iter(study.systems)), all_records)
        row["by_seed"] = losses[name]
        if study.levels:
            model_flags = runs_of_system[0].load().model.as_flags()
            row["curve"] = _mean_curve(own_records)
            row["dropout"] = {key: rate for key, rate in model_flags.items() if "dropout" in key}
        systems.append(row)
    return systems


def _provenance_of(records: list[Content]) -> dict[str, dict[str, list[int]]]:
    """The provenance in the records: commit, hardware, precision or versions → a value → its seeds."""
    made_by = {}
    for key in ("commit", "hardware", "precision", "versions"):
        seeds = defaultdict(set)
        for record in records:
            seeds[str(record.get(key, "not recorded"))].add(record["seed"])
        made_by[key] = {value: sorted(seeds[value]) for value in sorted(seeds)}
    return made_by


def _at_equal_training_loss(
    study: Study, runs: list[Run], records: Records, systems: list[Row]
) -> list[Row]:
    """The contrasts of systems with equal dropout, at training losses that all runs of both systems have."""
    dropout = dict(zip(values_of(systems, "system"), values_of(systems, "dropout")))
    losses = {}
    for name, contrast in study.contrasts.items():
        if dropout[contrast.first] != dropout[contrast.second]:
            continue
        both = [run for run in runs if run.system in (contrast.first, contrast.second)]
        levels = common_levels(study, [records[run.name] for run in both])
        if len(levels):
            losses[name] = losses_of(study, both, records, levels)
        else:
            log.warning("%s has no training loss that all of its runs have: it is left out", name)
    return _contrasts(study, losses)


def _warn_of_unequal_runs(runs: list[Run], records: Records) -> None:
    """Warn if compared runs differ in more than the system."""
    conditions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        seed, system = run.block
        block = f"seed {seed} {system}".strip()
        scopes = {"hardware": block, "precision": block, "commit": "the study", "data": "the study"}
        for key, scope in scopes.items():
            value = records[run.name].get(key)
            if value:
                conditions[scope, key].add(value)
    for (scope, key), values in conditions.items():
        if len(values) > 1:
            difference = f"unequal {key} ({'; '.join(sorted(values))})"
            log.warning("the runs of %s have %s: differences may come from that", scope, difference)


def _speed(records: list[Content], first: str, all_records: list[Content]) -> float | None:
    """Tokens per second ÷ those of the first system with the same seed, which had the same kind of machine.

    The result is the median over the seeds, because some runs share the machine with other work.
    """
    baseline = {}
    for record in all_records:
        if record["system"] == first:
            baseline[record["seed"]] = record["tokens_per_second"]
    ratios = []
    for record in records:
        base_speed = baseline.get(record["seed"])
        if record["tokens_per_second"] and base_speed:
            ratios.append(record["tokens_per_second"] / base_speed)
    return float(np.median(ratios)) if ratios else None


def _mean_curve(records: list[Content]) -> list[list[float]]:
    """The training and the validation loss at each validation, means over the runs that did not diverge."""
    curves = [pairs_of(record) for record in records if record["end"] != DIVERGED]
    if not curves:
        return []
    common = sorted(set(curves[0]).intersection(*curves))
    return [np.mean([curve[updates] for curve in curves], axis=0).tolist() for updates in common]


def _contrasts(study: Study, losses: dict[str, Losses]) -> list[Row]:
    """The contrasts with their tests, over the seeds that both systems have.

    Args:
        study: the study.
        losses: contrast → system → seed → loss in bits.
    """
    tested = {}
    for name, by_system in losses.items():
        contrast = study.contrasts[name]
        differences = _by_seed(by_system[contrast.first], by_system[contrast.second])
        if len(differences) > 1:
            tested[name] = paired(differences, study.margin)
    p = holm({name: difference.p for name, difference in tested.items()})
    p_equivalent = holm({name: difference.p_equivalent for name, difference in tested.items()})
    rows = []
    for name, difference in tested.items():
        row = {"contrast": name} | vars(study.contrasts[name]) | difference._asdict()
        row.update(p_holm=p[name], p_equivalent_holm=p_equivalent[name])
        row["verdict"] = verdict(difference, p[name], p_equivalent[name])
        rows.append(row)
    return rows


def _by_seed(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """First minus second, for each seed that both have."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def difference_to_baseline(row: Row, base: Row, margin: float) -> tuple[list[float], Row | None]:
    """A system's differences to the first system.

    Args:
        row: the row of the system.
        base: the row of the first system.
        margin: differences within ± margin count as equivalent, in bits.

    Returns:
        The difference for each seed, and the result of `paired` as a dictionary; None for fewer than two.
    """
    differences = _by_seed(row["by_seed"], base["by_seed"])
    if len(differences) > 1:
        return differences, paired(differences, margin)._asdict()
    return differences, None


def _cache(study: Study, systems: list[Row], records: Path) -> list[Row]:
    """A row for each system with its cache and its loss; the smallest cache comes first.

    In "decoding", a condition of `_decoding_times` → the system's seconds per token ÷ those of the first one.
    """
    base = systems[0]
    measured = _decoding_times(records, values_of(systems, "system"))
    rows = []
    least = math.inf
    for row in sorted(systems, key=lambda row: (row["cache_bytes"], row["loss"])):
        line = selected(row, ("system", "cache_bytes", "loss"))
        line["is_pareto_optimal"] = row["loss"] < least
        least = min(least, row["loss"])
        if row is not base:
            _, interval = difference_to_baseline(row, base, study.margin)
            line.update(interval or {})
        line["decoding"] = {}
        for condition, seconds in measured.items():
            line["decoding"][condition] = seconds[row["system"]] / seconds[base["system"]]
        rows.append(line)
    return rows


def _decoding_times(records: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """What `benchmarks/decoding.py` measured: a condition → system → seconds per token.

    A condition names the device, the dtype (unless it is float32 on a CPU) and the number of texts at once.
    """
    kinds = {"device": TEXT, "dtype": TEXT, "seconds_per_token": MAPPING}
    remedy = "Run benchmarks/decoding.py again, or remove the file."
    measured = {}
    for path in sorted(records.glob("decoding-*.json")):
        content = read_json(path, remedy)
        check_kinds(content, kinds, str(path), remedy, required=("device", "seconds_per_token"))
        device = f"{content['device']} {content.get('dtype') or 'float32'}"
        if device == "cpu float32":  # the default dtype is not shown
            device = "cpu"
        for texts, seconds in content["seconds_per_token"].items():
            location = f"{path}: seconds_per_token.{texts[:20]}"
            check_kinds(seconds, dict.fromkeys(names, NUMBER), location, remedy, required=names)
            for name in names:
                if seconds[name] <= 0:
                    problem = f"{name} must be above 0, not {seconds[name]}"
                    raise UserError(f"{location}: {problem}. {remedy}")
            measured[f"{device}, {texts}"] = seconds
    return measured


def _translations(study: Study, runs: list[Run], references: Path) -> list[Row]:
    """BLEU and chrF of each contrast, over the seeds that both systems have translated."""
    texts = _recorded_texts(study, runs, references)
    rows = []
    for name, contrast in study.contrasts.items():
        first = texts[contrast.first]
        second = texts[contrast.second]
        seeds = sorted(first.keys() & second.keys())
        if not seeds:
            continue
        log.info("%s: exchanging the outputs of %d seeds at random", name, len(seeds))
        ours = [first[seed] for seed in seeds]
        theirs = [second[seed] for seed in seeds]
        for row in compare_systems(ours, theirs)["metrics"]:
            rows.append({"contrast": name, "n": len(seeds)} | row)
    rows.sort(key=lambda row: row["metric"])  # the contrasts of a metric keep their order
    for metric, p in itertools.product(("BLEU", "chrF"), ("p", "p_seeds")):
        _add_holm([row for row in rows if row["metric"] == metric and p in row], p)
    return rows


def _add_holm(rows: list[Row], p: str) -> None:
    """Add to the rows of all contrasts their p-values with Holm's correction."""
    adjusted = holm({row["contrast"]: row[p] for row in rows})
    for row in rows:
        row[f"{p}_holm"] = adjusted[row["contrast"]]


def _recorded_texts(
    study: Study, runs: list[Run], references: Path
) -> dict[str, dict[int, RunningText]]:
    """System → seed → its translation of the test set, with the references."""
    texts: dict[str, dict[int, RunningText]] = {name: {} for name in study.systems}
    target = read_lines(references)
    outputs = outputs_of(runs[0].records)
    for run in runs:
        recipe = run.load()
        if not recipe.generate:
            raise UserError(f"{run.recipe} translates nothing. Leave --references out.")
        name = f"{run.name}.{recipe.subsets[0]}.txt"
        if name not in outputs:  # not run, or diverged
            continue
        lines = lines_of(outputs[name], name)
        if len(lines) != len(target):
            problem = (
                f"--references {references} has {len(target)} lines, but {name} has {len(lines)}"
            )
            raise UserError(f"{problem}. Give the target side of subset {recipe.subsets[0]}.")
        texts[run.system][run.seed] = running_text(
            Texts(lines, [target], recipe.data.target or "de")
        )
    return texts


def _attention(run: Run) -> dict[str, Any]:
    """The cost of the attention of a run's model: MACs, size of its output before training, bytes of cache.

    MACs are those of a sample of a language model, or of a sentence pair with 20 + 20 tokens. Translation
    models have no "cache_bytes", because most of their cache are the keys of cross-attention.
    """
    recipe = run.load()
    task_flags = check_flags(recipe)  # before a model is built with the flags
    length = getattr(task_flags, "tokens_per_sample", 20)
    words = flags(recipe.model.as_flags() | {"arch": None})
    sizes = dict(_attention_of(recipe.model.arch, length, tuple(words)))
    if recipe.kind != LANGUAGE_MODELING:
        del sizes["cache_bytes"]
    return sizes


@functools.lru_cache(maxsize=64)
def _attention_of(arch: str, length: int, words: tuple[str, ...]) -> dict[str, Any]:
    """The cost of an architecture's attention; systems that differ only in training share it."""
    cost = complexity(arch, VOCABULARY, length, length, "shared", list(words))
    # Further digits differ between processors
    branch = round(branch_size(arch, VOCABULARY, "shared", list(words)), 6)
    return {
        "attention_macs": cost.attention_macs,
        "branch": branch,
        "cache_bytes": cost.cache_bytes,
    }
