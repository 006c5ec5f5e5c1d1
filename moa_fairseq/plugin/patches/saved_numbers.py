"""NumPy's numbers in a checkpoint, which fairseq's meters take from what tasks and criterions log.

They are saved as plain numbers and lists. Older files, which hold NumPy's own, are read without NumPy's
unpickling: it makes arrays as large as a file says, and of any type.
"""

from __future__ import annotations

import copy
import math
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

from moa_fairseq.plugin.patches.table import patch

MAX_BYTES = 1_000_000  # of NumPy's numbers in one file: a meter has some tens of bytes
_TYPES = {"b1", "f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}
# Little-endian, big-endian, the machine's; none for single bytes
_BYTE_ORDERS = ("<", ">", "=", "|")


def plain(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy with plain numbers, and lists of them, in place of NumPy's.

    Args:
        value: dictionaries, lists, tuples and namespaces are copied; any other object that is not NumPy's is
            returned itself.
        copies: the copies of containers by the id of the original, so that a container in several places, or
            in itself, has one copy; only the function's own calls pass it.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    copied: Any
    if isinstance(value, dict):
        # copy.copy also copies the attributes of a model's OrderedDict.
        copied = copies[id(value)] = copy.copy(value)
        copied.clear()
        copied.update({plain(key, copies): plain(item, copies) for key, item in value.items()})
        return copied
    if isinstance(value, list):
        copied = copies[id(value)] = []
        copied += [plain(item, copies) for item in value]
        return copied
    if type(value) is Namespace:
        copied = copies[id(value)] = Namespace()
        vars(copied).update(plain(vars(value), copies))
        return copied
    if type(value) is tuple:
        copied = copies[id(value)] = tuple(plain(item, copies) for item in value)
        return copied
    return value


class Budget:
    """The bytes of NumPy's numbers that one file may still hold."""

    left = MAX_BYTES

    def spend(self, size: int) -> None:
        """Subtract `size` bytes.

        Raises:
            pickle.UnpicklingError: if fewer are left.
        """
        if size > self.left:
            raise _refusal("ndarray")
        self.left -= size


class _Dtype:
    """For numpy.dtype: `code` is the byte order and type of a number, such as "<f8"."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in _TYPES:
            raise _refusal("dtype")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        _, order, *fields = state
        has_fields = fields[:3] != [None, None, None]  # it is a record or an array of smaller ones
        if order not in _BYTE_ORDERS or has_fields:
            raise _refusal("dtype")
        self.code = order + self.code


class _Array(list):
    """For the constructor of arrays: the numbers as nested lists."""

    budget: Budget

    def __init__(self, *_: Any) -> None:
        """Make an empty list; `__setstate__` gets the shape and the numbers."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, raw = state
        values = _numbers(dtype, raw, self.budget)
        if not len(values):
            # A shape without numbers, such as (1000, 0), still makes a list for each row.
            self.budget.spend(math.prod(size for size in shape if size))
        if math.prod(shape) != len(values):
            raise _refusal("ndarray")
        self[:] = values.reshape(shape or (1,), order="F" if by_columns else "C").tolist()


class _Scalar:
    """For the constructor of scalars, which returns a plain number."""

    budget: Budget

    def __new__(cls, dtype: Any, raw: Any) -> Any:
        return _numbers(dtype, raw, cls.budget).item()


class _EmptyBytes:
    """For `bytes`, which a pickle calls for an empty value; given a number, it would make as many bytes."""

    def __new__(cls) -> Any:
        return b""


class _ArrayType:
    """For numpy.ndarray, which is only an argument of the constructor of arrays."""


_STAND_INS = {
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _ArrayType,
    "builtins.bytes": _EmptyBytes,
    # NumPy 1
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray.scalar": _Scalar,
    # NumPy 2
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray.scalar": _Scalar,
}


def _refusal(name: str) -> pickle.UnpicklingError:
    # "GLOBAL" is how torch's reader names a refused type; `checkpoint_reading` looks for it
    return pickle.UnpicklingError(f"GLOBAL numpy.{name}")


def _numbers(dtype: Any, raw: Any, budget: Budget) -> np.ndarray:
    """The numbers in the bytes `raw`, which are taken from the budget."""
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
        raise _refusal("ndarray")
    budget.spend(len(raw))
    if raw:
        return np.frombuffer(raw, dtype.code)
    return np.empty(0, dtype.code)


def numpy_stand_ins() -> list[type]:
    """Classes that unpickling calls in place of NumPy's constructors, for one file: they share its budget.

    A scalar becomes a number, an array nested lists, and an array without dimensions a list of one number.
    The classes raise an UnpicklingError for anything but numbers and truth values, and for more than
    MAX_BYTES of them.
    """
    budget = Budget()
    stand_ins = []
    for path, stand_in in _STAND_INS.items():
        module, _, name = path.rpartition(".")
        stand_ins.append(type(name, (stand_in,), {"__module__": module, "budget": budget}))
    return stand_ins


@patch(
    "fairseq.logging.meters:MetersDict.load_state_dict",
    "plugin/patches/test_saved_numbers.py::test_a_meter_goes_on_with_the_array_that_was_saved",
)
def restore_arrays(load: Callable, meters: Any, state: Any) -> None:
    """Turn the lists in the saved state of meters into arrays.

    A meter's array, such as the counts of --eval-bleu, is saved as a list, which cannot be summed.
    """
    restored = []
    for *meter, values in state:
        arrays = {}
        for name, value in values.items():
            arrays[name] = np.asarray(value) if isinstance(value, list) else value
        restored.append((*meter, arrays))
    load(meters, restored)
