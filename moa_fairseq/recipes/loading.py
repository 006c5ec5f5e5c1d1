"""A recipe file becomes a checked Recipe: YAML, `base:`, `--set key=value`, unknown keys and wrong types."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import reprlib
import typing
from pathlib import Path
from typing import Any, Dict, Hashable, List, Sequence, Union

import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.json_files import is_number
from moa_fairseq.recipes.execution import is_execution_flag
from moa_fairseq.recipes.rules import check, fail
from moa_fairseq.recipes.schema import FINETUNING, Recipe

PathLike = Union[str, Path]

# Besides its own errors PyYAML lets through whatever a value raises that does not fit its tag (`2020-99-99`,
# which looks like a date; `!!bool maybe`), and Python's for text that is nested too deeply.
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)

# What may be overridden without the run ceasing to stand for its row of the paper: where and how it runs.
FAITHFUL = (
    *("train.max_tokens", "train.min_tokens", "train.seed", "train.precision", "train.keep_last_epochs"),
    *("train.log_interval", "generate.max_tokens", "score.headline", "pretrained"),
)


def load_recipe(path: PathLike, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and check one recipe file.

    path: a YAML file; its `base:` (a file beside it, or a list of them, which may have no base themselves)
    is merged under it key by key, a later base over an earlier one; a null takes a key away. overrides:
    `section.key=value` strings, the value in YAML, applied last; with one that is not in FAITHFUL the recipe
    reproduces nothing. Raises UserError naming file and key.
    """
    try:
        return _load(Path(path), overrides)
    except RecursionError:
        raise UserError(
            f"{path} is nested too deeply, or holds itself: write it without `&` and `*`."
        ) from None


def _load(path: Path, overrides: Sequence[str]) -> Recipe:
    mapping = _with_base(path)
    file = str(path)
    if mapping.get("experiment") != path.stem:
        given = reprlib.repr(mapping.get("experiment"))
        fail(file, "experiment", f"must be the file's own name, {path.stem!r}, not {given}.")
    if isinstance(mapping.get("reproduces"), dict) and isinstance(mapping.get("data"), dict):
        mapping["reproduces"].setdefault("data", mapping["data"].get("recipe"))
    for text in overrides:
        _override(mapping, text)
    if overrides:
        file += f" with --set {' --set '.join(overrides)}"
    recipe = build(Recipe, mapping, file, "")
    row = FINETUNING.get(recipe.finetune)
    cell = recipe.reproduces
    if cell and row and cell.row != row:  # each method of fine-tuning has its own; the file names one
        recipe = dataclasses.replace(recipe, reproduces=dataclasses.replace(cell, row=row, value=None))
    if not all(_is_faithful(text.partition("=")[0].strip(), recipe) for text in overrides):
        recipe = dataclasses.replace(recipe, reproduces=None)  # another experiment than the row stands for
    check(recipe, file)
    return recipe


def deep_merge(base: Dict[str, Any], over: Dict[str, Any]) -> Dict[str, Any]:
    """`over` laid on `base`: mappings merge key by key, anything else replaces, None takes the key away."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = deep_merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def build(cls: type, mapping: Any, file: str, prefix: str) -> Any:
    """Make dataclass `cls` from a mapping. Raises UserError for unknown, missing or ill-typed keys."""
    if not isinstance(mapping, dict):
        fail(file, prefix or "the file", f"must be a mapping of keys to values, not {reprlib.repr(mapping)}.")
    types = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in mapping:
        if key not in fields:
            fail(file, _join(prefix, key), f"unknown key{did_you_mean(str(key)[:100], fields)}.")
    values = {}
    for name, field in fields.items():
        if name in mapping:
            values[name] = _convert(types[name], mapping[name], file, _join(prefix, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            fail(file, _join(prefix, name), "is missing.")
    return cls(**values)


def did_you_mean(name: str, known: Any) -> str:
    """' (did you mean x?)' for the nearest known names, else the list of them."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
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
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # which the constructor refuses
            if key in seen:
                what = f"key {reprlib.repr(key)} stands twice"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.stem for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise UserError(
            f"There is no recipe file {path}{did_you_mean(path.stem, near) if near else ''}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the recipe file {path}: {error}.") from error
    try:
        mapping = yaml.load(text, Loader=_StrictLoader)
    except _NOT_YAML as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())[:500]}") from error
    if not isinstance(mapping, dict):
        raise UserError(f"{path} must hold a mapping of keys to values.")
    return mapping


def _override(mapping: Dict[str, Any], text: str) -> None:
    """Apply one `section.key=value` to the mapping in place."""
    dotted, equals, raw = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"--set {text}: write section.key=value, for example --set train.max_epoch=5.")
    try:
        value = yaml.load(raw, Loader=_StrictLoader)
    except _NOT_YAML as error:
        raise UserError(f"--set {text}: {raw!r} is not valid YAML.") from error
    _check_key(keys, text)
    for key in keys[:-1]:
        if not isinstance(mapping.get(key), dict):
            mapping[key] = {}
        mapping = mapping[key]
    mapping[keys[-1]] = value


def _is_faithful(key: str, recipe: Recipe) -> bool:
    """True for an overridden key that leaves the experiment the same; `recipe` has all overrides."""
    if key == "finetune":  # the row follows
        return True
    own_text = recipe.data.recipe in ("parallel", "binarised")
    if key == "data.recipe":  # the user's own copy of the same text
        return own_text
    if key == "data.bpe":  # none: the user's own text is segmented already
        return recipe.data.bpe is None and own_text
    averages_updates = bool(recipe.average and recipe.average.updates)
    return key in FAITHFUL or is_execution_flag(key, averages_updates)


def _check_key(keys: List[str], text: str) -> None:
    """Refuse an override of a key that no recipe has; below `flags`, fairseq judges later."""
    cls: Any = Recipe
    for depth, key in enumerate(keys):
        types = typing.get_type_hints(cls)
        if key not in types or keys == ["experiment"]:
            raise UserError(
                f"--set {text}: unknown key {'.'.join(keys[: depth + 1])}{did_you_mean(key, types)}."
            )
        cls = _plain(types[key])
        if not dataclasses.is_dataclass(cls):
            if depth + 1 < len(keys) and key != "flags":
                raise UserError(
                    f"--set {text}: {'.'.join(keys[: depth + 1])} is a plain value, not a section."
                )
            return


def _plain(kind: Any) -> Any:
    """X for Optional[X], else the type itself."""
    inner = [k for k in typing.get_args(kind) if k is not type(None)]
    return inner[0] if typing.get_origin(kind) is Union else kind


def _convert(kind: Any, value: Any, file: str, key: str) -> Any:
    optional = typing.get_origin(kind) is Union
    kind = _plain(kind)
    if optional and (value is None or (value == "none" and kind is not str)):
        return None
    if dataclasses.is_dataclass(kind):
        return build(kind, value, file, key)
    if typing.get_origin(kind) is dict:
        return dict(value) if isinstance(value, dict) else _wrong(file, key, "a mapping", value)
    if typing.get_origin(kind) is list:
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return list(value) if good else _wrong(file, key, "a list of names", value)
    if kind is float and isinstance(value, str):  # YAML takes 1e-1 for text
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is float and is_number(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    names = {
        int: "a whole number",
        float: "a number",
        str: "text (in quotes where it looks like a number)",
        bool: "true or false",
    }
    return _wrong(file, key, names[kind], value)


def _wrong(file: str, key: str, expected: str, value: Any) -> None:
    fail(file, key, f"must be {expected}, not {reprlib.repr(value)}.")


def _join(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)
