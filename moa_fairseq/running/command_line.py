"""Command lines as data: lists of words that can be printed, pasted into a shell, and executed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from moa_fairseq.errors import UserError

MODULES = {
    "fairseq-preprocess": "fairseq_cli.preprocess",
    "fairseq-train": "fairseq_cli.train",
    "fairseq-generate": "fairseq_cli.generate",
    "fairseq-eval-lm": "fairseq_cli.eval_lm",
    "fairseq-validate": "fairseq_cli.validate",
    "moa-fairseq": "moa_fairseq.cli",
}
REDIRECT, ERRORS_TOO = ">", "2>&1"
_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def flags(values: Mapping[str, Any]) -> List[str]:
    """{'lr': 0.1, 'fp16': True, 'x': None} → ['--lr', '0.1', '--fp16']: False and None are left out.

    Raises UserError for a value that the program, or a shell, would not take for one.
    """
    line: List[str] = []
    for name, value in values.items():
        problem = unsafe_value(value)
        if problem:
            raise UserError(f"--{name}: {problem}")
        if value is None or value is False:
            continue
        if value is True:
            line.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            line += [f"--{name}", *(str(item) for item in value)]
        elif str(value).startswith("-"):
            line.append(f"--{name}={value}")  # argparse would take a separate -1 for a flag
        else:
            line += [f"--{name}", str(value)]
    return line


def unsafe_value(value: Any) -> Optional[str]:
    """Why a flag's value must not be put on a command line, or None if it may.

    An item of a list is a word of its own there. One that begins with a dash would be read as a flag, and
    --user-dir, for example, runs Python code. Negative numbers are not taken for flags.
    """
    items = value if isinstance(value, (list, tuple)) else []
    flag = next((i for i in map(str, items) if i.startswith("-") and not _NUMBER.fullmatch(i)), None)
    if flag is not None:
        return f"{flag!r} in a list of values would be taken for a flag: a list holds values only."
    return f"{REDIRECT!r} is no value." if REDIRECT in (items or [value]) else None


def to_argv(command: Sequence[str]) -> List[str]:
    """What is executed for a printed command: the same program by module, in this Python."""
    words = command[: command.index(REDIRECT)] if REDIRECT in command else command
    return [sys.executable, "-u", "-m", MODULES[words[0]], *words[1:]]


def to_shell(command: Sequence[str], environment: Optional[Dict[str, str]] = None) -> str:
    """The command as one can paste it into a shell."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    words = (word if word in (REDIRECT, ERRORS_TOO) else shlex.quote(word) for word in command)
    return " ".join([*settings, *words])


def positional(path: Path) -> str:
    """A path as an argument of its own: never one that begins like a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)
