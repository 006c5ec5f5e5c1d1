"""One run of a page: its sentences, its routers' loads, its training and its result."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.expert_load import summary
from moa_fairseq.experiments.analysis.expert_tokens import (
    TokenCounter,
    count_pass,
    is_uniform,
    segmenter,
)
from moa_fairseq.experiments.analysis.learning_curve import Point, read_learning_curve
from moa_fairseq.experiments.analysis.routed_model import forward_passes, router_uses
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING, TRANSLATION
from moa_fairseq.experiments.data.text_files import kept_text
from moa_fairseq.experiments.inference import text_model
from moa_fairseq.experiments.inference.text_codec import codec_of
from moa_fairseq.experiments.inference.text_model import TextModel
from moa_fairseq.experiments.inference.translate import generation
from moa_fairseq.experiments.look.routes import Budget, Routers
from moa_fairseq.experiments.look.sentences import (
    Sources,
    kind_of_model,
    sentences,
    settings_of,
)
from moa_fairseq.experiments.make import made_by_of, read_step_records
from moa_fairseq.experiments.recipes.checkpoints import (
    LAST,
    checkpoint_and_data,
    prepared_data,
)
from moa_fairseq.experiments.recipes.loading import read_mapping
from moa_fairseq.experiments.recipes.train_log import read_records
from moa_fairseq.experiments.records.json_files import selected
from moa_fairseq.experiments.records.provenance import combined
from moa_fairseq.experiments.scoring.compare import (
    SCORES,
    default_results,
    lines_of,
    load_comparison,
)
from moa_fairseq.experiments.scoring.complexity import as_json, count
from moa_fairseq.experiments.tables import values_of
from moa_fairseq.plugin.forward_context import NamedRoutings

log = logging.getLogger(__name__)
# Bytes of a page's sentences: with strongest keys, with experts, with text alone. With both runs' loads and
# curves the page stays below 20 MB.
SIZES = (9_000_000, 15_000_000, 18_000_000)
_ORIGIN = ("hardware", "commit", "date", "command")
CURVES = ("loss", "nll_loss", "ppl", "lr", "load_entropy", "dead_experts")
POINTS = 300  # of a curve
TYPICAL = 10  # tokens of an expert
MIN_COUNT = 5  # of a typical token, as in `moa-fairseq analyze expert-tokens`
HASH = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")  # a commit; ten digits name it on the page
LENGTH = 10  # tokens of a sentence whose MACs are counted, as in `moa-fairseq complexity`


@dataclasses.dataclass
class Examination:
    """What a page shows of one run.

    Args:
        name: of the run.
        facts: all but the sentences, as JSON.
        sentences: as JSON.
        recipe: of the run, or empty.
    """

    name: str
    facts: dict[str, Any]
    sentences: list[dict[str, Any]]
    recipe: dict[str, Any]


def examine(folder: Path, args: argparse.Namespace, runs: int) -> Examination:
    """Read a run.

    Args:
        folder: of the run, or a checkpoint.
        args: the flags: input, sentences, data and cpu.
        runs: how many share the page.

    Raises:
        UserError: for a run without a checkpoint and without a log, and as the parts of the page.
    """
    name = folder.resolve().name
    notes: list[str] = []
    recipe: dict[str, Any] = {}
    if (folder / "recipe.yaml").is_file():
        recipe = read_mapping(folder / "recipe.yaml", "recipe")
    facts: dict[str, Any] = {"name": name, "summary": recipe.get("summary"), "notes": notes}
    examination = Examination(name, facts, [], recipe)
    facts["curves"] = curves(folder)
    checkpoint = _checkpoint(folder)
    model = None
    if checkpoint is None:
        if not facts["curves"]:
            raise UserError(
                f"{folder} has neither a checkpoint nor a train.jsonl. Train first, or name a run."
            )
        notes.append("This run has no checkpoint yet, so there are no sentences and no loads.")
    else:
        model = _load(folder, checkpoint, args)
        if checkpoint.name == LAST:
            notes.append(
                f"The training is not finished: this is {LAST}, the state at its last save."
            )
        _examine_model(folder, model, args, runs, examination)
    facts["result"] = result(folder, model, recipe, notes)
    return examination


def _checkpoint(folder: Path) -> Path | None:
    """The run's result, else the last state of its training; a file is itself."""
    if not folder.is_dir():
        return folder
    try:
        return checkpoint_and_data(folder)[0]
    except UserError:  # neither average nor best
        last = (folder / "checkpoints" / LAST, folder / LAST)
        return next(filter(Path.is_file, last), None)


def _load(folder: Path, checkpoint: Path, args: argparse.Namespace) -> TextModel:
    """The model with its codec; symbols stand for themselves where nothing says how text was prepared."""
    data = args.data or (prepared_data(folder) if folder.is_dir() else None)
    text = kept_text(checkpoint) or data
    flags = {"run_dir": checkpoint, "data": data, "segmented": True, "cpu": args.cpu}
    model = text_model.load(argparse.Namespace(**flags, file=None, output=None), TRANSLATION)
    kind = kind_of_model(model)
    if kind != "masked" and text is not None:
        try:
            job = TRANSLATION if kind == "translation" else LANGUAGE_MODELING
            model.codec = codec_of(text, job)
        except UserError as error:  # data of another origin
            log.warning("%s: its text is taken as symbols", str(error).partition(". ")[0])
    # The text that the model was loaded with may be the run's copy, without the sets
    if data is not None:
        settings_of(model).data = str(data)
    return model


def _examine_model(
    folder: Path, model: TextModel, args: argparse.Namespace, runs: int, examination: Examination
) -> None:
    facts = examination.facts
    notes = facts["notes"]
    data = Path(settings_of(model).data)
    kind = kind_of_model(model)
    subsets = [name for name in ("test", "valid") if any(data.glob(f"{name}.*"))]
    if not args.input and not subsets:
        raise UserError(f"{data} has no test or validation set. Give sentences by --input FILE.")
    sources = Sources(args.input, subsets[0] if subsets else "", data, args.sentences)
    settings = {}
    if kind == "translation":
        settings = generation(argparse.Namespace(run_dir=folder, beam=None, lenpen=None))
    routers = Routers(model.models[0], kind == "translation")
    budget = Budget(SIZES[0] // runs, SIZES[1] // runs, SIZES[2] // runs)
    examination.sentences = list(sentences(model, sources, settings, routers, budget))
    if not examination.sentences:
        raise UserError(f"{args.input or sources.subset} has no sentence that the model can read.")
    notes += _cuts(budget, args.sentences if not args.input else budget.count)
    facts.update(
        {"kind": kind, "origin": str(args.input.name) if args.input else f"{sources.subset} set"}
    )
    facts["routers"] = [router.as_json(model.models[0]) for router in routers.all]
    if any(values_of(facts["routers"], "experts")):
        if "valid" in subsets:
            add_loads(facts["routers"], model, data, args.cpu)
        else:
            notes.append(
                "The data has no validation set here, so loads and typical tokens are missing."
            )


def _cuts(budget: Budget, sentences_in_all: int) -> list[str]:
    """What the page leaves out for its size."""
    notes = []
    if budget.is_spent:
        notes.append(
            f"Only {budget.count - 1:,} of {sentences_in_all:,} sentences fit on a page of 20 MB."
        )
    if budget.with_experts < budget.count:
        notes.append(
            f"A page has at most 20 MB: the first {budget.with_experts:,} sentences have experts, "
            f"the others only text."
        )
    if budget.with_keys < budget.with_experts:
        notes.append(
            f"For the same reason only the first {budget.with_keys:,} sentences have strongest keys."
        )
    return notes


def add_loads(routers: list[dict[str, Any]], model: TextModel, data: Path, cpu: bool) -> None:
    """Add to each router its load and its experts' typical tokens, as `moa-fairseq analyze` has them.

    Args:
        routers: as `Router.as_json` gives them.
        model: of the run.
        data: the binarised folder, with a validation set.
        cpu: whether a GPU is left alone.
    """
    network = model.models[0]
    counters = {}
    for router in routers:
        if router["experts"]:
            counters[router["name"]] = TokenCounter(segmenter(model.task, data))
    flags = argparse.Namespace(subset="valid", max_tokens=4096, cpu=cpu)

    def counted() -> Iterator[NamedRoutings]:
        for sample, routings in forward_passes(flags, network, model.task):
            count_pass(counters, sample, dict(routings), model.task)
            yield routings

    uses = {use.name: use for use in router_uses(counted())}
    for router in routers:
        if use := uses.get(router["name"]):
            router["load"] = summary(use)
            router["token_entropy"] = use.total_entropy / use.instances
            if not is_uniform(network, use.name) and counters[use.name].attributions:
                router["typical"] = []
                for tokens in counters[use.name].indicative(TYPICAL, MIN_COUNT):
                    rows = []
                    for token in tokens:
                        rows.append([token["token"], round(token["pmi"], 2), round(token["count"])])
                    router["typical"].append(rows)


def curves(folder: Path) -> dict[str, dict[str, list[list[float | None]]]]:
    """Metric → "train" and "valid" → [updates, value] of each point of a run's log.

    Args:
        folder: of the run; nothing where it has no train.jsonl.

    Raises:
        UserError: for a damaged line, with its number.
    """
    points: dict[str, dict[str, list[list[float | None]]]] = {}
    log_file = folder / "train.jsonl"
    if not log_file.is_file():
        return points
    collections.deque(read_records(log_file), maxlen=0)  # raises for a damaged line
    for metric in CURVES:
        with contextlib.suppress(UserError):  # a metric that this training does not log
            curve = read_learning_curve(folder, metric)
            points[metric] = {"train": _thinned(curve.train), "valid": _thinned(curve.valid)}
    return points


def _thinned(points: list[Point]) -> list[list[float | None]]:
    step = math.ceil(len(points) / POINTS) or 1
    spread = points[::step]
    if points and spread[-1] is not points[-1]:
        spread.append(points[-1])
    rows = []
    for point in spread:
        rows.append([point.updates, point.value if math.isfinite(point.value) else None])
    return rows


def result(
    folder: Path, model: TextModel | None, recipe: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """Scores, the paper's row, what differs from it, costs, and what origin the run.

    Args:
        folder: of the run.
        model: for its costs, or None.
        recipe: of the run, or empty.
        notes: where a missing result is noted.
    """
    parts: dict[str, Any] = {"facts": [], "scores": [], "paper": [], "differences": []}
    facts = parts["facts"]
    origin = {}
    if folder.is_dir():
        origin = combined(made_by_of(read_step_records(folder).get("train", {})))
    if recipe:
        facts += [
            ["recipe", recipe.get("experiment")],
            ["architecture", recipe["model"].get("arch")],
        ]
    run: dict[str, Any] = {}
    if (folder / "result.json").is_file():
        comparison = load_comparison(default_results(), [folder / "result.json"])
        measured = list(comparison.other)
        for table in comparison.tables:
            location = {"where": f"{table.name}, Table {table.table}"}
            for row in table.rows:
                measured += row.runs
                for cell in row.cells:
                    parts["paper"] += [location | line for line in lines_of(row, cell)]
        run = measured[0]
        metrics = run["metrics"]
        names = {**SCORES, "sacrebleu_signature": "sacreBLEU's signature"}
        for key, name in names.items():
            if metrics.get(key) is not None:
                parts["scores"].append([name, metrics[key]])
        parts["differences"] = run.get("differences") or []
        for key in _ORIGIN:
            if run.get(key):
                origin[key] = run[key]
    else:
        notes.append(
            "This run has no result.json yet, so there are no scores of the whole test set."
        )
    if model is not None:
        cost = as_json(count(model.models[0], LENGTH, LENGTH))
        of_pair = f"MACs of {LENGTH} + {LENGTH} tokens"
        facts += [["parameters", cost["parameters"]], [of_pair, cost["macs"]]]
        facts += [["MACs of attention", cost["attention_macs"]]]
        facts += [["cache, bytes per token and layer", cost["cache_bytes"]]]
    keys = ("updates", "epochs", "train_seconds", "tokens_per_second", "seed")
    facts += [[key.replace("_", " "), run.get(key)] for key in keys]
    if origin.get("commit"):
        origin["commit"] = HASH.sub(r"\1", origin["commit"])
    facts += map(list, selected(origin, _ORIGIN).items())
    parts["facts"] = [fact for fact in facts if fact[1] is not None]
    return parts
