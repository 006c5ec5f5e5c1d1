"""One run of a page: its sentences, its routers' loads, its training and its result."""

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
from moa_fairseq.experiments.inference.translate import generation
from moa_fairseq.experiments.look.routes import Budget, Routers
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
from moa_fairseq.experiments.records.json_files import Values, selected
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
# Limits of `Budget` in bytes, for the sentences of all runs: for strongest keys, for experts, for text. With
# the loads and curves of two runs the page stays below 20 MB.
SIZES = (9_000_000, 15_000_000, 18_000_000)
_ORIGIN = ("hardware", "commit", "date", "command")
CURVES = ("loss", "nll_loss", "ppl", "lr", "load_entropy", "dead_experts")
POINTS = 300  # the largest number of points of a curve
TYPICAL = 10  # the number of typical tokens of an expert
MIN_COUNT = 5  # a typical token occurs this often, as in `moa-fairseq analyze expert-tokens`
MAX_TOKENS = 4096  # of a batch of the validation set, as in `moa-fairseq analyze`
# A commit; the page shows its first ten digits
HASH = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")
LENGTH = 10  # the number of tokens of the sentences whose MACs are counted, as in `moa-fairseq complexity`


@dataclasses.dataclass
class Examination:
    """What a page shows of one run.

    Args:
        name: the name of the run.
        facts: everything but the sentences, as JSON.
        sentences: the sentences, as JSON.
        recipe: the recipe of the run; empty if it has none.
    """

    name: str
    facts: Values
    sentences: list[Sentence]
    recipe: Values


def examine(folder: Path, args: argparse.Namespace, runs: int) -> Examination:
    """Read a run.

    Args:
        folder: the run folder, or a checkpoint.
        args: the flags: input, sentences, data and cpu.
        runs: the number of runs on the page.

    Raises:
        UserError: for a run that has neither a checkpoint nor a log, for a damaged log, recipe or result, and
            for text that the model cannot read.
    """
    recipe: Values = {}
    if (folder / "recipe.yaml").is_file():
        recipe = read_mapping(folder / "recipe.yaml", "recipe")
    name = folder.resolve().name
    notes: list[str] = []
    facts: Values = {"name": name, "summary": recipe.get("summary"), "notes": notes}
    facts["curves"] = curves(folder)
    sentences: list[Sentence] = []
    model = None
    checkpoint = _checkpoint(folder)
    if checkpoint is not None:
        model = _load(folder, checkpoint, args)
        if checkpoint.name == LAST:
            notes.append(
                f"The training is not finished: this is {LAST}, the state at its last save."
            )
        sentences = _examine_model(folder, model, args, runs, facts)
    elif facts["curves"]:
        notes.append("This run has no checkpoint yet, so there are no sentences and no loads.")
    else:
        raise UserError(
            f"{folder} has neither a checkpoint nor a train.jsonl. Train first, or name a run."
        )
    facts["result"] = result(folder, model, recipe, notes)
    return Examination(name, facts, sentences, recipe)


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
    text = run_copy_of(checkpoint) or data
    model = load_run(checkpoint, data, None, args.cpu)
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
    folder: Path, model: TextModel, args: argparse.Namespace, runs: int, facts: Values
) -> list[Sentence]:
    """The sentences of a run; its model's kind and routers, and what the page leaves out, go to the facts."""
    data = Path(_task_settings(model).data)
    subsets = [name for name in ("test", "valid") if any(data.glob(f"{name}.*"))]
    if not args.input and not subsets:
        raise UserError(f"{data} has no test or validation set. Give sentences by --input FILE.")
    sources = Sources(args.input, subsets[0] if subsets else "", data, args.sentences)
    facts["kind"] = kind_of_model(model)
    facts["origin"] = args.input.name if args.input else f"{sources.subset} set"
    network = model.models[0]
    is_translation = facts["kind"] == "translation"
    routers = Routers(network, is_translation)
    budget = Budget(*(size // runs for size in SIZES))
    reader = SentenceReader(model, data, routers, budget)
    batches = samples(model, sources, generation(folder) if is_translation else {})
    sentences = list(reader.sentences(batches, args.sentences))
    if not sentences:
        raise UserError(f"{args.input or sources.subset} has no sentence that the model can read.")
    facts["notes"] += _cuts(budget, budget.count if args.input else args.sentences)
    facts["routers"] = [router.as_json() for router in routers.all]
    if any(router["experts"] for router in facts["routers"]):
        if "valid" in subsets:
            add_loads(facts["routers"], model, data, args.cpu)
        else:
            facts["notes"].append(
                "The data has no validation set here, so loads and typical tokens are missing."
            )
    return sentences


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


def add_loads(routers: list[Values], model: TextModel, data: Path, cpu: bool) -> None:
    """Add to each router its load and its experts' typical tokens, as `moa-fairseq analyze` computes them.

    Args:
        routers: what `Router.as_json` returns for each router; it is changed in place.
        model: the model of the run.
        data: the binarised folder, with a validation set.
        cpu: whether the model runs on the CPU although there is a GPU.
    """
    network = model.models[0]
    counters = {}
    for router in routers:
        if router["experts"]:
            counters[router["name"]] = TokenCounter(segmenter(model.task, data))

    def counted() -> Iterator[NamedRoutings]:
        passes = forward_passes(network, model.task, "valid", MAX_TOKENS, cpu)
        for batch, routings in passes:
            for name, routing in routings:
                if name in counters:
                    count_batch(counters[name], name, routing, batch, model.task)
            yield routings

    uses = {use.name: use for use in router_uses(counted())}
    for router in routers:
        if use := uses.get(router["name"]):
            router["load"] = summary(use)
            router["token_entropy"] = use.total_entropy / use.instances
            if not is_uniform(network, use.name) and counters[use.name].attributions:
                router["typical"] = _typical(counters[use.name])


def _typical(counter: TokenCounter) -> list[list[list[Any]]]:
    """The typical tokens of each expert, each as [token, pointwise mutual information, count]."""
    rows = []
    for tokens in counter.indicative(TYPICAL, MIN_COUNT):
        rows.append(
            [[each["token"], round(each["pmi"], 2), round(each["count"])] for each in tokens]
        )
    return rows


def curves(folder: Path) -> dict[str, dict[str, list[list[float | None]]]]:
    """The curves of a run's log.

    Args:
        folder: the run folder.

    Returns:
        Metric → "train" and "valid" → [updates, value] of each point; empty if there is no train.jsonl.

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
    """At most POINTS points and the last one, as [updates, value]."""
    step = math.ceil(len(points) / POINTS) or 1
    spread = points[::step]
    if points and spread[-1] is not points[-1]:
        spread.append(points[-1])
    return [[each.updates, each.value if math.isfinite(each.value) else None] for each in spread]


def result(folder: Path, model: TextModel | None, recipe: Values, notes: list[str]) -> Values:
    """The result of a run, as JSON.

    Args:
        folder: the run folder.
        model: the model, whose costs are counted; None without a checkpoint.
        recipe: the recipe of the run; empty if it has none.
        notes: the page's notes, to which a missing result is added.

    Returns:
        "facts" and "scores", lists of [name, value]; "paper", the comparison with a paper's row;
        "differences", how the run differs from the paper's.
    """
    facts = [
        ["recipe", recipe.get("experiment")],
        ["architecture", recipe.get("model", {}).get("arch")],
    ]
    origin: Values = {}
    if folder.is_dir():
        origin = combined(made_by_of(read_step_records(folder).get("train", {})))
    run: Values = {}
    paper: list[dict[str, str]] = []
    if (folder / "result.json").is_file():
        run, paper = _measured(folder / "result.json")
        origin |= {key: run[key] for key in _ORIGIN if run.get(key)}
    else:
        notes.append(
            "This run has no result.json yet, so there are no scores of the whole test set."
        )
    if model is not None:
        facts += _costs(model)
    keys = ("updates", "epochs", "train_seconds", "tokens_per_second", "seed")
    facts += [[key.replace("_", " "), run.get(key)] for key in keys]
    if origin.get("commit"):
        origin["commit"] = HASH.sub(r"\1", origin["commit"])
    facts += map(list, selected(origin, _ORIGIN).items())
    return {
        "facts": [fact for fact in facts if fact[1] is not None],
        "scores": _scores(run.get("metrics", {})),
        "paper": paper,
        "differences": run.get("differences") or [],
    }


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
    return measured[0], paper


def _scores(metrics: Values) -> list[list[Any]]:
    """The scores that a run has, as [name, value]."""
    names = SCORES | {"sacrebleu_signature": "sacreBLEU's signature"}
    return [[name, metrics[key]] for key, name in names.items() if metrics.get(key) is not None]


def _costs(model: TextModel) -> list[list[Any]]:
    """Parameters, MACs and cache of a model, as [name, value]."""
    cost = as_json(count(model.models[0], LENGTH, LENGTH))
    return [
        ["parameters", cost["parameters"]],
        [f"MACs of {LENGTH} + {LENGTH} tokens", cost["macs"]],
        ["MACs of attention", cost["attention_macs"]],
        ["cache, bytes per token and layer", cost["cache_bytes"]],
    ]
