"""A setting is data: what fairseq would run through `eval` is read as a literal.

fairseq keeps some settings as Python expressions (`--encoder-layers "[(512, 3)] * 20"`, `--adam-betas`) and
evaluates them when a model, a criterion or an optimizer is built. Since they come out of checkpoints, too,
a checkpoint could run any code. `literal` stands for `eval` in fairseq's modules.
"""

from __future__ import annotations

import argparse
import ast
import sys
import types
from dataclasses import is_dataclass
from typing import Any, Iterator, Mapping, Optional, Tuple

from omegaconf import DictConfig, OmegaConf

from moa_fairseq.errors import UserError

MAX_ITEMS = 10_000  # in all lists, tuples and strings together that + and * make in one setting
_CONTAINERS = (ast.List, ast.Tuple, ast.Set)
_SEQUENCES = (list, tuple, str)
_NUMBERS = (int, float)


def literal(text: Any, *_: Any) -> Any:
    """The value of a setting; in place of `eval`, whose further arguments are ignored.

    text: numbers, strings, booleans, None, lists, tuples, sets and dictionaries; sums, differences and
    products of numbers; sums and repetitions of lists, tuples and strings. Raises UserError that names the
    setting for anything else, and TypeError, as `eval` does, for anything but a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"a setting is a text, not {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, [MAX_ITEMS])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise UserError(
            f"The setting {_setting_name(text, sys._getframe(1))} is refused: {shown!r} is no plain value. "
            "fairseq would run it as Python code, and it may come from a checkpoint that somebody else "
            "made, so nothing was run. Allowed are numbers, texts, lists, tuples, dictionaries, and sums "
            "and repetitions such as [(512, 3)] * 20."
        ) from error


def _value(node: ast.expr, budget: list) -> Any:
    if isinstance(node, ast.Constant) and not isinstance(node.value, (bytes, complex, type(...))):
        return node.value
    if isinstance(node, _CONTAINERS):
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return kind(_value(item, budget) for item in node.elts)
    if isinstance(node, ast.Dict):
        keys = [key for key in node.keys if key is not None]  # None: a mapping to unpack, **other
        if len(keys) == len(node.values):
            return {_value(k, budget): _value(v, budget) for k, v in zip(keys, node.values)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, budget)
        return -value if isinstance(node.op, ast.USub) else +value
    if isinstance(node, ast.BinOp):
        return _combined(node.op, _value(node.left, budget), _value(node.right, budget), budget)
    raise ValueError(f"{type(node).__name__} is not a literal")


def _combined(operator: ast.operator, left: Any, right: Any, budget: list) -> Any:
    numbers = isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS)
    if isinstance(operator, ast.Add) and (numbers or isinstance(left, _SEQUENCES)):
        _spend(budget, 0 if numbers else len(left) + len(right))
        return left + right
    if isinstance(operator, ast.Sub) and numbers:
        return left - right
    if isinstance(operator, ast.Mult):
        if not numbers:
            sequence, times = (left, right) if isinstance(left, _SEQUENCES) else (right, left)
            if not isinstance(sequence, _SEQUENCES) or not isinstance(times, int):
                raise ValueError("only a list, a tuple or a text is repeated")
            _spend(budget, len(sequence) * max(times, 0))
        return left * right
    raise ValueError(f"{type(operator).__name__} is not allowed")


def _spend(budget: list, items: int) -> None:
    budget[0] -= items
    if budget[0] < 0:
        raise ValueError(f"more than {MAX_ITEMS} items")


def _setting_name(text: str, frame: Optional[types.FrameType]) -> str:
    """Which setting `text` is: its name in a configuration of the callers."""
    for _ in range(5):
        if frame is None:
            break
        if frame.f_globals.get("__name__") != "fairseq.utils":  # whose parameters are all called x
            for settings in _settings(frame.f_locals):
                for name, value in settings.items():
                    if isinstance(value, str) and value == text:
                        return str(name)
        frame = frame.f_back
    return "of the configuration"


def _settings(variables: Mapping[str, Any]) -> Iterator[Mapping[Any, Any]]:
    yield variables
    for value in variables.values():
        for holder in (value, *_own(value, "cfg", "args")):
            if isinstance(holder, argparse.Namespace) or is_dataclass(holder):
                yield vars(holder)
            elif isinstance(holder, DictConfig):
                content = OmegaConf.to_container(holder, resolve=False)
                yield content if isinstance(content, dict) else {}


def _own(value: Any, *names: str) -> Tuple[Any, ...]:
    """Attributes that an object itself holds; no property and no `__getattr__` is called."""
    attributes = getattr(value, "__dict__", {})
    return tuple(attributes[name] for name in names if isinstance(attributes, dict) and name in attributes)
