"""From a recipe file to a checked Recipe: YAML, `base:` and `--set key=value`."""

import dataclasses
import itertools
import json
import reprlib
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union

import yaml
from omegaconf import OmegaConf, SCMode
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from moa_fairseq.errors import UserError, did_you_mean
from moa_fairseq.experiments.recipes.ending import missing_checkpoints
from moa_fairseq.experiments.recipes.rules import problems
from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.records.json_files import Values, read_yaml
from moa_fairseq.files import shipped

T = TypeVar("T")
# PyYAML also passes on any error of a value that does not fit its tag (`!!bool maybe`), and Python's errors
# for text that is nested too deeply and for numbers of some thousand digits.
_MISFITS = (ValueError, LookupError, TypeError, AttributeError)
_TOO_LARGE = (RecursionError, OverflowError)
_YAML_ERRORS = (yaml.YAMLError, OmegaConfBaseException, *_MISFITS, *_TOO_LARGE)
# Folders of configs/ without recipes: parts of several recipes, and studies
_OTHER_FOLDERS = ("parts", "studies")
# The most files of one recipe: a base that each of n files lists twice would be read 2^n times
MOST_LAYERS = 64
_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and check one recipe file, the only way from a file to a Recipe.

    A null means an absent key. If the values are those of one of the file's `rows`,
    `reproduces` names that row.

    Args:
        path: a YAML file. Its values replace those of its `base:`, key by key. A base is a path relative to
            the file's folder or the name of a shipped recipe; of several bases, later ones replace earlier
            ones. A base may have bases.
        overrides: `section.key=value` strings, the value in YAML, applied last.

    Raises:
        UserError: for an invalid recipe; the message names the file and the key.
    """
    path = Path(path)
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UserError(
                f"--set {text}: give section.key=value, for example --set train.max_epoch=5."
            )
    override_layers = _parse_overrides(overrides)
    layers = [*_file_layers(path), *override_layers]
    # Such as "mine.yaml", or "mine.yaml with --set train.seed=7"
    source = " --set ".join([f"{path} with" if overrides else str(path), *overrides])[:500]
    recipe = _from_layers(Recipe, layers, source)
    if recipe.reproduces:
        recipe = _with_row(recipe, layers, source)
    if any("recipe" in (layer.get("data") or ()) for layer in override_layers):
        recipe.summary += f", on other data ({recipe.data.recipe})"
    if recipe.experiment != path.stem:
        quoted = reprlib.repr(recipe.experiment)
        fail(source, "experiment", f"must be the file's own name, {path.stem!r}, not {quoted}.")
    for key, problem in itertools.chain(problems(recipe), missing_checkpoints(recipe)):
        fail(source, key, problem)
    return recipe


def _with_row(recipe: Recipe, layers: Sequence[Values], source: str) -> Recipe:
    """The recipe that names the row whose values it has, or the recipe itself.

    A row matches if its values change nothing but the printed number. If several rows match, the row with the
    most values wins, of equal ones the last.
    """
    rows = {name: row_overrides(recipe, name, cell=True, source=source) for name in recipe.rows}
    # Checks the keys and types of every row, also of those that are skipped below
    every_value = dict.fromkeys(itertools.chain.from_iterable(rows.values()))
    _merge_layers(Recipe, _parse_overrides(list(every_value)), source)
    plain = dataclasses.replace(recipe, reproduces=None)
    for name in sorted(rows, key=lambda name: len(rows[name])):
        if _surely_differs(recipe.rows[name], plain):
            continue
        cell = ["reproduces.value=null", *rows[name], f"reproduces.row={json.dumps(name)}"]
        variant = _from_layers(Recipe, [*layers, *_parse_overrides(cell)], source)
        if dataclasses.replace(variant, reproduces=None) == plain:
            recipe = variant
    return recipe


def _surely_differs(row: Values, recipe: Recipe) -> bool:
    """Whether a value of the row surely changes the recipe.

    A value of another type may become the same by conversion, and a mapping by merging. Rows that surely
    differ are not built, because that is slow.
    """
    values = dataclasses.asdict(recipe)
    for key, value in row.items():
        current: Any = values
        for name in str(key).split("."):
            current = current.get(name) if isinstance(current, dict) else None
        if not isinstance(value, dict) and type(current) is type(value) and current != value:
            return True
    return False


def _parse_overrides(overrides: Sequence[str]) -> list[Values]:
    """A mapping for each `section.key=value`: merged into one, a null would vanish under a later value."""
    mappings = []
    for text in overrides:
        try:
            mapping: Any = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
        except _YAML_ERRORS as error:
            raise UserError(f"--set {text[:300]} is not valid YAML.") from error
        mappings.append(dict(mapping))
    return mappings


def row_overrides(
    recipe: Recipe, name: str, cell: bool = False, source: str = "--row"
) -> list[str]:
    """The `section.key=value` strings that select one of a recipe's `rows`.

    Args:
        recipe: the recipe of the file.
        name: the name of the row.
        cell: True to include the values of `reproduces`, which identify the printed number.
        source: the source of the recipe, for the error.

    Raises:
        UserError: for an unknown row, and for a row that is not a mapping.
    """
    if name not in recipe.rows:
        fail(source, name, f"{recipe.experiment} has no such row{did_you_mean(name, recipe.rows)}.")
    values = recipe.rows[name]
    if not isinstance(values, dict) or not values.keys() - {"reproduces.value"}:
        fail(source, f"rows.{name}", "must be a mapping of section.key to the values that differ.")
    overrides = []
    for key, value in values.items():
        if cell or not str(key).startswith("reproduces."):
            overrides.append(f"{key}={json.dumps(value)}")
    return overrides


def _file_layers(path: Path) -> list[Values]:
    """The mappings of a recipe file's bases, the lowest first, and of the file itself."""
    layers = []  # highest first
    pending = [(path, [path.resolve()])]  # files, each with the bases that lead to it
    while pending:
        file, chain = pending.pop()
        layer, bases = _read_layer(file, is_base=len(chain) > 1)
        layers.append(layer)
        for name in bases:
            base = _find_base(name, file)
            if base.resolve() in chain:
                fail(str(file), "base", f"{base} is built on this file itself.")
            pending.append((base, [*chain, base.resolve()]))
            if len(layers) + len(pending) > MOST_LAYERS:
                problem = f"makes a recipe of more than {MOST_LAYERS} files: merge some of them."
                fail(str(file), "base", problem)
    return layers[::-1]


def _read_layer(file: Path, is_base: bool) -> tuple[Values, list[Any]]:
    """The mapping of a recipe file, and its bases as they are written."""
    mapping = read_mapping(file, "recipe")
    bases = mapping.pop("base", [])
    if is_base:  # its rows are not inherited
        mapping.pop("rows", None)
    if mapping.get("experiment") is None:  # so that the name of a base does not replace it
        mapping["experiment"] = file.stem
    if bases:  # the summaries of bases describe other experiments
        mapping.setdefault("summary", file.stem.replace("_", " "))
    return mapping, bases if isinstance(bases, list) else [bases]


def _find_base(name: Any, file: Path) -> Path:
    """The file that a recipe file names as its base."""
    if not isinstance(name, str) or "\0" in name:
        fail(str(file), "base", f"must be the path of a recipe file, not {reprlib.repr(name)}.")
    base = find_recipe(Path(name), file.parent)
    if not base.is_file():
        problem = f"{base.resolve()} is not a file, nor {name!r} a shipped recipe."
        fail(str(file), "base", problem)
    return base


def shipped_recipes() -> dict[str, Path]:
    """Name → file of every recipe of configs/, which has a folder for each data set."""
    files = shipped("configs").glob("*/*.yaml")
    return {file.stem: file for file in sorted(files) if file.parent.name not in _OTHER_FOLDERS}


def find_recipe(path: Path, folder: Path = Path()) -> Path:
    """The file itself if it exists, else the shipped recipe of that name.

    A shipped recipe is called NAME, NAME.yaml or configs/NAME.yaml; the folder of its data set may be
    included. A path within configs/, such as parts/moa_losses.yaml, also works.

    Args:
        path: the path as the user wrote it.
        folder: the folder to which a relative path is relative.
    """
    local = folder / path
    if local.is_file() or path.suffix not in ("", ".yaml"):
        return local
    configs = shipped("configs")
    if (configs / path).is_file():
        return configs / path
    recipe_file = shipped_recipes().get(path.stem, local)
    is_name = path.parent in (Path(), Path("configs"), Path("configs", recipe_file.parent.name))
    return recipe_file if is_name or local.parent.resolve() == configs else local


def build(cls: type[T], mapping: Any, source: str, key: str = "") -> T:
    """Make a dataclass from a mapping, with conversion to the types of its fields.

    Args:
        cls: a dataclass of `schema`.
        mapping: name of a field → value from YAML.
        source: the file of the mapping, for the error.
        key: the dotted key of the mapping, for the error.

    Raises:
        UserError: for unknown, missing or ill-typed keys.
    """
    if not isinstance(mapping, dict):
        quoted = reprlib.repr(mapping)
        fail(source, key or "the file", f"must be a mapping of keys to values, not {quoted}.")
    return _from_layers(cls, [mapping], source, f"{key}." if key else "")


def _from_layers(cls: type[T], layers: Sequence[Values], source: str, prefix: str = "") -> T:
    """A dataclass with the values of several mappings, of which later ones replace earlier ones.

    `prefix` is the mappings' dotted key and a dot, or "". Errors: see `build`.
    """
    config = _merge_layers(cls, layers, source, prefix)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        fail(source, f"{prefix}{missing[0]}", "is missing.")
    plain = OmegaConf.to_container(config, resolve=False, structured_config_mode=SCMode.DICT)
    return _to_dataclass(cls, plain)


def _merge_layers(cls: type, layers: Sequence[Values], source: str, prefix: str = "") -> Any:
    """The mappings as OmegaConf's form of a dataclass, which may lack values; see `_from_layers`."""
    config = OmegaConf.structured(cls)
    OmegaConf.set_readonly(config, False)
    for layer in layers:
        for key, value in layer.items():  # one by one, so that an error has its key
            _merge_value(config, cls, key, value, source, prefix)
    return config


def _merge_value(config: Any, cls: type, key: str, value: Any, source: str, prefix: str) -> None:
    """Merge one value. Raise UserError for an unknown key or an unusable value."""
    location = f"{prefix}{key}"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        text.encode()  # a lone surrogate is an error
        if "${" in text:
            fail(source, location, "`${...}` is not expanded: write the value itself.")
        config.merge_with({key: value})
    except ConfigKeyError as error:
        choices = typing.get_type_hints(error.object_type or cls)
        problem = f"unknown key{near_or_all(str(error.key)[:100], choices)}."
        fail(source, f"{prefix}{error.full_key}", problem)
    except OmegaConfBaseException as error:
        location = f"{prefix}{error.full_key}" if error.full_key else location
        fail(source, location, _expectation(error, cls) + str(error.msg).partition("\n")[0][:200])
    except _YAML_ERRORS as error:
        reason = str(error).partition("\n")[0][:200]
        fail(source, location, f"has an unusable value: {reason}.")


def _expectation(error: OmegaConfBaseException, cls: Any) -> str:
    """A sentence that names the type of a value; "" if _IN_WORDS does not have the type."""
    if not error.full_key:
        return ""
    kind = typing.get_type_hints(error.object_type or cls).get(str(error.key))
    # The types in an Optional
    parts = typing.get_args(kind) if typing.get_origin(kind) is Union else (kind,)
    for part in parts:
        words = _IN_WORDS.get(typing.get_origin(part) or part)
        if words:
            return f"must be {words}. "
    return ""


def _to_dataclass(kind: Any, value: Any) -> Any:
    """A mapping as the dataclass that its type says, also inside; any other value as it is."""
    if typing.get_origin(kind) is Union:
        kind = typing.get_args(kind)[0]
    if value is None or not dataclasses.is_dataclass(kind):
        return value
    types = typing.get_type_hints(kind)
    return kind(**{name: _to_dataclass(types[name], inner) for name, inner in value.items()})  # type: ignore[operator]


def near_or_all(name: str, choices: Collection[str]) -> str:
    """The nearest choices by `did_you_mean`, else a list of all choices."""
    return did_you_mean(name, choices) or f" (known: {', '.join(sorted(choices))[:300]})"


def read_mapping(path: Path, kind: str) -> Values:
    """The mapping in a YAML file.

    Args:
        path: the file.
        kind: the kind of file, such as "recipe", for the error.

    Raises:
        UserError: for a file that is missing or damaged, or is not a mapping.
    """
    try:
        mapping = read_yaml(
            path, "docs/recipe.yaml has every key of a recipe, docs/controls.md a study."
        )
    except FileNotFoundError:
        near = {file.stem for file in path.parent.glob("*.yaml")}
        if kind == "recipe":  # recipes are found by name in any folder
            near.update(shipped_recipes())
        hint = near_or_all(path.stem, near) if near else ""
        raise UserError(f"There is no {kind} file {path}{hint}.") from None
    if not isinstance(mapping, dict):
        raise UserError(f"{path} must be a mapping of keys to values.")
    return mapping


def fail(source: str, key: str, problem: str) -> NoReturn:
    """Raise the UserError for one key.

    Args:
        source: the file that was read, or the flag.
        key: the dotted key.
        problem: the rest of the message.

    Raises:
        UserError: always.
    """
    if len(key) > 100:
        key = f"{key[:97]}..."
    raise UserError(f"{source}: {key}: {problem}")
