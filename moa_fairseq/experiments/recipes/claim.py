"""Whether a run reproduces its row of a paper: with the row's settings, on the row's data.

A recipe has `requested_settings`, and a run has `finished_settings`.
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


def requested_settings(recipe: Recipe) -> Values:
    """The settings that a recipe asks for, but for the keys in _FREE."""
    section = recipe.generate or recipe.score
    training = _training_settings(
        recipe.training_inputs,
        recipe.goal,
        averaged=recipe.average.count if recipe.average else 1,
        interval=recipe.averaged_interval,
    )
    return training | {
        "evaluation": _without(dataclasses.asdict(section), *_FREE) if section else {},
        "scoring": _without(recipe.score.flags, "also") if recipe.generate and recipe.score else {},
    }


def upgrade_training(entry: Values) -> Values:
    """Move what earlier versions counted among a training's inputs to its facts and its goal.

    Args:
        entry: the training's entry in state.json, in which a damaged file has values of any type.

    Returns:
        The entry in today's form.
    """
    if not isinstance(entry.get("inputs"), dict):
        return dict(entry)
    inputs = dict(entry["inputs"])
    facts = _mapping(entry.get("facts"))
    goal: Values = {}
    for name in ("model", "train"):
        section = _mapping(inputs.get(name))
        if flags := _mapping(section.get("flags")):
            inputs[name] = section | {"flags": computation_flags(flags)}
            goal |= {key: flags[key] for key in STOP_FLAGS if flags.get(key) is not None}
            if INTERVAL in flags:
                facts.setdefault(INTERVAL, flags[INTERVAL])
    return dict(entry, inputs=inputs, facts=facts, goal=goal | _mapping(entry.get("goal")))


def _mapping(value: Any) -> Values:
    """A copy of a mapping; {} for any other value, of a damaged file."""
    return dict(value) if isinstance(value, dict) else {}


def finished_settings(folder: Path, recipe: Recipe) -> Values:
    """The settings that the finished steps of a run recorded, but for the keys in _FREE.

    Args:
        folder: the run folder, with state.json.
        recipe: the recipe; its type of evaluation, its subsets and its fine-tuning are read.

    Returns:
        The settings; for a damaged state.json a value that no recipe has.
    """
    records = read_step_records(folder)
    train = upgrade_training(records.get("train", {}))
    try:
        return _recorded_settings(records, train, recipe)
    except (AttributeError, KeyError, IndexError, TypeError):  # a damaged state.json
        return {"averaged": None, "evaluation": {}, "state.json": "damaged"}


def _recorded_settings(records: Values, train: Values, recipe: Recipe) -> Values:
    """See `finished_settings`.

    Damaged records raise an AttributeError, KeyError, IndexError or TypeError.
    """
    kind = "generate" if recipe.generate else "score"
    inputs = records[f"{kind}-{recipe.subsets[0]}"]["inputs"]
    evaluation = {"evaluation": _without(inputs["settings"], *_FREE), "scoring": {}}
    if recipe.generate and recipe.score:
        score = records[f"score-{recipe.subsets[0]}"]["inputs"]
        evaluation["scoring"] = _without(score["settings"]["flags"], "also")
    if recipe.finetune == "noft":  # nothing is trained
        return requested_settings(recipe) | evaluation
    model = inputs["made"][0]  # the fingerprint of the step that made the evaluated model
    averaged = 1
    interval = None
    average = records.get("average", {})
    if model is not None and model == average.get("fingerprint"):
        model = average["inputs"]["train"][0]
        averaged = average["inputs"]["count"]
        first_file = average["inputs"]["checkpoints"][0][0]
        if first_file.startswith("checkpoint_"):  # by updates; that of an epoch is checkpoint<N>.pt
            interval = train["facts"].get(INTERVAL)
    is_finished = model is not None and model == train.get("fingerprint")
    trained = train["inputs"] if is_finished else {}
    return _training_settings(trained, train.get("goal", {}), averaged, interval) | evaluation


def _training_settings(inputs: Values, goal: Values, averaged: int, interval: int | None) -> Values:
    """The settings of a training and its average.

    Args:
        inputs: the training's inputs; {} if no finished training made the model.
        goal: the end of the training.
        averaged: the number of averaged checkpoints.
        interval: the number of updates between two of them; None for epochs.
    """
    values: Values = {}
    if inputs:
        values["model"] = inputs["model"]
        values["train"] = _without(inputs["train"], *_FREE) | goal
    values["averaged"] = averaged
    if interval:
        values["averaged_every"] = interval
    return values


def _without(values: Values, *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}


def data_differences(
    recipe: Recipe, folder: Path, line_counts: Mapping[str, int], claim: bool = False
) -> dict[str, str]:
    """Differences between the data that a recipe requires and binarised data, as far as both are known.

    Args:
        recipe: the recipe.
        folder: the binarised folder, with its manifest.json in it or next to it.
        line_counts: subset → number of lines.
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
    actual = _manifest_facts(manifest, recipe.kind, line_counts)
    if claim:
        # A damaged manifest proves nothing
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            for file, sums in manifest.get("published", {}).items():
                expected[f"md5 of {file}"] = sums["published"]
                actual[f"md5 of {file}"] = sums["md5"]
    unused = set(dataset.subsets if dataset else ()) - set(recipe.splits)
    for key in list(expected):
        if key.rpartition(" of ")[2] in unused:
            del expected[key]
    common = expected.keys() & actual.keys()
    deviations = changes(selected(expected, common), selected(actual, common), "data.")
    if claim:
        # The recipe first, then the steps
        unknown = sorted(
            expected.keys() - common, key=lambda key: (key != "recipe", "steps" not in key, key)
        )
        for key in unknown:
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


def _manifest_facts(manifest: Values, kind: str, line_counts: Mapping[str, int]) -> Values:
    """The properties that a manifest and the numbers of lines prove."""
    section = _mapping(manifest.get("settings"))
    facts: Values = {}
    name = manifest.get("dataset", section.get("recipe", manifest.get("recipe")))
    if name is not None:
        facts["recipe"] = name
    if kind == TRANSLATION:
        facts.update(_text_facts(section))
    for key in ("tokens", "generated"):
        if key in section:
            facts[key] = section[key]
    for split, number in line_counts.items():
        facts[f"lines of {split}"] = number
    # A damaged manifest proves nothing
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        for split, steps_of_split in manifest.get("steps", {}).items():
            facts[f"steps of {split}"] = steps_of_split
        for split, fact in manifest.get("splits", {}).items():
            # The end of a line counts as a word
            facts[f"words of {split}"] = fact["words"] + fact["lines"]
    return facts


def _text_facts(section: Values) -> Values:
    """The properties of bilingual text in a data section, of a recipe or in a manifest."""
    facts = {key: section[key] for key in _TEXT if key in section}
    if facts:
        fraction = section.get("train_fraction") or 1
        seed = section.get("train_fraction_seed", 1)
        facts["flags"] = _without(_mapping(section.get("flags")), "workers")
        facts["codes"] = section.get("codes")
        facts["train_fraction"] = 1 if fraction == 1 else [fraction, seed]
    return facts


def differences(published: Recipe, run_settings: Values, data: Mapping[str, str]) -> list[str]:
    """Differences between a run and the row of a paper; none if it reproduces the row.

    Args:
        published: the recipe of the file, without any --set.
        run_settings: the run's settings, see `finished_settings`.
        data: the differences of the data, see `data_differences`.

    Returns:
        'key: row → run' for each difference.
    """
    deviations = dict(data) | changes(requested_settings(published), run_settings)
    return [f"{key}: {change}" for key, change in deviations.items()]
