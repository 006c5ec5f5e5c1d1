"""The rules that connect the keys of a recipe: contradictions, values out of range, forbidden flags."""

import ast
import dataclasses
import math
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moa_fairseq.experiments.data.catalogue import LEAST_COVERAGE, Dataset, datasets
from moa_fairseq.experiments.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    FINETUNING,
    KINDS,
    LARGEST,
    MASKED_LM,
    PIECE_MODELS,
    POSITIONS,
    SECTIONS,
    SENTENCEPIECE,
    SKIP,
    TRANSLATION,
    Data,
    Generate,
    Model,
    Recipe,
    Train,
)
from moa_fairseq.process import unsafe_value

# For a kind of model without translations, the beginning of its headline metrics, and its name in messages.
_SCORED = {
    MASKED_LM: ("masked_lm_", "a masked language model"),
    CAUSAL_LM: ("lm_", "a causal language model"),
    CLASSIFICATION: ("accuracy", "a classifier"),
}
# Forbidden in all sections: recipes are shared, and their users expect them to write only the run folder.
REFUSED = (
    "post-save-script", "use-plasma-view", "plasma-path", "log-file", "results-path",
    "save-predictions", "checkpoint-suffix", "aim-repo",
)  # fmt: skip
# Flags that the runner sets itself
SET_BY_RUNNER = (
    "user-dir", "save-dir", "destdir", "path", "gen-subset", "subset", "data", "json", "masked-lm",
    "classifier", "cpu", "log-format", "no-progress-bar", "update-freq", "fp16", "bf16", "amp",
    "device-id", "joined-dictionary", "source-lang", "target-lang", "distributed-world-size",
    "distributed-rank", "distributed-init-method", "distributed-port", "distributed-no-spawn",
    "distributed-num-procs",
)  # fmt: skip
# What to do in place of setting such a flag
_INSTEAD = dict.fromkeys(("fp16", "bf16", "amp"), "set train.precision") | {
    "update-freq": "it follows from train.effective_batch_tokens",
    "gen-subset": "set generate.subsets",
    "subset": "set score.subsets",
}
# Section → the dataclasses whose keys may not be flags in this section
_OWNERS: dict[str, tuple[Any, ...]] = {
    "model": (Model, Train),
    "train": (Model, Train),
    "generate": (Generate,),
}
# With these flags an evaluation reads only a part of the subset, or of its sentences. A translation may have
# the first flag: its result gives the number of skipped sentences.
PARTIAL_EVALUATION = (SKIP, "num-shards", "shard-id", "shorten-method")
FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"\w[\w.-]*")  # a part of file names: a language, a subset
Problems = Iterator[tuple[str, str]]
# Flags of fairseq-train with which no run could resume: they act at every start, or leave out checkpoints.
_REPEATED = (
    "fairseq would repeat it at every start and lose the training; to start from the weights of a model, set "
    "train.flags.finetune-from-model, which does so once"
)
_NEEDS_CHECKPOINTS = "a run resumes from its last checkpoint and evaluates saved checkpoints"
_FEWER_FILES = f"{_NEEDS_CHECKPOINTS}; for fewer files set train.flags.no-epoch-checkpoints"
PREVENTS_RESUMING = {
    "restore-file": _REPEATED,
    "reset-optimizer": f"{_REPEATED}, with a new optimizer",
    "reset-lr-scheduler": f"{_REPEATED}, with a new schedule",
    "reset-meters": _REPEATED,
    "reset-dataloader": f"{_REPEATED}, and with the first epoch",
    "optimizer-overrides": "an interrupted run would train differently from an uninterrupted run; set the "
    "values themselves, such as train.flags.lr",
    "no-save": _FEWER_FILES,
    "no-last-checkpoints": _FEWER_FILES,
    "use-sharded-state": f"{_NEEDS_CHECKPOINTS} in one file; without the flag, fairseq gathers the shards",
    "use-bmuf": "no checkpoint has its momentum, so it would be lost at every start",
}


def problems(recipe: Recipe) -> Problems:
    """Yield a (key, problem) pair for each contradiction between keys and each value that is not allowed."""
    for rule in (_values, _names, _data, _ends, _average, _kind, _zero_shot, _finetuning, _flags):
        yield from rule(recipe)


def reserved(section: str, flag: str) -> str:
    """Why the `flags` of a section must not include a flag; "" if they may.

    Args:
        section: one of SECTIONS.
        flag: the name of the flag, with dashes or underscores.
    """
    key = flag.replace("-", "_")
    flag = flag.replace("_", "-")
    if flag in REFUSED:
        reason = "with it fairseq would run a program, or write outside the run folder"
        return f"is forbidden: {reason}. Leave it out."
    if section in ("model", "train") and flag in PREVENTS_RESUMING:
        return f"prevents resuming: {PREVENTS_RESUMING[flag]}. Leave it out."
    evaluates = section in ("generate", "score")
    if evaluates and flag in PARTIAL_EVALUATION and (section, flag) != ("generate", SKIP):
        return "would limit the score to a part of the subset. Leave it out."
    if evaluates and flag in POSITIONS:
        return f"changes nothing in a trained model. Set model.flags.{flag} before the training."
    for owner in _OWNERS.get(section, ()):
        if key in owner.__dataclass_fields__:
            instead = _INSTEAD.get(flag, f"say {owner.__name__.lower()}.{key}")
            return f"is not a free flag; {instead}."
    if flag in SET_BY_RUNNER:
        return f"is not a free flag; {_INSTEAD.get(flag, 'the runner sets it')}."
    return ""


def _values(recipe: Recipe) -> Problems:
    """Check choices and the ranges of numbers."""
    if not re.fullmatch(r"[a-z0-9_]+", recipe.experiment):
        yield (
            "experiment",
            "use lower-case letters, digits and underscores only (it names folders).",
        )
    for section in (*SECTIONS, "average"):
        values = getattr(recipe, section)
        if values:
            yield from _section_values(section, values)
    if not 0 <= recipe.train.seed < 2**32:  # the range of numpy's seeds
        yield "train.seed", f"must be between 0 and {2**32 - 1:,}, not {recipe.train.seed}."


def _section_values(section: str, values: Any) -> Problems:
    """Check the choices and numbers of one section."""
    for field in dataclasses.fields(values):
        key = f"{section}.{field.name}"
        value = getattr(values, field.name)
        choices = field.metadata["choices"]
        if choices and value not in choices:
            yield key, f"{reprlib.repr(value)} is not one of {', '.join(choices)}."
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > LARGEST:
                yield key, f"must not be above {LARGEST:,}."
            if value < 1 and field.name != "seed":
                yield key, f"must be at least 1, not {value}."
        if isinstance(value, float) and not math.isfinite(value):
            yield key, f"must be a number, not {value}."


def _names(recipe: Recipe) -> Problems:
    """Check the names of languages, subsets and tasks, which are parts of file names."""
    names = [("data.source", recipe.data.source), ("data.target", recipe.data.target)]
    for section in ("generate", "score"):
        for name in getattr(getattr(recipe, section), "subsets", ()):
            names.append((f"{section}.subsets", name))
    for name in recipe.zero_shot or ():
        names.append(("zero_shot", name))
    for key, name in names:
        if name in ("True", "False"):
            yield key, "must be text. Quote it: YAML takes no, yes, on and off for truth values."
        if name is not None and not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            allowed = "Use letters, digits, '_', '-' and '.' (for file names)"
            yield key, f"{reprlib.repr(name)} is not a valid name. {allowed}."


def _data(recipe: Recipe) -> Problems:
    """Check the keys of the data section against each other and against the data set."""
    data = recipe.data
    dataset = datasets().get(data.recipe, Dataset(data.recipe, recipe.kind, ""))
    if recipe.model.share_all_embeddings and not data.joined_dictionary:
        problem = (
            "one embedding for both languages needs one dictionary for both. Set data.joined_dictionary: "
            "true, or model.share_all_embeddings: false."
        )
        yield "model.share_all_embeddings", problem
    if data.tokenize and not dataset.takes_raw:
        raw = dataset.raw or "parallel"
        problem = (
            f"{data.recipe} has no tokeniser for raw text. Use data.recipe {raw}, or leave it out."
        )
        yield "data.tokenize", problem
    yield from _pieces(data)
    if data.bpe and data.codes:
        yield "data.codes", "gives merges, but data.bpe learns them. Set only one of the two keys."
    if data.train_fraction is not None and not 0 < data.train_fraction <= 1:
        yield "data.train_fraction", f"must be above 0 and at most 1, not {data.train_fraction}."
    if data.tokens and not dataset.tokens:
        yield "data.tokens", f"data.recipe {data.recipe} is always used whole. Leave the key out."


def _pieces(data: Data) -> Problems:
    """Check SentencePiece's settings, and keys that have no effect without it."""
    if (share := data.character_coverage) is not None:
        if data.segmentation != SENTENCEPIECE and data.recipe != "text_sp":
            yield "data.character_coverage", f"needs text_sp or data.segmentation: {SENTENCEPIECE}."
        elif not LEAST_COVERAGE <= share <= 1:
            yield "data.character_coverage", f"must be between {LEAST_COVERAGE} and 1, not {share}."
    if data.segmentation != SENTENCEPIECE:
        for key, default in (("piece_model", PIECE_MODELS[0]), ("byte_fallback", True)):
            if getattr(data, key) != default:
                yield f"data.{key}", f"needs data.segmentation: {SENTENCEPIECE}. Leave it out."
    elif data.recipe not in ("parallel", "binarised"):
        problem = f"{data.recipe} has a fixed segmentation; {SENTENCEPIECE} is for parallel and binarised."
        yield "data.segmentation", problem
    elif data.recipe == "parallel" and not (data.bpe or data.codes):
        yield "data.bpe", f"is missing. {SENTENCEPIECE} needs the number of pieces, such as 8000."
    elif data.codes and not data.joined_dictionary:
        problem = "is one model for both languages. Leave data.joined_dictionary: false out."
        yield "data.codes", problem


def _ends(recipe: Recipe) -> Problems:
    """Check that the training ends, and that the evaluation has a subset."""
    if recipe.train.max_epoch is None and recipe.train.max_update is None:
        yield (
            "train.max_epoch",
            "is missing. Set it, or train.max_update, otherwise training never ends.",
        )
    if recipe.generate and not recipe.generate.subsets:
        yield "generate.subsets", "is empty. Give at least one subset, such as [test]."


def _average(recipe: Recipe) -> Problems:
    """Check that the training keeps the checkpoints of the average."""
    average = recipe.average
    train = recipe.train
    if average is None:
        return
    epochs = average.epochs
    updates = average.updates
    if (epochs is None) == (updates is None):
        yield "average.epochs", "excludes average.updates. Set only one of them."
    if average.count < 2:
        key = f"average.{'epochs' if epochs else 'updates'}"
        yield key, "one checkpoint is not an average. Use 2 or more, or average: null for the best."
    most = train.keep_last_epochs
    if epochs and epochs > most:
        problem = f"cannot average {epochs} epochs when train.keep_last_epochs keeps {most}."
        yield "average.epochs", problem
    if epochs and train.max_epoch and epochs > train.max_epoch:
        problem = (
            f"cannot average {epochs} epochs of the {train.max_epoch} that train.max_epoch allows."
        )
        yield "average.epochs", problem
    interval = train.flags.get("save-interval-updates")
    limit = train.flags.get("keep-interval-updates")
    if updates and (interval is None or (limit is not None and 0 <= limit < updates)):
        problem = (
            "needs train.flags.save-interval-updates, and keep-interval-updates must not be below "
            f"{updates}."
        )
        yield "average.updates", problem


def _kind(recipe: Recipe) -> Problems:
    """Check the keys that a translation requires and other models forbid, and the reverse."""
    data = recipe.data
    task = recipe.train.task
    tasks = (TRANSLATION, *KINDS)
    if not task.startswith(tasks):
        problem = (
            f"{reprlib.repr(task)} is not a task of recipes: its name, also that of a task of your own, must "
            f"begin with {', '.join(tasks[:-1])} or {tasks[-1]}. Use fairseq-train for others."
        )
        yield "train.task", problem
    if data.recipe != "binarised" and datasets()[data.recipe].kind != recipe.kind:
        yield "data.recipe", f"{data.recipe!r} makes no data for train.task {task!r}."
    if recipe.score:
        headline = recipe.score.headline
        kinds = [kind for kind, (metrics, _) in _SCORED.items() if headline.startswith(metrics)]
        if recipe.kind not in (kinds or [TRANSLATION]):
            yield "score.headline", f"{headline!r} is not a score of train.task {task!r}."
    if recipe.kind == TRANSLATION:
        yield from _translation(recipe)
    else:
        yield from _not_a_translation(recipe, _SCORED[recipe.kind][1])


def _zero_shot(recipe: Recipe) -> Problems:
    """Check that a causal language model has tasks, and that no other model has any."""
    if recipe.zero_shot is not None and recipe.kind != CAUSAL_LM:
        yield (
            "zero_shot",
            "is for causal language models (train.task language_modeling): leave it out.",
        )
    if recipe.zero_shot == []:
        yield "zero_shot", "is empty: name at least one task, such as [cbt], or leave it out."


def _not_a_translation(recipe: Recipe, name: str) -> Problems:
    """Check that a language model or classifier has no keys of translations; `name` is its kind in words."""
    data = recipe.data
    keys = ["source", "target", "lowercase", "tokenize", "codes", "train_fraction"]
    if data.recipe != "text_sp":
        keys.append("bpe")
    for key in keys:
        if getattr(data, key):
            yield f"data.{key}", f"has no meaning for {name}. Leave it out."
    if recipe.generate:
        yield "generate", f"has no meaning for {name}. Leave it out."
    if recipe.score and not recipe.score.subsets:
        yield "score.subsets", "is empty. Give at least one subset, such as [test]."


def _translation(recipe: Recipe) -> Problems:
    """Check the keys that a translation needs, and the sections that belong together."""
    data = recipe.data
    for key in ("source", "target"):
        if getattr(data, key) is None:
            yield f"data.{key}", "is missing. Give the language, such as en."
    if data.source == data.target:
        yield "data.target", f"source and target are both {data.source!r}."
    if recipe.score and not recipe.generate:
        yield "score", "needs a generate section."
    if recipe.score and recipe.score.subsets:
        yield "score.subsets", "has no meaning for a translation. Set generate.subsets."


def _finetuning(recipe: Recipe) -> Problems:
    """Check that `pretrained` and `finetune` occur together, and that the task allows fine-tuning."""
    task = recipe.train.task
    method = recipe.finetune
    if (recipe.pretrained is None) != (method is None):
        problem = "is missing. `pretrained` gives the model and `finetune` the fine-tuning method."
        yield "finetune" if method is None else "pretrained", problem
    if method is not None and method not in FINETUNING:
        yield "finetune", f"{method!r} is not one of {', '.join(FINETUNING)}."
    if method is not None and not (task.endswith("_bcd") and recipe.kind == TRANSLATION):
        yield "finetune", f"needs train.task translation_bcd, not {task}."


def _flags(recipe: Recipe) -> Problems:
    """Check the rules of all flags; `flags.check_flags` asks each program's parser."""
    for section in SECTIONS:
        if values := getattr(recipe, section):
            for name, value in values.flags.items():
                for problem in _flag(section, name, value):
                    yield f"{section}.flags.{name}", problem
    for name in recipe.model.flags.keys() & recipe.train.flags.keys():
        model = reprlib.repr(recipe.model.flags[name])
        train = reprlib.repr(recipe.train.flags[name])
        if model != train:
            conflict = f"is {model}, but train.flags.{name}, which has precedence, is {train}"
            yield f"model.flags.{name}", f"{conflict}. Set the flag in one of the two."


def _flag(section: str, name: str, value: Any) -> Iterator[str]:
    """Yield the problems of one flag of a section."""
    if not FLAG_NAME.fullmatch(name):
        proper = name[:100].lower().replace("_", "-").lstrip("-")
        yield f"write flags as on the command line, without the leading dashes: {proper}."
    if value is not None and (reason := reserved(section, name)):
        yield reason
    if name == "model-overrides" and value is not None and not _is_dictionary(value):
        yield f"{reprlib.repr(value)} is not a dictionary, such as \"{{'dropout': 0}}\"."
    if name == "tensorboard-logdir":
        path = Path(value if isinstance(value, str) else "/")
        if path.is_absolute() or ".." in path.parts:
            yield f"{reprlib.repr(value)} is not a folder inside the run folder, such as logs."
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and abs(item) > LARGEST:
            yield f"must not be above {LARGEST:,}."
        if isinstance(item, float) and math.isnan(item):
            yield "must be a number, not nan."
        if not isinstance(item, (str, int, float, type(None))):  # a bool is an int
            kinds = "text, a number, true, false, null or a flat list of these"
            yield f"a flag's value must be {kinds}, not {reprlib.repr(item)}."
    if problem := unsafe_value(value):
        yield problem


def _is_dictionary(value: Any) -> bool:
    """Whether a text is Python's literal of a dictionary."""
    try:
        return isinstance(ast.literal_eval(value), dict)
    # These are the exceptions that literal_eval documents
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
