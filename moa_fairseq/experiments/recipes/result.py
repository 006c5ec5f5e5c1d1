"""result.json: a measured number, the facts needed to repeat it, and whether it reproduces a row of a paper.

A run reproduces its row of a paper with the row's settings, on the row's data. The settings in the recipe
file and those of the finished run are two dicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.json_files import is_number, write_json
from moa_fairseq.experiments.make import changes, made_by_of, marks
from moa_fairseq.experiments.provenance import combined
from moa_fairseq.experiments.recipes.schema import INTERVAL, TRANSLATION, Recipe, Score, as_of_today
from moa_fairseq.experiments.recipes.scores import describe, flat_metrics, headline_of, scores_in
from moa_fairseq.experiments.recipes.steps import LEFT_OUT, Run, steps
from moa_fairseq.experiments.recipes.train_log import summarise
from moa_fairseq.experiments.scoring.zero_shot import result_in

# Settings that do not change the experiment.
_FREE = ("max_tokens", "headline", "seed")
_TEXT = ("source", "target", "bpe", "joined_dictionary", "lowercase")
_MAKER = ("data", "versions", "commit", "date", "command")
log = logging.getLogger(__name__)


def settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that the finished run actually used."""
    section = recipe.generate or recipe.score
    count = recipe.average.count if recipe.average else 1
    if section:
        evaluation = dataclasses.asdict(section)
    else:
        evaluation = {}
    if recipe.generate and recipe.score:
        scoring = recipe.score.flags
    else:
        scoring = {}
    return _done(recipe.training_inputs, recipe.goal, count, recipe.averaged_interval, evaluation, scoring)


def settings_made(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """The same as `settings`, from the run folder's chain of finished steps.

    Args:
        folder: the run's, with state.json.
        recipe: for its type of evaluation, its subsets and its fine-tuning.

    Returns:
        The settings; for a damaged state.json a value that no recipe has.
    """
    made = marks(folder)
    kind = "generate" if recipe.generate else "score"
    train = as_of_today(made.get("train", {}))
    average = made.get("average", {})
    with contextlib.suppress(AttributeError, KeyError, IndexError, TypeError):  # a damaged state.json
        said = made[f"{kind}-{recipe.subsets[0]}"]["inputs"]
        scoring = {}
        if recipe.generate and recipe.score:
            scoring = made[f"score-{recipe.subsets[0]}"]["inputs"]["settings"]["flags"]
        if recipe.finetune == "noft":  # nothing is trained
            return {**settings(recipe), **_done({}, {}, 1, None, said["settings"], scoring)}
        averaged = said["made"][0] == average.get("fingerprint") is not None
        if averaged:
            origin = average["inputs"]["train"][0]
        else:
            origin = said["made"][0]
        finished = origin is not None and origin == train.get("fingerprint")
        if averaged:
            count = average["inputs"]["count"]
        else:
            count = 1
        inputs = train["inputs"] if finished else {}
        of_updates = averaged and average["inputs"]["checkpoints"][0][0].startswith("checkpoint_")
        if of_updates:
            interval = train["facts"].get(INTERVAL)
        else:
            interval = None
        return _done(inputs, train.get("goal", {}), count, interval, said["settings"], scoring)
    return {"averaged": None, "evaluation": {}, "state.json": "damaged"}


def _done(
    said: Mapping[str, Any],
    goal: Mapping[str, Any],
    count: int,
    interval: int | None,
    section: Any,
    scoring: Mapping[str, Any],
) -> dict[str, Any]:
    flags = {key: value for key, value in scoring.items() if key != "also"}  # only an additional number
    done: dict[str, Any] = {"averaged": count, "evaluation": _kept(section), "scoring": flags}
    if interval:  # of checkpoints of updates
        done["averaged_every"] = interval
    if said:
        return {"model": said["model"], "train": {**_kept(said["train"]), **goal}, **done}
    return done


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _FREE}


def data_differences(
    recipe: Recipe, folder: Path, lines: Mapping[str, int], claim: bool = False
) -> dict[str, str]:
    """Differences between binarised data and a recipe's, as far as both are known.

    Args:
        recipe: the reference.
        folder: the binarised folder, with its manifest.json in it or next to it.
        lines: subset → number of lines.
        claim: for a row of a paper, unknown properties count as differences.

    Returns:
        Dotted key → 'recipe → data'.
    """
    name = recipe.data.recipe
    dataset = datasets().get(recipe.data.recipe)
    if claim and not (dataset and dataset.downloadable):
        return {"data.recipe": f"{name} → cannot be told: it is text of one's own"}
    manifest: dict[str, Any] = {}
    for place in (folder, folder.parent) if folder.name == "binarised" else (folder,):
        try:
            manifest = manifest or read_manifest(place)
        except UserError as error:  # a damaged manifest proves nothing
            log.warning("%s", error)
    said = manifest.get("settings")
    said = said if isinstance(said, dict) else {}
    made = manifest.get("dataset", said.get("recipe", manifest.get("recipe")))
    row: dict[str, Any]
    if name == "binarised":
        row = {}
    else:
        row = {"recipe": name}
    found: dict[str, Any]
    if made is not None:
        found = {"recipe": made}
    else:
        found = {}
    if recipe.kind == TRANSLATION:
        row.update(_text_facts(vars(recipe.data)))
        found.update(_text_facts(said))
    if dataset:
        if dataset.tokens:
            train = {"train": recipe.data.tokens} if recipe.data.tokens else {}
            row["tokens"] = {**dataset.tokens, **train}
            found.update({key: said[key] for key in ("tokens",) if key in said})
        if dataset.generated:
            row["generated"] = dict(dataset.generated)
            found.update({key: said[key] for key in ("generated",) if key in said})
        for split in dataset.splits if dataset.steps or dataset.codes else ():
            row[f"steps of {split}"] = dataset.treatment(split, vars(recipe.data))
        part = recipe.data.train_fraction or 1
        for split, number in dataset.expected.items():
            if split == "train":
                row[f"lines of {split}"] = max(1, math.ceil(number * part))
            else:
                row[f"lines of {split}"] = number
        row.update({f"words of {split}": number for split, number in dataset.words.items()})
    found.update({f"lines of {split}": number for split, number in lines.items()})
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # a damaged manifest proves nothing
        found.update({f"steps of {split}": steps for split, steps in manifest.get("steps", {}).items()})
        for split, fact in manifest.get("splits", {}).items():
            found[f"words of {split}"] = fact["words"] + fact["lines"]  # an end of line counts as one
        for file, sums in manifest.get("published", {}).items() if claim else ():
            row[f"md5 of {file}"] = sums["published"]
            found[f"md5 of {file}"] = sums["md5"]
    unread = {*(dataset.subsets if dataset else ())} - {*recipe.splits}
    needed = {key for key in row if key.rpartition(" of ")[2] not in unread}
    told = needed & found.keys()
    differ = changes({key: row[key] for key in told}, {key: found[key] for key in told}, "data.")
    if claim:
        untold = sorted(needed - told, key=lambda key: (key != "recipe", "steps" not in key, key))
        differ.update({f"data.{key}": f"{row[key]} → cannot be told" for key in untold})
    elif dataset and name != "parallel" and not found:
        differ["data.recipe"] = f"{name} → cannot be told: there is no manifest.json"
    return differ


def _text_facts(said: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of bilingual text in a data section, of a recipe or in a manifest."""
    facts = {key: said[key] for key in _TEXT if key in said}
    if facts:
        flags = said.get("flags") or {}
        fraction = said.get("train_fraction") or 1
        facts["flags"] = {key: flags[key] for key in flags if key != "workers"}
        facts["codes"] = said.get("codes")
        if fraction == 1:
            facts["train_fraction"] = fraction
        else:
            facts["train_fraction"] = [fraction, said.get("train_fraction_seed", 1)]
    return facts


def differences(published: Recipe, done: Mapping[str, Any], data: Mapping[str, str]) -> list[str]:
    """Differences between a run and the row of a paper; none if it reproduces the row.

    Args:
        published: the recipe as in its file.
        done: the run's settings, see `settings_made`.
        data: see `data_differences`.

    Returns:
        'key: row → run' for each difference.
    """
    return [f"{key}: {what}" for key, what in {**data, **changes(settings(published), done)}.items()]


def maker(folder: Path, recipe: Recipe, checkpoints: Path | None = None) -> dict[str, Any]:
    """The provenance of a run: of its training or, for a model that is only evaluated, of the evaluation.

    Args:
        folder: the run's.
        recipe: determines which.
        checkpoints: of an unfinished training.

    Returns:
        The record by `provenance`, for all sessions together; {} if an earlier version made the run.
    """
    name = "train"
    if recipe.finetune == "noft" and recipe.subsets:
        kind = "generate" if recipe.generate else "score"
        name = f"{kind}-{recipe.subsets[0]}"
    return combined(made_by_of(marks(folder).get(name, {}), checkpoints))


def record(run: Run, started: float) -> Path | None:
    """Write result.json if the run scores, and its speed if requested.

    Args:
        run: with finished steps.
        started: start time, as time.time().

    Returns:
        result.json; None if nothing was scored.

    Raises:
        UserError: for damaged scores or a damaged log.
    """
    recipe = run.recipe
    folder = run.folder
    options = run.options
    summary = summarise(folder / "train.jsonl")
    known = marks(folder)
    trained: dict[str, Any] = known.get("train", {}).get("facts") or {}
    made_by = maker(folder, recipe)
    hardware = made_by.get("hardware", trained.get("hardware"))  # of an earlier version
    if options.stage == "train" and options.record:
        from moa_fairseq.experiments.recipes.planner import workload

        row = {
            "experiment": recipe.experiment,
            "hardware": hardware,
            "precision": made_by.get("precision"),
            "tokens_per_second": summary["tokens_per_second"],
            "macs_per_target_token": round(workload(recipe, run.prepared.folder).macs_per_target_token),
            "parameters": trained.get("parameters"),
            **{key: made_by.get(key) for key in ("max_tokens", "update_freq")},
            "updates": summary["updates"],
            **{key: made_by.get(key) for key in _MAKER},
        }
        write_json(options.record, row)
        log.info("speed recorded as %s", options.record)
    scored = [step for step in steps(run) if step.name.startswith("score-")]
    if not options.wants("score") or not scored:
        return None
    outputs = {step.name.removeprefix("score-"): step.output for step in scored}
    folder_of_data = run.prepared.folder
    scores = {name: scores_in(path, recipe, folder_of_data, name) for name, path in outputs.items()}
    metrics = {name: flat_metrics(values) for name, values in scores.items()}
    subset = recipe.subsets[0]
    cell = None
    done = settings_made(folder, recipe)
    found: list[str] = []
    left_out: dict[str, int] = {}
    for name in outputs:
        facts = marks(folder).get(f"generate-{name}", {}).get("facts")
        if isinstance(facts, dict) and is_number(facts.get(LEFT_OUT)):
            left_out[name] = facts[LEFT_OUT]
    headline = headline_of(recipe, options.published or recipe, scores[subset])
    if options.published and recipe.reproduces:
        data = data_differences(options.published, run.prepared.folder, run.prepared.sentences, claim=True)
        if headline != (recipe.score or Score()).headline:
            data["score.headline"] = f"{(recipe.score or Score()).headline} → {headline}"
        found = differences(options.published, done, data)
        found += [f"left out of {name}: {count:,} of its sentences" for name, count in left_out.items()]
        if found:
            cell = None
        else:
            cell = dataclasses.asdict(recipe.reproduces)
    if "valid_ppl" in summary:
        metrics[subset]["valid_ppl"] = summary.pop("valid_ppl")
    updated = 0 if recipe.finetune == "noft" else trained.get("updated")
    said = done["evaluation"]
    accuracies, zero_shot = result_in(folder, run.model)
    values = {
        "experiment": recipe.experiment,
        "reproduces": cell,
        **({"row": recipe.row} if cell and recipe.row else {}),
        **({"differences": found} if found else {}),
        "headline": headline if recipe.score else None,
        "metrics": {**metrics.pop(subset), **accuracies},
        **({"zero_shot": zero_shot} if zero_shot else {}),
        "subset": subset,
        **({LEFT_OUT: left_out} if left_out else {}),
        "other_subsets": metrics,
        "parameters": trained.get("parameters"),
        **({"updated_parameters": updated} if updated is not None else {}),
        **summary,
        "effective_batch_tokens": recipe.train.effective_batch_tokens or recipe.train.max_tokens,
        "checkpoints_averaged": done["averaged"],
        "generation": {key: said.get(key) for key in ("beam", "lenpen")} if recipe.generate else None,
        "evaluation": scores[subset].get("meta", {}).get("evaluation"),
        "seed": recipe.train.seed,
        "hardware": hardware,
        **{key: made_by.get(key) for key in _MAKER},
        "commits": {
            step.name: combined(made_by_of(known.get(step.name, {}))).get("commit") for step in steps(run)
        },
    }
    result = folder / "result.json"
    write_json(result, values)
    if cell and is_number(cell["value"]):
        paper = cell["value"]
    else:
        paper = None
    log.info("%s: %s (%.0f s)", result, describe(headline, scores, paper), time.time() - started)
    return result
