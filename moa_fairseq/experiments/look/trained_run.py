"""One run of a page: its sentences, its routers' loads, its training and its result."""

import argparse
import contextlib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.analysis.expert_load import summary
from moa_fairseq.experiments.analysis.expert_tokens import (
    TokenCounter,
    count_batch,
    is_uniform,
    segmenter,
)
from moa_fairseq.experiments.analysis.learning_curve import Point, read_learning_curve
from moa_fairseq.experiments.analysis.routed_model import forward_passes, router_uses
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING, TRANSLATION
from moa_fairseq.experiments.data.text_files import run_copy_of
from moa_fairseq.experiments.inference.text_codec import codec_of
from moa_fairseq.experiments.inference.text_model import TextModel, load_run
from moa_fairseq.experiments.inference.translate import search_settings
from moa_fairseq.experiments.look.routes import Budget
from moa_fairseq.experiments.look.samples import Sources, kind_of_model, samples
from moa_fairseq.experiments.look.sentences import Sentence, SentenceReader
from moa_fairseq.experiments.make import made_by_of, read_step_records
from moa_fairseq.experiments.recipes.checkpoints import (
    LAST,
    checkpoint_and_data,
    prepared_data,
)
from moa_fairseq.experiments.recipes.loading import read_mapping
from moa_fairseq.experiments.recipes.train_log import read_records
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.experiments.records.provenance import combined
from moa_fairseq.experiments.scoring.compare import (
    SCORES,
    default_results,
    lines_of,
    load_comparison,
)
from moa_fairseq.experiments.scoring.complexity import as_json, count
from moa_fairseq.plugin.forward_context import NamedRoutings

log = logging.getLogger(__name__)
# `Budget`'s three limits in bytes, for the sentences of all runs. With the loads and curves of two runs the
# page stays below 20 MB
LIMITS = (9_000_000, 15_000_000, 18_000_000)
CURVES = ("loss", "nll_loss", "ppl", "lr", "load_entropy", "dead_experts")
MAX_POINTS = 300  # of a curve
TYPICAL_TOKENS = 10  # the number of typical tokens of an expert
MIN_COUNT = 5  # a typical token occurs this often, as in `moa-fairseq analyze expert-tokens`
MAX_TOKENS = 4096  # of a batch of the validation set, as in `moa-fairseq analyze`
LENGTH = 10  # the number of tokens of the sentences whose MACs are counted, as in `moa-fairseq complexity`
COMMIT = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")  # the page shows its first ten digits
Curve = list[list[float | None]]  # [updates, value] of each point


class Examination(NamedTuple):
    """What a page shows of one run.

    Args:
        facts: everything but the sentences, as JSON.
        sentences: the sentences, as JSON.
        recipe: the recipe of the run; empty if it has none.
    """

    facts: Values
    sentences: list[Sentence]
    recipe: Values


def examine(folder: Path, args: argparse.Namespace, num_runs: int) -> Examination:
    """Read a run.

    Args:
        folder: the run folder, or a checkpoint.
        args: the flags: input, sentences, data and cpu.
        num_runs: the number of runs on the page.

    Raises:
        UserError: for a run that has neither a checkpoint nor a log, for a damaged log, recipe or result, and
            for text that the model cannot read.
    """
    recipe: Values = {}
    if (folder / "recipe.yaml").is_file():
        recipe = read_mapping(folder / "recipe.yaml", "recipe")
    curves = _curves(folder)
    checkpoint = _checkpoint(folder)
    model = None
    sentences: list[Sentence] = []
    facts: Values = {"notes": []}
    if checkpoint is not None:
        model = _load(folder, checkpoint, args)
        sentences, facts = _examine_model(folder, model, args, num_runs)
        if checkpoint.name == LAST:
            note = f"The training is not finished: this is {LAST}, the state at its last save."
            facts["notes"].insert(0, note)
    elif curves:
        facts["notes"].append(
            "This run has no checkpoint yet, so there are no sentences and no loads."
        )
    else:
        raise UserError(
            f"{folder} has neither a checkpoint nor a train.jsonl. Train first, or name a run."
        )
    if not (folder / "result.json").is_file():
        facts["notes"].append(
            "This run has no result.json yet, so there are no scores of the whole test set."
        )
    facts |= {"name": folder.resolve().name, "summary": recipe.get("summary"), "curves": curves}
    facts["result"] = _result(folder, model, recipe)
    return Examination(facts, sentences, recipe)


def _checkpoint(folder: Path) -> Path | None:
    """The averaged or best checkpoint of a run, else the last one; of a path to a file, the file."""
    if not folder.is_dir():
        return folder
    try:
        return checkpoint_and_data(folder)[0]
    except UserError:  # the run has neither an averaged nor a best checkpoint
        last = (folder / "checkpoints" / LAST, folder / LAST)
        return next(filter(Path.is_file, last), None)


def _load(folder: Path, checkpoint: Path, args: argparse.Namespace) -> TextModel:
    """The model with its codec; without a record of the text's preparation, symbols are shown as they are."""
    data = args.data or (prepared_data(folder) if folder.is_dir() else None)
    model = load_run(checkpoint, data, None, args.cpu)
    text = run_copy_of(checkpoint) or data
    kind = kind_of_model(model)
    if kind != "masked" and text is not None:
        try:
            job = TRANSLATION if kind == "translation" else LANGUAGE_MODELING
            model.codec = codec_of(text, job)
        except UserError as error:  # data that neither `prepare` nor a recipe made
            log.warning("%s: its text is taken as symbols", str(error).partition(". ")[0])
    # The model may have been loaded with the run's copy of the text, which lacks the binarised sets
    if data is not None:
        _task_settings(model).data = str(data)
    return model


def _task_settings(model: TextModel) -> Any:
    """The settings of a model's task; their `data` is the path of the binarised folder."""
    return model.task.cfg or model.task.args  # the task of truncated BPTT has no cfg


def _examine_model(
    folder: Path, model: TextModel, args: argparse.Namespace, num_runs: int
) -> tuple[list[Sentence], Values]:
    """The sentences of a run; its model's kind and routers, with notes on what the page leaves out."""
    data = Path(_task_settings(model).data)
    subsets = [name for name in ("test", "valid") if any(data.glob(f"{name}.*"))]
    if not args.input and not subsets:
        raise UserError(f"{data} has no test or validation set. Give sentences by --input FILE.")
    subset = next(iter(subsets), "")
    kind = kind_of_model(model)
    settings = search_settings(folder) if kind == "translation" else {}
    sources = Sources(args.input, subset, data, args.sentences)
    budget = Budget(*(limit // num_runs for limit in LIMITS))
    reader = SentenceReader(model, data, budget)
    sentences = list(reader.sentences(samples(model, sources, settings), args.sentences))
    if not sentences:
        raise UserError(f"{args.input or subset} has no sentence that the model can read.")
    notes = _cuts(budget, budget.count if args.input else args.sentences)
    routers = [router.as_json() for router in reader.routers]
    if any(router["experts"] for router in routers):
        if "valid" in subsets:
            loads = _loads(model, data, args.cpu)
            for router in routers:
                router.update(loads.get(router["name"], {}))
        else:
            notes.append(
                "The data has no validation set here, so loads and typical tokens are missing."
            )
    origin = args.input.name if args.input else f"{subset} set"
    return sentences, {"kind": kind, "origin": origin, "routers": routers, "notes": notes}


def _cuts(budget: Budget, sentences_in_all: int) -> list[str]:
    """Notes on what the page leaves out because of its size."""
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


def _loads(model: TextModel, data: Path, cpu: bool) -> dict[str, Values]:
    """Name of a router → its load and its experts' typical tokens, as `moa-fairseq analyze` computes them."""
    network = model.models[0]
    segment = segmenter(model.task, data)
    counters: dict[str, TokenCounter] = defaultdict(lambda: TokenCounter(segment))

    def counted() -> Iterator[NamedRoutings]:
        """The routings of each pass, whose tokens are counted on the way."""
        for batch, routings in forward_passes(network, model.task, "valid", MAX_TOKENS, cpu):
            for name, routing in routings:
                count_batch(counters[name], name, routing, batch, model.task)
            yield routings

    loads: dict[str, Values] = {}
    for use in router_uses(counted()):
        load = {"load": summary(use), "token_entropy": use.total_entropy / use.instances}
        counter = counters[use.name]
        if not is_uniform(network, use.name) and counter.attributions:
            load["typical"] = _typical(counter)
        loads[use.name] = load
    return loads


def _typical(counter: TokenCounter) -> list[list[list[Any]]]:
    """The typical tokens of each expert, each as [token, pointwise mutual information, count]."""
    rows = []
    for tokens in counter.indicative(TYPICAL_TOKENS, MIN_COUNT):
        rows.append(
            [[each["token"], round(each["pmi"], 2), round(each["count"])] for each in tokens]
        )
    return rows


def _curves(folder: Path) -> dict[str, dict[str, Curve]]:
    """Metric → the curves "train" and "valid" of a run's log; a UserError for a damaged line."""
    log_file = folder / "train.jsonl"
    if not log_file.is_file():
        return {}
    for _ in read_records(
        log_file
    ):  # raises for a damaged line; below, the error would be suppressed
        pass
    curves = {}
    for metric in CURVES:
        with contextlib.suppress(UserError):  # a metric that this training does not log
            curve = read_learning_curve(folder, metric)
            curves[metric] = {"train": _thinned(curve.train), "valid": _thinned(curve.valid)}
    return curves


def _thinned(points: list[Point]) -> Curve:
    """At most MAX_POINTS points and the last one."""
    step = math.ceil(len(points) / MAX_POINTS) or 1
    spread = points[::step]
    if points and spread[-1] is not points[-1]:
        spread.append(points[-1])
    return [[each.updates, each.value if math.isfinite(each.value) else None] for each in spread]


def _result(folder: Path, model: TextModel | None, recipe: Values) -> Values:
    """Facts and scores of a run, its comparison with a paper's row, and its differences from the paper's."""
    run: Values = {}
    paper: list[dict[str, str]] = []
    if (folder / "result.json").is_file():
        run, paper = _measured(folder / "result.json")
    facts = {
        "recipe": recipe.get("experiment"),
        "architecture": recipe.get("model", {}).get("arch"),
    }
    if model is not None:
        facts |= _costs(model)
    for key in ("updates", "epochs", "train_seconds", "tokens_per_second", "seed"):
        facts[key.replace("_", " ")] = run.get(key)
    facts |= _origin(folder, run)
    scores = SCORES | {"sacrebleu_signature": "sacreBLEU's signature"}
    metrics = run.get("metrics", {})
    return {
        "facts": _pairs(facts),
        "scores": _pairs({name: metrics.get(key) for key, name in scores.items()}),
        "paper": paper,
        "differences": run.get("differences") or [],
    }


def _pairs(mapping: Values) -> list[list[Any]]:
    """[name, value] of each value that is not None."""
    return [[name, value] for name, value in mapping.items() if value is not None]


def _origin(folder: Path, run: Values) -> Values:
    """What made a run, from its result, or from the record of its training."""
    keys = ("hardware", "commit", "date", "command")
    origin: Values = {}
    if folder.is_dir():
        origin = combined(made_by_of(read_step_records(folder).get("train", {})))
    origin = {key: run.get(key) or origin.get(key) for key in keys}
    if origin["commit"]:
        origin["commit"] = COMMIT.sub(r"\1", origin["commit"])
    return origin


def _measured(path: Path) -> tuple[Values, list[dict[str, str]]]:
    """The record in a result.json, and its comparison with a paper's row, a line for each number."""
    comparison = load_comparison(default_results(), [path])
    measured = list(comparison.other)
    paper = []
    for table in comparison.tables:
        location = {"where": f"{table.name}, Table {table.table}"}
        for row in table.rows:
            measured += row.runs
            for cell in row.cells:
                paper += [location | line for line in lines_of(row, cell)]
    return measured[0], paper  # of one file, so one record


def _costs(model: TextModel) -> Values:
    """Parameters, MACs and cache of a model."""
    cost = as_json(count(model.models[0], LENGTH, LENGTH))
    return {
        "parameters": cost["parameters"],
        f"MACs of {LENGTH} + {LENGTH} tokens": cost["macs"],
        "MACs of attention": cost["attention_macs"],
        "cache, bytes per token and layer": cost["cache_bytes"],
    }
