"""Asking fairseq's own parser about a training command before any work is done."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import sys
from typing import List

from moa_fairseq.errors import UserError


def fairseq_is_installed() -> bool:
    """True when this Python can import fairseq."""
    return importlib.util.find_spec("fairseq") is not None


def check_train_command(command: List[str]) -> None:
    """Parse a `fairseq-train` line as fairseq would. Raises UserError with fairseq's own complaint."""
    if not fairseq_is_installed():
        raise UserError(
            f"fairseq is not installed in {sys.executable}: run `bash scripts/setup.sh`, or start this "
            "command with the Python of the environment that has it."
        )
    from fairseq import options

    import moa_fairseq  # noqa: F401  (registers the archs and criterions)

    logging.getLogger("fairseq.utils").setLevel(logging.WARNING)
    complaint = io.StringIO()
    # fairseq looks for --user-dir in sys.argv while it builds the parser.
    argv, sys.argv = sys.argv, ["fairseq-train"]
    try:
        with contextlib.redirect_stderr(complaint):
            options.parse_args_and_arch(options.get_training_parser(), input_args=command[1:])
    except SystemExit as error:
        text = complaint.getvalue().strip().splitlines()
        raise UserError(f"fairseq-train does not accept the recipe's flags: {_shorten(text)}") from error
    except (ValueError, KeyError) as error:
        raise UserError(f"fairseq-train does not accept the recipe's flags: {error}") from error
    finally:
        sys.argv = argv


def _shorten(lines: List[str]) -> str:
    """fairseq's last line, without the usage and with long lists of choices cut."""
    message = re.sub(r"^.*?error: ", "", lines[-1] if lines else "no message")
    return re.sub(r"\(choose from (.{200}).*\)", r"(choose from \1 ...)", message)
