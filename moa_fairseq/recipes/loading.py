"""A recipe file becomes a checked Recipe: YAML, `base:`, `--set key=value`, and rules that tie keys."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import reprlib
import typing
from pathlib import Path
from typing import Any, Collection, Dict, Iterator, Mapping, NoReturn, Sequence, Tuple, Type, TypeVar, Union

import yaml
from omegaconf import OmegaConf, SCMode
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.errors import UserError
from moa_fairseq.files import shipped
from moa_fairseq.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    DATA_RECIPES,
    FINETUNING,
    HEADLINE_METRICS,
    KINDS,
    MASKED_LM,
    PRECISIONS,
    TRANSLATION,
    Generate,
    Model,
    Recipe,
    Train,
)
from moa_fairseq.running.command_line import unsafe_value

T = TypeVar("T")
Problems = Iterator[Tuple[str, str]]  # of key and problem
# Besides its own errors PyYAML lets through whatever a value raises that does not fit its tag
# (`!!bool maybe`), and Python's for text that is nested too deeply, and for numbers of some thousand digits.
_ODD = (yaml.YAMLError, OmegaConfBaseException, ValueError, LookupError, TypeError, AttributeError)
_NOT_YAML = (*_ODD, RecursionError, OverflowError)
_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
# Models that are scored straight from their checkpoints: the beginning of their headline metrics, their name.
_SCORED = {
    MASKED_LM: ("masked_lm_", "a masked language model"),
    CAUSAL_LM: ("lm_", "a causal language model"),
    CLASSIFICATION: ("accuracy", "a classifier"),
}
# What no section may set: recipes are passed on, and the reader of one expects its run folder to be written.
REFUSED = (
    *("post-save-script", "use-plasma-view", "plasma-path"),
    *("log-file", "results-path", "save-predictions", "checkpoint-suffix", "aim-repo"),
)
# What the runner sets itself, and for whole sections: what their keys say.
OWN = (
    *("user-dir", "save-dir", "destdir", "path", "gen-subset", "subset", "data", "json", "masked-lm"),
    *("classifier", "cpu", "log-format", "no-progress-bar", "update-freq", "fp16", "bf16", "amp"),
    *("device-id", "joined-dictionary", "source-lang", "target-lang"),
    *(f"distributed-{x}" for x in ("world-size", "rank", "init-method", "port", "no-spawn", "num-procs")),
)
_KEYS = {"model": (Model, Train), "train": (Model, Train), "generate": (Generate,)}
_INSTEAD = {
    **dict.fromkeys(("fp16", "bf16", "amp"), "say train.precision"),
    "update-freq": "it follows from train.effective_batch_tokens",
    "gen-subset": "say generate.subsets",
    "subset": "say score.subsets",
}
LARGEST = 2**63 - 1  # what fits into the whole numbers of torch
SECTIONS = ("data", "model", "train", "generate", "score")
FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
FILE_NAME = re.compile(r"\w[\w.-]*")  # what stands in the names of files: a language, a subset


def load_recipe(path: Union[str, Path], overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and check one recipe file; nothing else makes a Recipe of a file.

    path: a YAML file; its `base:` (a file beside it, or a list of them, which may have no base themselves)
    is merged under it key by key, a later base over an earlier one. overrides: `section.key=value` strings,
    the value in YAML, applied last. A null stands for a key that is not said. Raises UserError naming file
    and key.
    """
    path = Path(path)
    mapping = _read_yaml(path)
    names = mapping.pop("base", [])
    layers = []
    for name in names if isinstance(names, list) else [names]:
        inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or "\0" in name or not (path.parent / name).is_file():
            fail(str(path), "base", f"there is no file {reprlib.repr(name)} beside it.")
        layers.append(_read_yaml(path.parent / name))
        if "base" in layers[-1]:
            fail(str(path), "base", f"{path.parent / name} has a base itself; only one level is allowed.")
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UserError(f"--set {text}: write section.key=value, for example --set train.max_epoch=5.")
    try:
        said: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)), resolve=False)
    except _NOT_YAML as error:
        raise UserError(f"--set {' '.join(overrides)[:300]} is not valid YAML.") from error
    file = " --set ".join([f"{path} with" if overrides else str(path), *overrides])[:500]
    recipe = _built(Recipe, [*layers, mapping, said], file)
    if recipe.experiment != path.stem:
        given = reprlib.repr(recipe.experiment)
        fail(file, "experiment", f"must be the file's own name, {path.stem!r}, not {given}.")
    row, cell = FINETUNING.get(recipe.finetune or ""), recipe.reproduces
    if cell and row and cell.row != row:  # each method of fine-tuning has its own; the file names one
        recipe = dataclasses.replace(recipe, reproduces=dataclasses.replace(cell, row=row, value=None))
    for rule in (_values, _average, _kind, _flags):
        for key, problem in rule(recipe):
            fail(file, key, problem)
    return recipe


def find_recipe(path: Path) -> Path:
    """The file itself where there is one, else the shipped recipe of that name: NAME or configs/NAME.yaml."""
    named = shipped("configs") / f"{path.stem}.yaml"
    bare = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml")
    return named if bare and not path.is_file() and named.is_file() else path


def build(cls: Type[T], mapping: Any, file: str, prefix: str = "") -> T:
    """Make dataclass `cls` from a mapping. Raises UserError for unknown, missing or ill-typed keys."""
    if not isinstance(mapping, dict):
        fail(file, prefix or "the file", f"must be a mapping of keys to values, not {reprlib.repr(mapping)}.")
    return _built(cls, [mapping], file, f"{prefix}." if prefix else "")


def _built(cls: Type[T], layers: Sequence[Mapping[str, Any]], file: str, dot: str = "") -> T:
    config = OmegaConf.structured(cls)
    OmegaConf.set_readonly(config, False)
    try:
        for layer in layers:
            for key, value in layer.items():  # one by one, so that an error knows its key
                where = f"{dot}{key}"[:100]
                config = OmegaConf.merge(config, {key: value})
        plain = OmegaConf.to_container(config, resolve=False, structured_config_mode=SCMode.DICT)
        missing = sorted(OmegaConf.missing_keys(config))
    except ConfigKeyError as error:
        known = typing.get_type_hints(error.object_type or cls)
        name = f"{dot}{error.full_key}"
        fail(file, name, f"unknown key{did_you_mean(str(error.key)[:100], known)}.")
    except OmegaConfBaseException as error:
        holder: Any = error.object_type or cls
        kind: Any = typing.get_type_hints(holder).get(str(error.key)) if error.full_key else None
        kind = next((part for part in typing.get_args(kind) or [kind] if part in _IN_WORDS), kind)
        wanted = _IN_WORDS.get(typing.get_origin(kind) or kind, "")
        why = f"must be {wanted}. " if wanted else ""
        fail(
            file,
            f"{dot}{error.full_key}" if error.full_key else where,
            why + str(error.msg).partition("\n")[0][:200],
        )
    except _NOT_YAML as error:
        fail(file, where, f"cannot be used: {str(error).partition(chr(10))[0][:200]}.")
    if missing:
        fail(file, f"{dot}{missing[0]}", "is missing.")
    return _objects(cls, plain)


def _objects(kind: Any, value: Any) -> Any:
    """The dataclasses that plain values stand for."""
    if typing.get_origin(kind) is Union:
        kind = typing.get_args(kind)[0]
    if value is None or not dataclasses.is_dataclass(kind):
        return value
    types = typing.get_type_hints(kind)
    return kind(**{name: _objects(types[name], inner) for name, inner in value.items()})  # type: ignore[operator]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """' (did you mean x?)' for the nearest known names, else the list of them."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else f" (known: {', '.join(sorted(known))[:300]})"


def _read_yaml(path: Path) -> Dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(token, (yaml.AnchorToken, yaml.AliasToken)) for token in yaml.scan(text)):
            raise UserError(f"{path} uses `&` or `*`: write out what they stand for.")
        mapping: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except FileNotFoundError:
        near = sorted({p.stem for folder in (path.parent, shipped("configs")) for p in folder.glob("*.yaml")})
        hint = did_you_mean(path.stem, near) if near else ""
        raise UserError(f"There is no recipe file {path}{hint}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the recipe file {path}: {error}.") from error
    except _NOT_YAML as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:500]}") from error
    if not isinstance(mapping, dict) or text.lstrip()[:1] in ("", "-"):
        raise UserError(f"{path} must hold a mapping of keys to values.")
    return mapping


def fail(file: str, key: str, problem: str) -> NoReturn:
    """Raise the UserError for one key of one file."""
    raise UserError(f"{file}: {key if len(key) <= 100 else key[:97] + '...'}: {problem}")


def reserved(section: str, flag: str) -> str:
    """Why a section's free flags must not hold this one; "" if they may."""
    flag, key = flag.replace("_", "-"), flag.replace("-", "_")
    if flag in REFUSED:
        why = "fairseq would run a program for it, or write outside of the run folder"
        return f"{why}, which a recipe must not decide: leave it out."
    owner = next((kind for kind in _KEYS.get(section, ()) if key in kind.__dataclass_fields__), None)
    instead = f"say {owner.__name__.lower()}.{key}" if owner else "the runner sets it"
    free = flag not in OWN and not owner
    return "" if free else f"is not a free flag; {_INSTEAD.get(flag, instead)}."


def _values(recipe: Recipe) -> Problems:
    data, train, model, score = recipe.data, recipe.train, recipe.model, recipe.score
    for key, value, allowed in (
        ("data.recipe", data.recipe, DATA_RECIPES),
        ("train.precision", train.precision, PRECISIONS),
        ("score.headline", score.headline if score else None, (*HEADLINE_METRICS, None)),
    ):
        if value not in allowed:
            yield key, f"{reprlib.repr(value)} is not one of {', '.join(c for c in allowed if c)}."
    if not re.fullmatch(r"[a-z0-9_]+", recipe.experiment):
        yield "experiment", "use lower-case letters, digits and underscores only (it names folders)."
    for section in ("data", "model", "train", "average", "generate"):
        values = getattr(recipe, section)
        for name, value in vars(values).items() if values else ():
            if isinstance(value, int) and not isinstance(value, bool):
                if abs(value) > LARGEST:
                    yield f"{section}.{name}", f"must not be above {LARGEST:,}."
                if value < 1 and name != "seed":
                    yield f"{section}.{name}", f"must be at least 1, not {value}."
    names = [("data.source", data.source), ("data.target", data.target)]
    for section in ("generate", "score"):
        names += [(f"{section}.subsets", name) for name in getattr(getattr(recipe, section), "subsets", ())]
    for key, name in names:
        if name in ("True", "False"):
            yield key, "must be text: put it in quotes, as YAML takes no, yes, on and off for a truth value."
        if name is not None and not (isinstance(name, str) and FILE_NAME.fullmatch(name)):
            said = reprlib.repr(name)
            yield key, f"{said} is not a name: use letters, digits, '_', '-' and '.' (files bear it)."
    if model.share_all_embeddings and not data.joined_dictionary:
        remedy = "set data.joined_dictionary: true, or model.share_all_embeddings: false."
        why = f"one embedding for both languages needs one dictionary for both: {remedy}"
        yield "model.share_all_embeddings", why
    if data.bpe and data.codes:
        yield "data.codes", "the merges are learned (data.bpe) or given (data.codes), not both."
    if data.train_fraction is not None and not 0 < data.train_fraction <= 1:
        yield "data.train_fraction", f"must lie above 0 and not above 1, not {data.train_fraction}."
    if train.max_epoch is None and train.max_update is None:
        yield "train.max_epoch", "is missing: say max_epoch or max_update, or training never ends."
    if recipe.generate and not recipe.generate.subsets:
        yield "generate.subsets", "is empty: name at least one subset, such as [test]."


def _average(recipe: Recipe) -> Problems:
    average, train = recipe.average, recipe.train
    if average is None:
        return
    epochs, updates = average.epochs, average.updates
    if (epochs is None) == (updates is None):
        yield "average.epochs", "say either average.epochs or average.updates."
    if average.count < 2:
        remedy = "use 2 or more, or average: null to evaluate the best checkpoint."
        key = f"average.{'epochs' if epochs else 'updates'}"
        yield key, f"an average of one checkpoint is no average: {remedy}"
    cannot = f"cannot average {epochs} epochs"
    if epochs and epochs > train.keep_last_epochs:
        yield "average.epochs", f"{cannot} when train.keep_last_epochs keeps {train.keep_last_epochs}."
    if epochs and train.max_epoch and epochs > train.max_epoch:
        yield "average.epochs", f"{cannot} of the {train.max_epoch} that train.max_epoch allows."
    kept: Any = train.flags.get("keep-interval-updates", updates)
    if updates and ("save-interval-updates" not in train.flags or 0 <= kept < updates):
        needs = "needs train.flags.save-interval-updates, and keep-interval-updates must not be below"
        yield "average.updates", f"{needs} {updates}."


def _kind(recipe: Recipe) -> Problems:
    """What a translation needs and other models have no use for, and the other way round."""
    data, score, task, method = recipe.data, recipe.score, recipe.train.task, recipe.finetune
    kinds = (TRANSLATION, *KINDS)
    if not task.startswith(kinds):
        why = "is not a task of recipes: its name, also that of a task of your own, must begin with"
        known = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        yield "train.task", f"{reprlib.repr(task)} {why} {known}. Use fairseq-train for others."
    if data.recipe != "binarised" and datasets()[data.recipe].kind != recipe.kind:
        yield "data.recipe", f"{data.recipe!r} makes no data for train.task {task!r}."
    metrics, name = _SCORED.get(recipe.kind, (tuple(beginning for beginning, _ in _SCORED.values()), ""))
    if score and score.headline.startswith(metrics) != bool(name):
        yield "score.headline", f"{score.headline!r} is no score of train.task {task!r}."
    if name:
        keys = ("source", "target", "bpe", "lowercase", "codes", "train_fraction")
        unused = {f"data.{key}": getattr(data, key) for key in keys}
        for key, value in {**unused, "generate": recipe.generate}.items():
            if value:
                yield key, f"has no meaning for {name}: leave it out."
        if score and not score.subsets:
            yield "score.subsets", "is empty: name at least one subset, such as [test]."
    else:
        for key in ("source", "target"):
            if getattr(data, key) is None:
                yield f"data.{key}", "is missing: name the language, such as en."
        if data.source == data.target:
            yield "data.target", f"source and target are both {data.source!r}."
        if score and not recipe.generate:
            yield "score", "needs a generate section."
        if score and score.subsets:
            yield "score.subsets", "say generate.subsets."
    if (recipe.pretrained is None) != (method is None):
        why = "is missing: `pretrained` names the model and `finetune` says how it is fine-tuned."
        yield "finetune" if method is None else "pretrained", why
    if method is not None and method not in FINETUNING:
        yield "finetune", f"{method!r} is not one of {', '.join(FINETUNING)}."
    if method is not None and not (task.endswith("_bcd") and recipe.kind == TRANSLATION):
        yield "finetune", f"needs train.task translation_bcd, not {task}."


def _flags(recipe: Recipe) -> Problems:
    """What holds of any flag; moa_fairseq.recipes.flags asks the programs about their own."""
    free = {section: values.flags for section in SECTIONS if (values := getattr(recipe, section))}
    for section, name, value in ((s, name, value) for s in free for name, value in free[s].items()):
        key = f"{section}.flags.{name}"
        if not FLAG_NAME.fullmatch(name):
            proper = name[:100].lower().replace("_", "-").lstrip("-")
            yield key, f"write flags as on the command line, without the leading dashes: {proper}."
        if value is not None and (why := reserved(section, name)):
            yield key, why
        if name == "model-overrides":
            try:
                dictionary = isinstance(ast.literal_eval(value), dict)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                dictionary = False
            if not dictionary:
                yield key, f"{reprlib.repr(value)} is not a dictionary, such as \"{{'dropout': 0}}\"."
        path = Path(value) if isinstance(value, str) else Path("/")
        if name == "tensorboard-logdir" and (path.is_absolute() or ".." in path.parts):
            yield key, f"{reprlib.repr(value)} is not a folder inside of the run folder, such as logs."
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and abs(item) > LARGEST:
                yield key, f"must not be above {LARGEST:,}."
            if not isinstance(item, (str, int, float, type(None))):  # and bool, which is an int
                kinds = "text, a number, true, false, null or a flat list of these"
                yield key, f"a flag's value is {kinds}, not {reprlib.repr(item)}."
        if problem := unsafe_value(value):
            yield key, problem
