"""A recipe file becomes a checked Recipe: YAML, `base:`, `--set key=value`, unknown keys and wrong types."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import reprlib
import typing
from pathlib import Path
from typing import Any, Collection, Dict, Sequence, Union

import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.files import shipped
from moa_fairseq.json_files import is_number
from moa_fairseq.recipes.rules import check, fail
from moa_fairseq.recipes.schema import EXECUTION_KEYS, FINETUNING, Recipe

PathLike = Union[str, Path]

# Besides its own errors PyYAML lets through whatever a value raises that does not fit its tag (`2020-99-99`,
# which looks like a date; `!!bool maybe`), and Python's for text that is nested too deeply.
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

# What may be overridden without the run ceasing to stand for its row of the paper: where and how it runs.
FAITHFUL = (
    *(f"train.{key}" for key in (*EXECUTION_KEYS, "seed")),
    *("generate.max_tokens", "score.headline", "pretrained", "finetune"),  # each way of fine-tuning has a row
)

_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text (in quotes where it looks like a number)",
    bool: "true or false",
    dict: "a mapping",
    list: "a list of names",
}


def load_recipe(path: PathLike, overrides: Sequence[str] = (), of_a_run: bool = False) -> Recipe:
    """Read, merge and check one recipe file; nothing else makes a Recipe of a file.

    path: a YAML file; its `base:` (a file beside it, or a list of them, which may have no base themselves)
    is merged under it key by key, a later base over an earlier one; a null takes a key away. overrides:
    `section.key=value` strings, the value in YAML, applied last; with one that is not in FAITHFUL the recipe
    reproduces nothing. of_a_run: the file is recipe.yaml of a run folder, not named after its experiment.
    Raises UserError naming file and key.
    """
    try:
        return _load(Path(path), overrides, of_a_run)
    except RecursionError:
        raise UserError(
            f"{path} is nested too deeply, or holds itself: write it without `&` and `*`."
        ) from None


def _load(path: Path, overrides: Sequence[str], of_a_run: bool) -> Recipe:
    mapping = _with_base(path)
    data = mapping.get("data")
    if isinstance(mapping.get("reproduces"), dict) and isinstance(data, dict):
        mapping["reproduces"].setdefault("data", data.get("recipe"))
    for text in overrides:
        _override(mapping, text)
    file = " --set ".join([f"{path} with" if overrides else str(path), *overrides])
    if not of_a_run and mapping.get("experiment") != path.stem:
        given = reprlib.repr(mapping.get("experiment"))
        fail(file, "experiment", f"must be the file's own name, {path.stem!r}, not {given}.")
    recipe = build(Recipe, mapping, file)
    row, cell = FINETUNING.get(recipe.finetune or ""), recipe.reproduces
    if cell and row and cell.row != row:  # each method of fine-tuning has its own; the file names one
        recipe = dataclasses.replace(recipe, reproduces=dataclasses.replace(cell, row=row, value=None))
    if not all(_is_faithful(text.partition("=")[0].strip(), recipe) for text in overrides):
        recipe = dataclasses.replace(recipe, reproduces=None)  # another experiment than the row stands for
    check(recipe, file)
    return recipe


def find_recipe(path: Path) -> Path:
    """The file itself where there is one, else the shipped recipe of that name: NAME or configs/NAME.yaml."""
    named = shipped("configs") / f"{path.stem}.yaml"
    bare = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml")
    return named if bare and not path.is_file() and named.is_file() else path


def deep_merge(base: Dict[str, Any], over: Dict[str, Any]) -> Dict[str, Any]:
    """`over` laid on `base`: mappings merge key by key, anything else replaces, None takes the key away."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = deep_merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def build(cls: type, mapping: Any, file: str, prefix: str = "") -> Any:
    """Make dataclass `cls` from a mapping. Raises UserError for unknown, missing or ill-typed keys."""
    if not isinstance(mapping, dict):
        fail(file, prefix or "the file", f"must be a mapping of keys to values, not {reprlib.repr(mapping)}.")
    dot, types = f"{prefix}." if prefix else "", typing.get_type_hints(cls)
    for key in mapping:
        if key not in types:
            fail(file, f"{dot}{key}", f"unknown key{_did_you_mean(str(key)[:100], types)}.")
    for field in dataclasses.fields(cls):
        if field.name not in mapping and field.default is field.default_factory is dataclasses.MISSING:
            fail(file, f"{dot}{field.name}", "is missing.")
    return cls(
        **{name: _convert(types[name], value, file, f"{dot}{name}") for name, value in mapping.items()}
    )


def _convert(kind: Any, value: Any, file: str, key: str) -> Any:
    """The value as `kind` wants it: a dataclass, or (Optional) text, number, truth, mapping or list."""
    if typing.get_origin(kind) is Union:
        kind = typing.get_args(kind)[0]
        if value is None or (value == "none" and kind is not str):
            return None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return build(kind, value, file, key)
    if kind is float and isinstance(value, str):  # YAML takes 1e-1 for text
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is float and is_number(value):
        return float(value)
    plain = typing.get_origin(kind) or kind
    good = type(value) is plain and plain is not float
    if not good or (plain is list and not all(isinstance(item, str) for item in value)):
        fail(file, key, f"must be {_IN_WORDS[plain]}, not {reprlib.repr(value)}.")
    return value


def _did_you_mean(name: str, known: Collection[str]) -> str:
    """' (did you mean x?)' for the nearest known names, else the list of them."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(near)}?)" if near else f" (known: {', '.join(sorted(known))})"


def _with_base(path: Path) -> Dict[str, Any]:
    mapping = _read_yaml(path)
    names = mapping.pop("base", [])
    merged: Dict[str, Any] = {}
    for name in names if isinstance(names, list) else [names]:
        inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (path.parent / name).is_file():
            fail(str(path), "base", f"there is no file {reprlib.repr(name)} beside it.")
        base = _read_yaml(path.parent / name)
        if "base" in base:
            fail(str(path), "base", f"{path.parent / name} has a base itself; only one level is allowed.")
        merged = deep_merge(merged, base)
    return deep_merge(merged, mapping) if names else mapping


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key said twice, where YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict[Any, Any]:
        names = collections.Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                what = f"key {reprlib.repr(name)} stands twice"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Dict[str, Any]:
    try:
        mapping = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        near = sorted({p.stem for folder in (path.parent, shipped("configs")) for p in folder.glob("*.yaml")})
        hint = _did_you_mean(path.stem, near) if near else ""
        raise UserError(f"There is no recipe file {path}{hint}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the recipe file {path}: {error}.") from error
    except _NOT_YAML as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:500]}") from error
    if not isinstance(mapping, dict):
        raise UserError(f"{path} must hold a mapping of keys to values.")
    return mapping


def _override(mapping: Dict[str, Any], text: str) -> None:
    """Apply one `section.key=value` to the mapping in place."""
    dotted, equals, raw = text.partition("=")
    *sections, last = dotted.strip().split(".")
    if not equals or not all([*sections, last]):
        raise UserError(f"--set {text}: write section.key=value, for example --set train.max_epoch=5.")
    try:
        value = yaml.load(raw, Loader=_StrictLoader)
    except _NOT_YAML as error:
        raise UserError(f"--set {text}: {raw!r} is not valid YAML.") from error
    for section in sections:
        if not isinstance(mapping.get(section), dict):
            mapping[section] = {}
        mapping = mapping[section]
    mapping[last] = value


def _is_faithful(key: str, recipe: Recipe) -> bool:
    """True for an overridden key that leaves the experiment the same; `recipe` has all overrides."""
    own_text = recipe.data.recipe in ("parallel", "binarised")  # the user's own copy of the same text
    if key == "data.recipe":
        return own_text
    if key == "data.bpe":  # none: the user's own text is segmented already
        return recipe.data.bpe is None and own_text
    section, _, flag = key.partition(".flags.")
    return key in FAITHFUL or (section in ("train", "model") and flag in recipe.execution_flags)
