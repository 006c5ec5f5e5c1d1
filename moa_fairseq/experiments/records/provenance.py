"""What made a file: the commit, versions, the day, the hardware. The program that makes the file records it.

Programs that report the file later only read the record; they do not call `provenance`.
"""

import contextlib
import datetime
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import moa_fairseq
from moa_fairseq.errors import UserError

TOOLS = (
    "subword-nmt",
    "sacremoses",
    "sentencepiece",
    "regex",
    "torch",
    "numpy",
    "fairseq",
    "ve-fairseq",
)

_FILE = Path(__file__).resolve()
DIRTY = "-dirty"  # the suffix of a commit whose source tree has changes
GIT_SECONDS = 60  # the longest time that git may take to answer


def provenance(**conditions: Any) -> dict[str, Any]:
    """The record that a program writes with the file that it makes.

    Called before the file is made, because the code may change meanwhile.

    Args:
        conditions: further things that the file depends on, as JSON values, such as the hardware.

    Returns:
        The conditions, "versions", "commit" and "date".
    """
    today = datetime.date.today().isoformat()
    return conditions | {"versions": versions(), "commit": commit(), "date": today}


def combined(sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record for several sessions of one training.

    Args:
        sessions: the records by `provenance`, in order.

    Returns:
        For a key with texts, such as a version, the distinct texts in order, with commas. For the date and
        other values that of the last session.
    """
    record: dict[str, Any] = {}
    for key in dict.fromkeys(key for session in sessions for key in session):
        values = [session[key] for session in sessions if session.get(key) is not None]
        if not values:
            record[key] = None
        elif all(isinstance(value, dict) for value in values):
            record[key] = combined(values)
        elif key != "date" and all(isinstance(value, str) for value in values):
            record[key] = ", ".join(dict.fromkeys(values)) or None
        else:
            record[key] = values[-1]
    return record


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that the numbers depend on, in this environment."""
    tools = tool_versions()
    fairseq = tools.get("ve-fairseq") or tools.get("fairseq")
    names = ("python", "torch", "moa_fairseq")
    return {name: tools.get(name) for name in names} | {"fairseq": fairseq}


def tool_versions() -> dict[str, str]:
    """Versions of everything that shapes prepared data."""
    tools = {"python": platform.python_version(), "moa_fairseq": moa_fairseq.__version__}
    for tool in TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            tools[tool] = metadata.version(tool)
    return tools


def commit() -> str | None:
    """The commit of the source tree; if the tree has changes, with -dirty and a digest of them.

    A file of the package that git does not know is a change, because fairseq imports every module in some of
    its folders. Results are not part of the source. A copy of the files may have no repository, lie in the
    one of another project, or have one at an older commit: then $MOA_FAIRSEQ_COMMIT is used, if it is set.

    Raises:
        UserError: if git does not answer, or refuses to read the repository.
    """
    stated = os.environ.get("MOA_FAIRSEQ_COMMIT") or None
    try:
        revision = _commit_of_repository()
    except UserError:  # git does not answer, or refuses: the environment's commit will do
        if stated is None:
            raise
        return stated
    if revision is None or DIRTY in revision:
        return stated or revision
    return revision


def _commit_of_repository() -> str | None:
    """The commit as git finds it; None if there is no git, or no repository has this file in a commit."""
    package = _FILE.parents[2]
    try:
        _git("ls-files", "--error-unmatch", _FILE.name)
        revision = _git("rev-parse", "HEAD").decode().strip()
        changes = _source_changes(package)
    except (FileNotFoundError, PermissionError):  # there is no git
        return None
    except subprocess.CalledProcessError as error:
        if not _is_refusal(error):
            return None
        message = error.stderr.decode("utf-8", errors="replace").strip().partition("\n")[0]
        problem = f"git cannot read the repository of {package} ({message})"
        remedy = "Mend that, or say the commit with MOA_FAIRSEQ_COMMIT."
        raise UserError(f"{problem}. {remedy}") from error
    except subprocess.TimeoutExpired as error:
        problem = f"git did not say within {GIT_SECONDS} s at which commit {package.parent} is"
        raise UserError(f"{problem}. Say it with MOA_FAIRSEQ_COMMIT.") from error
    if changes.strip():
        return f"{revision}{DIRTY}-{hashlib.sha256(changes).hexdigest()[:8]}"
    return revision


def _git(*words: str) -> bytes:
    """The output of a git command in this file's folder."""
    # A hook of git, for example, sets variables that name its own repository
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(_FILE.parent), *words]
    answer = subprocess.run(
        command, env=environment, capture_output=True, timeout=GIT_SECONDS, check=True
    )
    return answer.stdout


def _source_changes(package: Path) -> bytes:
    """The difference of the source tree from its commit, then the package's new files."""
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary")
    changes = _git("diff", *plain, "HEAD", "--", ":/", ":(top,exclude)results")
    new = _git("ls-files", "-z", "--others", "--exclude-standard", "--", str(package))
    for name in filter(None, new.split(b"\0")):
        changes += name
        # A nested repository, or a file that was deleted meanwhile, cannot be read
        with contextlib.suppress(OSError):
            changes += (_FILE.parent / os.fsdecode(name)).read_bytes()
    return changes


def _is_refusal(error: subprocess.CalledProcessError) -> bool:
    """Whether git refuses to read a repository. Otherwise no repository has this file in a commit."""
    # `git ls-files --error-unmatch` ends with 1 for a file that the repository does not know
    in_repository = any((folder / ".git").exists() for folder in _FILE.parents)
    return "ls-files" in error.cmd and error.returncode != 1 and in_repository
