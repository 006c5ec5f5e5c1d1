"""Whether a run reproduces its row of a paper: with the row's settings, on the row's data.

The settings in the recipe file and those of the finished run are two dicts.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import Dataset, datasets
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.make import read_step_records
from moa_fairseq.experiments.recipes.schema import (
    INTERVAL,
    STOP_FLAGS,
    TRANSLATION,
    Recipe,
    computation_flags,
)
from moa_fairseq.experiments.records.json_files import Values, changes, selected

_FREE = ("max_tokens", "headline", "seed")  # settings that do not change the experiment
_TEXT = ("source", "target", "bpe", "joined_dictionary", "lowercase")
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


def upgrade_training(entry: Mapping[str, Any]) -> Values:
    """Move what earlier versions counted among a training's inputs to its facts and its goal.

    Args:
        entry: the training's entry in state.json, in which a damaged file has values of any type.

    Returns:
        The entry in today's form.
    """
    if not isinstance(entry.get("inputs"), dict):
        return dict(entry)
    inputs = dict(entry["inputs"])
    facts = entry.get("facts")
    facts = dict(facts) if isinstance(facts, dict) else {}
    stops: Values = {}
    for name in ("model", "train"):
        section: Any = inputs.get(name)
        flags = section.get("flags") if isinstance(section, dict) else None
        if not isinstance(flags, dict):
            continue
        inputs[name] = section | {"flags": computation_flags(flags)}
        stops.update({key: flags[key] for key in STOP_FLAGS if flags.get(key) is not None})
        if INTERVAL in flags:
            facts.setdefault(INTERVAL, flags[INTERVAL])
    goal = entry.get("goal")
    stops.update(goal if isinstance(goal, dict) else {})
    return dict(entry, inputs=inputs, facts=facts, goal=stops)


def settings_made(folder: Path, recipe: Recipe) -> Values:
    """The settings of `settings`, read from the chain of finished steps in a run folder.

    Args:
        folder: the run folder, with state.json.
        recipe: the recipe; its type of evaluation, its subsets and its fine-tuning are read.

    Returns:
        The settings; for a damaged state.json a value that no recipe has.
    """
    records = read_step_records(folder)
    train = upgrade_training(records.get("train", {}))
    try:
        return _settings_of_records(records, train, recipe)
    except (AttributeError, KeyError, IndexError, TypeError):  # a damaged state.json
        return {"averaged": None, "evaluation": {}, "state.json": "damaged"}


def _settings_of_records(
    records: Mapping[str, Any], train: Mapping[str, Any], recipe: Recipe
) -> Values:
    """The settings of `settings_made`.

    Damaged records raise an AttributeError, KeyError, IndexError or TypeError.
    """
    kind = "generate" if recipe.generate else "score"
    evaluation = records[f"{kind}-{recipe.subsets[0]}"]["inputs"]
    section = evaluation["settings"]
    scoring = {}
    if recipe.generate and recipe.score:
        scoring = records[f"score-{recipe.subsets[0]}"]["inputs"]["settings"]["flags"]
    if recipe.finetune == "noft":  # nothing is trained
        return settings(recipe) | _settings({}, {}, 1, None, section, scoring)
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
    """The settings of a training, its average and its evaluation, but for the keys in _FREE."""
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
    dataset = datasets().get(name)
    if claim and not (dataset and dataset.downloadable):
        return {"data.recipe": f"{name} → cannot be told: it is your own text, not a published one"}
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
