"""How fairseq's programs print an error that the user can fix."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

from torch.multiprocessing import ProcessExitedException

from moa_fairseq.errors import UserError
from moa_fairseq.files import DISK_FULL, as_user_error
from moa_fairseq.plugin.patches.checkpoint_writing import AFTER_DIVERGENCE
from moa_fairseq.plugin.patches.table import made_of, patch


@patch(
    "sys:excepthook",
    "plugin/test_fairseq_compat.py::test_user_errors_of_fairseq_train_are_one_paragraph",
    made_of,
)
def one_paragraph(hook: Callable) -> Callable:
    """`print_user_errors` as Python's hook for uncaught errors, unless another program set its own.

    An error that the user can fix ends in a traceback: now it is one paragraph.
    """
    if hook is sys.__excepthook__:
        return print_user_errors
    return hook


def print_user_errors(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an error that the user can fix in one paragraph, and any other with its traceback.

    The arguments are those of `sys.excepthook`.
    """
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        error = as_user_error(error, Path(str(error.filename or "the checkpoint")))
    # fairseq's own message says enough, such as "Dataset not found: …".
    if isinstance(error, FileNotFoundError):
        error = UserError(str(error))
    if isinstance(error, ProcessExitedException):  # fairseq starts a process for each GPU
        signal_name = error.signal_name
        ending = f"was killed ({signal_name})" if signal_name else f"ended with {error.exit_code}"
        error = UserError(
            f"Process {error.error_index} of this machine {ending}. Look at this machine's memory, and start "
            "the same training again; it goes on from the last checkpoint."
        )
    # fairseq checks its flags by assertions.
    if isinstance(error, AssertionError) and str(error).startswith("--"):
        error = UserError(f"{error}.")
    if isinstance(error, FloatingPointError) and "inconsistent between workers" not in str(error):
        error = UserError(f"The training has diverged: {error}. {AFTER_DIVERGENCE}")
    if isinstance(error, UserError):
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
