"""Settings are data: where fairseq calls `eval`, a setting is parsed as a literal.

fairseq keeps some settings as Python expressions (`--encoder-layers "[(512, 3)] * 20"`, `--adam-betas`) and
evaluates them when a model, a criterion or an optimizer is built.
"""

from __future__ import annotations

import ast
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.table import patch, replaced

MAX_ITEMS = 10_000  # of all lists, tuples and strings together that + and * make in one setting
# The errors that literal_eval documents
_NOT_LITERAL = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@patch(
    "fairseq.*, fairseq_cli.*:eval",
    "plugin/patches/test_literals.py::test_no_module_of_fairseq_has_the_real_eval",
    replaced,
)
def literal(text: Any, *_: Any) -> Any:
    """Parse a setting as a literal; stands for `eval`, whose other arguments are ignored.

    fairseq evaluates settings as Python code, also from other people's checkpoints.

    Args:
        text: numbers, strings, booleans, None, lists, tuples, sets and dictionaries; sums, differences and
            products of numbers; sums and repetitions of lists, tuples and strings.

    Raises:
        UserError: names the setting, if it is any other text.
        TypeError: if `text` is not a text, as `eval` does.
    """
    if not isinstance(text, str):
        raise TypeError(f"a setting is a text, not {type(text).__name__}")
    try:
        return ast.literal_eval(_Sums().visit(ast.parse(text.strip(), mode="eval")))
    except _NOT_LITERAL as error:
        excerpt = text if len(text) <= 80 else f"{text[:77]}..."
        raise UserError(
            f"{_setting_name(text)} is refused: {excerpt!r} is not a plain value. "
            "fairseq would run it as Python code, and it may come from somebody else's checkpoint, "
            "so nothing was run. Give numbers, strings, lists, tuples, dictionaries, or sums "
            "and repetitions such as [(512, 3)] * 20."
        ) from error


class _Sums(ast.NodeTransformer):
    """Replaces sums, differences and products by their values; literal_eval computes only complex numbers."""

    items = MAX_ITEMS

    def visit_BinOp(self, node: ast.BinOp) -> ast.Constant:
        if type(node.op) not in _OPERATORS:
            raise ValueError(f"{type(node.op).__name__} is not allowed")
        first = ast.literal_eval(self.visit(node.left))
        second = ast.literal_eval(self.visit(node.right))
        lengths = []
        for side in (first, second):
            lengths.append(len(side) if isinstance(side, (list, tuple, str, bytes)) else 0)
        if isinstance(node.op, ast.Mult) and any(lengths):  # such as [(512, 3)] * 20
            count = first if lengths[1] else second
            self.items -= max(lengths) * max(count, 0)
        else:
            self.items -= sum(lengths)
        if self.items < 0:
            raise ValueError(f"more than {MAX_ITEMS} items")
        return ast.Constant(_OPERATORS[type(node.op)](first, second))


def _setting_name(text: str) -> str:
    """The name of the setting whose value is `text`, searched in the settings of `literal`'s callers."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(5):
        if frame is None:
            break
        for holder in _holders(frame):
            for name, value in holder.items():
                if isinstance(value, str) and value == text:
                    return f"The setting {name}"
        frame = frame.f_back
    return "A setting of the configuration"


def _holders(frame: types.FrameType) -> Iterator[Mapping[Any, Any]]:
    """A caller's local names, the fields of their values, and those of each value's `cfg` and `args`."""
    # The functions of fairseq.utils call every parameter x, which names no setting.
    if frame.f_globals.get("__name__") == "fairseq.utils":
        return
    yield frame.f_locals
    for fields in map(_fields, list(frame.f_locals.values())):
        yield fields
        for name in ("cfg", "args"):
            yield _fields(fields.get(name))


def _fields(value: Any) -> Mapping[Any, Any]:
    """The attributes stored in a configuration or an object; no property and no `__getattr__` is called."""
    if isinstance(value, DictConfig):
        fields: Any = OmegaConf.to_container(value, resolve=False)
    else:
        fields = getattr(value, "__dict__", {})
    return fields if isinstance(fields, dict) else {}
