"""result.json: a measured number, the facts needed to repeat it, and whether it reproduces a row of a paper.

A run reproduces its row of a paper with the row's settings, on the row's data. The settings in the recipe
file and those of the finished run are two dicts.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import Dataset, datasets
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.make import made_by_of, read_step_records
from moa_fairseq.experiments.recipes.headline import headline_of
from moa_fairseq.experiments.recipes.run import Run
from moa_fairseq.experiments.recipes.schema import INTERVAL, TRANSLATION, Recipe, Score, as_of_today
from moa_fairseq.experiments.recipes.scores import describe, flat_metrics, scores_in
from moa_fairseq.experiments.recipes.steps import LEFT_OUT, steps
from moa_fairseq.experiments.recipes.train_log import summarise
from moa_fairseq.experiments.records.json_files import (
    Values,
    changes,
    is_number,
    selected,
    write_json,
)
from moa_fairseq.experiments.records.provenance import combined
from moa_fairseq.experiments.scoring.zero_shot import result_in

_FREE = ("max_tokens", "headline", "seed")  # settings that do not change the experiment
_TEXT = ("source", "target", "bpe", "joined_dictionary", "lowercase")
_MAKER = ("data", "versions", "commit", "date", "command")
log = logging.getLogger(__name__)


def settings(recipe: Recipe) -> Values:
    """The settings that the finished run actually used."""
    section = recipe.generate or recipe.score
    count = recipe.average.count if recipe.average else 1
    evaluation = dataclasses.asdict(section) if section else {}
    scoring = recipe.score.flags if recipe.generate and recipe.score else {}
    return _settings(
        recipe.training_inputs, recipe.goal, count, recipe.averaged_interval, evaluation, scoring
    )


def settings_made(folder: Path, recipe: Recipe) -> Values:
    """The settings of `settings`, read from the chain of finished steps in a run folder.

    Args:
        folder: the run folder, with state.json.
        recipe: the recipe; its type of evaluation, its subsets and its fine-tuning are read.

    Returns:
        The settings; for a damaged state.json a value that no recipe has.
    """
    try:
        return _settings_of_records(read_step_records(folder), recipe)
    except (AttributeError, KeyError, IndexError, TypeError):  # a damaged state.json
        return {"averaged": None, "evaluation": {}, "state.json": "damaged"}


def _settings_of_records(records: Mapping[str, Any], recipe: Recipe) -> Values:
    """The settings of `settings_made`; any error of a missing or odd value for damaged records."""
    kind = "generate" if recipe.generate else "score"
    evaluation = records[f"{kind}-{recipe.subsets[0]}"]["inputs"]
    section = evaluation["settings"]
    scoring = {}
    if recipe.generate and recipe.score:
        scoring = records[f"score-{recipe.subsets[0]}"]["inputs"]["settings"]["flags"]
    if recipe.finetune == "noft":  # nothing is trained
        return settings(recipe) | _settings({}, {}, 1, None, section, scoring)
    train = as_of_today(records.get("train", {}))
    average = records.get("average", {})
    origin = evaluation["made"][0]
    count = 1
    interval = None
    if origin is not None and origin == average.get("fingerprint"):
        origin = average["inputs"]["train"][0]
        count = average["inputs"]["count"]
        if average["inputs"]["checkpoints"][0][0].startswith("checkpoint_"):  # by updates
            interval = train["facts"].get(INTERVAL)
    is_finished = origin is not None and origin == train.get("fingerprint")
    inputs = train["inputs"] if is_finished else {}
    return _settings(inputs, train.get("goal", {}), count, interval, section, scoring)


def _settings(
    inputs: Mapping[str, Any],
    goal: Mapping[str, Any],
    count: int,
    interval: int | None,
    section: Any,
    scoring: Mapping[str, Any],
) -> Values:
    """The settings of a training, its average and its evaluation, without those of _FREE."""
    finished: Values = {}
    if inputs:
        finished["model"] = inputs["model"]
        finished["train"] = _without_free(inputs["train"]) | dict(goal)
    flags = dict(scoring)
    flags.pop("also", None)  # only an additional number
    finished.update(averaged=count, evaluation=_without_free(section), scoring=flags)
    if interval:  # between checkpoints that are saved by updates
        finished["averaged_every"] = interval
    return finished


def _without_free(values: Mapping[str, Any]) -> Values:
    return {key: value for key, value in values.items() if key not in _FREE}


def data_differences(
    recipe: Recipe, folder: Path, lines: Mapping[str, int], claim: bool = False
) -> dict[str, str]:
    """Differences between the data that a recipe requires and binarised data, as far as both are known.

    Args:
        recipe: the recipe.
        folder: the binarised folder, with its manifest.json in it or next to it.
        lines: subset → number of lines.
        claim: True to count unknown properties as differences, for a row of a paper.

    Returns:
        Dotted key → 'recipe → data'.
    """
    name = recipe.data.recipe
    dataset = datasets().get(recipe.data.recipe)
    if claim and not (dataset and dataset.downloadable):
        return {"data.recipe": f"{name} → cannot be told: it is text of one's own"}
    manifest = _manifest_of(folder)
    expected = _recipe_facts(recipe, dataset)
    actual = _manifest_facts(manifest, recipe.kind, lines)
    if claim:
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            for file, sums in manifest.get("published", {}).items():
                expected[f"md5 of {file}"] = sums["published"]
                actual[f"md5 of {file}"] = sums["md5"]
    unread = set(dataset.subsets if dataset else ()) - set(recipe.splits)
    for key in list(expected):
        if key.rpartition(" of ")[2] in unread:
            del expected[key]
    common = [key for key in expected if key in actual]
    deviations = changes(selected(expected, common), selected(actual, common), "data.")
    if claim:
        unknown = expected.keys() - actual.keys()
        for key in sorted(unknown, key=lambda key: (key != "recipe", "steps" not in key, key)):
            deviations[f"data.{key}"] = f"{expected[key]} → cannot be told"
    elif dataset and name != "parallel" and not actual:
        deviations["data.recipe"] = f"{name} → cannot be told: there is no manifest.json"
    return deviations


def _manifest_of(folder: Path) -> Values:
    """The manifest in a binarised folder or next to it; {} if there is none, or only a damaged one."""
    places = [folder]
    if folder.name == "binarised":
        places.append(folder.parent)
    for place in places:
        try:
            manifest = read_manifest(place)
        except UserError as error:  # a damaged manifest proves nothing
            log.warning("%s", error)
            continue
        if manifest:
            return manifest
    return {}


def _recipe_facts(recipe: Recipe, dataset: Dataset | None) -> Values:
    """The properties of the data that a recipe requires."""
    facts: Values = {}
    if recipe.data.recipe != "binarised":
        facts["recipe"] = recipe.data.recipe
    if recipe.kind == TRANSLATION:
        facts.update(_text_facts(vars(recipe.data)))
    if dataset is None:
        return facts
    if dataset.tokens:
        facts["tokens"] = dict(dataset.tokens)
        if recipe.data.tokens:
            facts["tokens"]["train"] = recipe.data.tokens
    if dataset.generated:
        facts["generated"] = dict(dataset.generated)
    if dataset.steps or dataset.codes:
        for split in dataset.splits:
            facts[f"steps of {split}"] = dataset.treatment(split, vars(recipe.data))
    for split, number in dataset.expected.items():
        if split == "train":
            number = max(1, math.ceil(number * (recipe.data.train_fraction or 1)))
        facts[f"lines of {split}"] = number
    for split, number in dataset.words.items():
        facts[f"words of {split}"] = number
    return facts


def _manifest_facts(manifest: Mapping[str, Any], kind: str, lines: Mapping[str, int]) -> Values:
    """The properties that a manifest and the numbers of lines prove."""
    section = manifest.get("settings")
    if not isinstance(section, dict):
        section = {}
    facts: Values = {}
    name = manifest.get("dataset", section.get("recipe", manifest.get("recipe")))
    if name is not None:
        facts["recipe"] = name
    if kind == TRANSLATION:
        facts.update(_text_facts(section))
    for key in ("tokens", "generated"):
        if key in section:
            facts[key] = section[key]
    for split, number in lines.items():
        facts[f"lines of {split}"] = number
    # A damaged manifest proves nothing
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        for split, steps_of_split in manifest.get("steps", {}).items():
            facts[f"steps of {split}"] = steps_of_split
        for split, fact in manifest.get("splits", {}).items():
            # The end of a line counts as a word
            facts[f"words of {split}"] = fact["words"] + fact["lines"]
    return facts


def _text_facts(section: Mapping[str, Any]) -> Values:
    """The properties of bilingual text in a data section, of a recipe or in a manifest."""
    facts = {key: section[key] for key in _TEXT if key in section}
    if facts:
        flags = section.get("flags") or {}
        fraction = section.get("train_fraction") or 1
        facts["flags"] = dict(flags)
        facts["flags"].pop("workers", None)
        facts["codes"] = section.get("codes")
        facts["train_fraction"] = [fraction, section.get("train_fraction_seed", 1)]
        if fraction == 1:
            facts["train_fraction"] = fraction
    return facts


def differences(
    published: Recipe, run_settings: Mapping[str, Any], data: Mapping[str, str]
) -> list[str]:
    """Differences between a run and the row of a paper; none if it reproduces the row.

    Args:
        published: the recipe of the file, without any --set.
        run_settings: the run's settings, see `settings_made`.
        data: the differences of the data, see `data_differences`.

    Returns:
        'key: row → run' for each difference.
    """
    return list(
        map(": ".join, [*data.items(), *changes(settings(published), run_settings).items()])
    )


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
    cell = values["reproduces"]
    paper = cell["value"] if cell and is_number(cell["value"]) else None
    story = describe(values["headline"] or "", scores, paper)
    log.info("%s: %s (%.0f s)", result, story, time.time() - started)
    return result


def _values(
    run: Run,
    summary: Values,
    records: Mapping[str, Any],
    scores: Mapping[str, Values],
) -> Values:
    """The content of result.json.

    Args:
        run: the run.
        summary: what `summarise` returns for its training.
        records: step → its entry in state.json.
        scores: subset → its scores, that of the recipe's result first.
    """
    recipe = run.recipe
    subset = recipe.subsets[0]
    trained = _training_facts(records)
    finished = settings_made(run.folder, recipe)
    left_out = _left_out(records, scores)
    headline = headline_of(recipe, run.options.published or recipe, scores[subset])
    deviations = _differences_from_the_row(run, finished, headline, left_out)
    cell = None
    if recipe.reproduces and run.options.published and not deviations:
        cell = dataclasses.asdict(recipe.reproduces)
    metrics = {name: flat_metrics(of_subset) for name, of_subset in scores.items()}
    if "valid_ppl" in summary:
        metrics[subset]["valid_ppl"] = summary.pop("valid_ppl")
    accuracies, zero_shot = result_in(run.folder, run.model)
    beam = selected(finished["evaluation"], ("beam", "lenpen"))
    values: Values = {
        "experiment": recipe.experiment,
        "reproduces": cell,
        "row": recipe.row if cell else None,
        "differences": deviations,
        "headline": headline if recipe.score else None,
        "metrics": metrics.pop(subset) | accuracies,
        "zero_shot": zero_shot,
        "subset": subset,
        LEFT_OUT: left_out,
        "other_subsets": metrics,
        "parameters": trained.get("parameters"),
        "updated_parameters": 0 if recipe.finetune == "noft" else trained.get("updated"),
    }
    values |= summary
    values |= {
        "effective_batch_tokens": recipe.train.effective_batch_tokens or recipe.train.max_tokens,
        "checkpoints_averaged": finished["averaged"],
        "generation": beam if recipe.generate else None,
        "evaluation": scores[subset].get("meta", {}).get("evaluation"),
        "seed": recipe.train.seed,
    }
    values |= selected(_made_by(run, trained), ("hardware", *_MAKER))
    values["commits"] = _commits(run, records)
    for key in ("row", "differences", "zero_shot", LEFT_OUT, "updated_parameters"):
        if values[key] in (None, "", [], {}):
            del values[key]
    return values


def _training_facts(records: Mapping[str, Any]) -> Values:
    return records.get("train", {}).get("facts") or {}


def _made_by(run: Run, trained: Mapping[str, Any]) -> Values:
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


def _commits(run: Run, records: Mapping[str, Any]) -> dict[str, str | None]:
    """Step → the commit that made it."""
    commits = {}
    for step in steps(run):
        sessions = made_by_of(records.get(step.name, {}))
        commits[step.name] = combined(sessions).get("commit")
    return commits


def _left_out(records: Mapping[str, Any], subsets: Iterable[str]) -> dict[str, int]:
    """Subset → number of its sentences that were not translated, where that is known."""
    numbers = {}
    for subset in subsets:
        facts = records.get(f"generate-{subset}", {}).get("facts")
        if isinstance(facts, dict) and is_number(facts.get(LEFT_OUT)):
            numbers[subset] = facts[LEFT_OUT]
    return numbers


def _record_speed(run: Run, summary: Mapping[str, Any], records: Mapping[str, Any]) -> None:
    """Write the speed of a training to the file of --record."""
    from moa_fairseq.experiments.recipes.workload import workload

    assert run.options.record
    work = workload(run.recipe, run.prepared.folder)
    trained = _training_facts(records)
    made_by = _made_by(run, trained)
    row: Values = {"experiment": run.recipe.experiment}
    row |= selected(made_by, ("hardware", "precision"))
    row["tokens_per_second"] = summary["tokens_per_second"]
    row["macs_per_target_token"] = round(work.macs_per_target_token)
    row["parameters"] = trained.get("parameters")
    row |= selected(made_by, ("max_tokens", "update_freq"))
    row["updates"] = summary["updates"]
    row |= selected(made_by, _MAKER)
    write_json(run.options.record, row)
    log.info("speed recorded as %s", run.options.record)


def _differences_from_the_row(
    run: Run, finished: Mapping[str, Any], headline: str, left_out: Mapping[str, int]
) -> list[str]:
    """Differences between a finished run and its recipe's row; [] for a recipe that reproduces none."""
    recipe = run.recipe
    published = run.options.published
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
