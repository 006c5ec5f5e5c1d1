"""result.json: a measured number, the facts that repeat it, and whether it reproduces a row of a paper."""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from moa_fairseq.experiments.make import made_by_of, read_step_records
from moa_fairseq.experiments.recipes.claim import data_differences, differences, finished_settings
from moa_fairseq.experiments.recipes.headline import headline_of
from moa_fairseq.experiments.recipes.run import Run
from moa_fairseq.experiments.recipes.schema import Recipe, Score
from moa_fairseq.experiments.recipes.scores import describe, flat_metrics, scores_in
from moa_fairseq.experiments.recipes.steps import LEFT_OUT, steps
from moa_fairseq.experiments.recipes.train_log import summarise
from moa_fairseq.experiments.records.json_files import (
    Values,
    is_number,
    selected,
    write_json,
)
from moa_fairseq.experiments.records.provenance import combined
from moa_fairseq.experiments.scoring.zero_shot import result_in

_PROVENANCE = ("data", "versions", "commit", "date", "command")
# Keys that result.json has only with a value
_OPTIONAL = ("row", "differences", "zero_shot", LEFT_OUT, "updated_parameters")
log = logging.getLogger(__name__)


def maker(folder: Path, recipe: Recipe, checkpoints: Path | None = None) -> Values:
    """The provenance of a run: of its training or, for a model that is only evaluated, of the evaluation.

    Args:
        folder: the run folder.
        recipe: the recipe, which determines the step.
        checkpoints: the folder of checkpoints, for an unfinished training.

    Returns:
        The records by `provenance` of all sessions, combined; {} if an earlier version made the run.
    """
    name = "train"
    if recipe.finetune == "noft" and recipe.subsets:
        kind = "generate" if recipe.generate else "score"
        name = f"{kind}-{recipe.subsets[0]}"
    return combined(made_by_of(read_step_records(folder).get(name, {}), checkpoints))


def record(run: Run, started: float) -> Path | None:
    """Write result.json if the run scores, and its speed if requested.

    Args:
        run: the run, whose steps are finished.
        started: the start time, by time.time().

    Returns:
        result.json; None if nothing was scored.

    Raises:
        UserError: for damaged scores or a damaged log.
    """
    folder = run.folder
    options = run.options
    summary = summarise(folder / "train.jsonl")
    records = read_step_records(folder)
    if options.stage == "train" and options.record:
        _record_speed(run, summary, records)
    outputs = _score_files(run)
    if not options.includes_stage("score") or not outputs:
        return None
    scores = {}
    for subset, path in outputs.items():
        scores[subset] = scores_in(path, run.recipe, run.prepared.folder, subset)
    values = _values(run, summary, records, scores)
    result = folder / "result.json"
    write_json(result, values)
    paper = (values["reproduces"] or {}).get("value")
    summary_line = describe(values["headline"], scores, paper if is_number(paper) else None)
    log.info("%s: %s (%.0f s)", result, summary_line, time.time() - started)
    return result


def _values(
    run: Run,
    summary: Values,
    records: Values,
    scores: Mapping[str, Values],
) -> Values:
    """The content of result.json.

    Args:
        run: the run.
        summary: what `summarise` returns for its training.
        records: step → its entry in state.json.
        scores: subset → its scores; the first subset gives the recipe's result.
    """
    recipe = run.recipe
    subset = recipe.subsets[0]
    trained = records.get("train", {}).get("facts") or {}
    finished = finished_settings(run.folder, recipe)
    left_out = _left_out(records, scores)
    headline = headline_of(recipe, run.options.published_recipe or recipe, scores[subset])
    deviations = _differences_from_the_row(run, finished, headline, left_out)
    reproduced = None
    if recipe.reproduces and run.options.published_recipe and not deviations:
        reproduced = dataclasses.asdict(recipe.reproduces)
    other_metrics = {name: flat_metrics(of_subset) for name, of_subset in scores.items()}
    metrics = other_metrics.pop(subset)
    if "valid_ppl" in summary:
        metrics["valid_ppl"] = summary["valid_ppl"]
    accuracies, zero_shot = result_in(run.folder, run.model_path)
    beam = selected(finished["evaluation"], ("beam", "lenpen"))
    values: Values = {
        "experiment": recipe.experiment,
        "reproduces": reproduced,
        "row": recipe.row if reproduced else None,
        "differences": deviations,
        "headline": headline if recipe.score else None,
        "metrics": metrics | accuracies,
        "zero_shot": zero_shot,
        "subset": subset,
        LEFT_OUT: left_out,
        "other_subsets": other_metrics,
        "parameters": trained.get("parameters"),
        "updated_parameters": 0 if recipe.finetune == "noft" else trained.get("updated"),
        "updates": summary["updates"],
        "epochs": summary["epochs"],
        "train_seconds": summary["train_seconds"],
        "tokens_per_second": summary["tokens_per_second"],
        "effective_batch_tokens": recipe.train.effective_batch_tokens or recipe.train.max_tokens,
        "checkpoints_averaged": finished["averaged"],
        "generation": beam if recipe.generate else None,
        "evaluation": scores[subset].get("meta", {}).get("evaluation"),
        "seed": recipe.train.seed,
    }
    values |= selected(_made_by(run, trained), ("hardware", *_PROVENANCE))
    values["commits"] = _commits(run, records)
    for key in _OPTIONAL:
        if values[key] in (None, "", [], {}):
            del values[key]
    return values


def _made_by(run: Run, trained: Values) -> Values:
    """The provenance of a run; an earlier version recorded the hardware among the facts of the training."""
    made_by = maker(run.folder, run.recipe)
    made_by.setdefault("hardware", trained.get("hardware"))
    return made_by


def _score_files(run: Run) -> dict[str, Path]:
    """Subset → the file of its scores."""
    outputs = {}
    for step in steps(run):
        if step.name.startswith("score-"):
            outputs[step.name.removeprefix("score-")] = step.output
    return outputs


def _commits(run: Run, records: Values) -> dict[str, str | None]:
    """Step → the commit that made it."""
    commits = {}
    for step in steps(run):
        sessions = made_by_of(records.get(step.name, {}))
        commits[step.name] = combined(sessions).get("commit")
    return commits


def _left_out(records: Values, subsets: Iterable[str]) -> dict[str, int]:
    """Subset → number of its sentences that were not translated, where that is known."""
    numbers = {}
    for subset in subsets:
        facts = records.get(f"generate-{subset}", {}).get("facts")
        if isinstance(facts, dict) and is_number(facts.get(LEFT_OUT)):
            numbers[subset] = facts[LEFT_OUT]
    return numbers


def _record_speed(run: Run, summary: Values, records: Values) -> None:
    """Write the speed of a training to the file of --record."""
    from moa_fairseq.experiments.recipes.workload import workload

    assert run.options.record
    work = workload(run.recipe, run.prepared.folder)
    trained = records.get("train", {}).get("facts") or {}
    made_by = _made_by(run, trained)
    row: Values = {"experiment": run.recipe.experiment}
    row |= selected(made_by, ("hardware", "precision"))
    row |= {
        "tokens_per_second": summary["tokens_per_second"],
        "macs_per_target_token": round(work.macs_per_target_token),
        "parameters": trained.get("parameters"),
        "max_tokens": made_by.get("max_tokens"),
        "update_freq": made_by.get("update_freq"),
        "updates": summary["updates"],
    }
    row |= selected(made_by, _PROVENANCE)
    write_json(run.options.record, row)
    log.info("speed recorded as %s", run.options.record)


def _differences_from_the_row(
    run: Run, finished: Values, headline: str, left_out: Mapping[str, int]
) -> list[str]:
    """Differences between a finished run and its recipe's row; [] for a recipe that reproduces none."""
    recipe = run.recipe
    published = run.options.published_recipe
    if not published or not recipe.reproduces:
        return []
    data = data_differences(published, run.prepared.folder, run.prepared.sentences, claim=True)
    requested = (recipe.score or Score()).headline
    if headline != requested:
        data["score.headline"] = f"{requested} → {headline}"
    deviations = differences(published, finished, data)
    for name, count in left_out.items():
        deviations.append(f"left out of {name}: {count:,} of its sentences")
    return deviations
