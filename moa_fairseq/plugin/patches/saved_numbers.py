"""NumPy's numbers in a checkpoint, which fairseq's meters take from what tasks and criterions log.

They are saved as plain numbers and lists. Those in older files are read without NumPy's own unpickling: it
makes arrays as large as a file says, and of any type.
"""

from __future__ import annotations

import copy
import math
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from moa_fairseq.plugin.patches.table import patch

MAX_BYTES = 1_000_000  # of NumPy's numbers in one file: a meter has some tens
_TYPES = {"b1", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


def plain(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy with plain numbers, and lists of them, in place of NumPy's.

    Args:
        value: dictionaries, lists, tuples and namespaces are copied; all else that is not NumPy's stays.
        copies: for the function's own calls, the copies of containers by the id of the original.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        # With the attributes of a model's OrderedDict
        copied = copies[id(value)] = copy.copy(value)
        copied.clear()
        copied.update({plain(key, copies): plain(item, copies) for key, item in value.items()})
        return copied
    if isinstance(value, list):
        items: list[Any] = []
        copies[id(value)] = items
        items += [plain(item, copies) for item in value]
        return items
    if type(value) is tuple:
        copies[id(value)] = tuple(plain(item, copies) for item in value)
        return copies[id(value)]
    if type(value) is Namespace:
        settings = copies[id(value)] = Namespace()
        vars(settings).update(plain(vars(value), copies))
        return settings
    return value


def numpy_stand_ins() -> list[type]:
    """What unpickling gets in place of NumPy's constructors; made for one file, whose numbers they count.

    A scalar becomes a number, and an array a list; one without dimensions a list of one. They raise
    UnpicklingError for other contents than numbers and truth values, and for more than MAX_BYTES.
    """
    budget = MAX_BYTES

    def refuse(what: str) -> NoReturn:
        raise pickle.UnpicklingError(f"GLOBAL numpy.{what}")

    class Dtype:
        def __init__(self, code: str, *_: Any) -> None:
            self.code = code if code in _TYPES else refuse("dtype")

        def __setstate__(self, state: Any) -> None:
            _, order, *fields = state
            if order not in ("<", ">", "=", "|") or fields[:3] != [None] * 3:
                refuse("dtype")
            self.code = order + self.code

    def numbers(dtype: Any, raw: Any) -> np.ndarray:
        nonlocal budget
        if not isinstance(dtype, Dtype) or not isinstance(raw, bytes) or len(raw) > budget:
            refuse("ndarray")
        budget -= len(raw)
        if raw:
            return np.frombuffer(raw, dtype.code)
        return np.empty(0, dtype.code)

    class Array(list):
        def __init__(self, *_: Any) -> None:
            """Empty, whatever the arguments say; its state follows."""

        def __setstate__(self, state: Any) -> None:
            nonlocal budget
            _, shape, dtype, by_columns, raw = state
            values = numbers(dtype, raw)
            rows = math.prod(size for size in shape if size)  # an empty array has them, too
            budget -= 0 if len(values) else rows
            if math.prod(shape) != len(values) or budget < 0:
                refuse("ndarray")
            self[:] = values.reshape(shape or (1,), order="F" if by_columns else "C").tolist()

    class Scalar:
        def __new__(cls, dtype: Any, raw: Any) -> Any:
            return numbers(dtype, raw).item()

    class Bytes:
        """What a pickle calls for none; the real one makes as many as it is given a number of."""

        def __new__(cls) -> Any:
            return b""

    class ArrayType:
        """Only an argument of the others."""

    def named(module: str, name: str, base: type) -> type:
        return type(name, (base,), {"__module__": module})

    stand_ins = [named("numpy", "dtype", Dtype), named("numpy", "ndarray", ArrayType)]
    stand_ins.append(named("builtins", "bytes", Bytes))
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # of NumPy 1 and 2
        stand_ins += [named(module, "_reconstruct", Array), named(module, "scalar", Scalar)]
    return stand_ins


@patch(
    "fairseq.logging.meters:MetersDict.load_state_dict",
    "plugin/patches/test_saved_numbers.py::test_a_meter_goes_on_with_the_array_that_was_saved",
)
def restore_arrays(load: Callable, meters: Any, state: Any) -> None:
    """A meter's array, such as the counts of --eval-bleu, is saved as a list, which cannot be summed."""
    rows = []
    for *meter, values in state:
        restored = {}
        for name, value in values.items():
            restored[name] = np.asarray(value) if isinstance(value, list) else value
        rows.append((*meter, restored))
    load(meters, rows)
