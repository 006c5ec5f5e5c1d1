"""The record of the checks of the Triton kernels on this machine, which `validate` writes and `auto` reads.

A compiler's mistake is silent, and affects one kind of GPU with one version of Triton. So a record is valid
for one kind of GPU, one torch, one Triton and one source text of the kernels. It is in the user's cache
folder; the records in results/kernels, which come with this package, count as well. It is written during the
check: a dtype may be trusted as soon as all its cases have passed.
"""

import dataclasses
import datetime
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moa_fairseq.files import atomic_write, shipped, user_cache

COMMAND = "python -m moa_fairseq.layers.experts.validate"
DTYPES = ("bfloat16", "float16", "float32")  # the dtypes that the kernels support


@cache
def machine() -> dict[str, str]:
    """What a record is valid for: GPU, versions, and a digest of the kernels' source text."""
    import triton

    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "triton").glob("*.py")):
        digest.update(source.read_bytes())
    gpu = "none, interpreted"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"gpu": gpu} | versions | {"kernels": digest.hexdigest()[:12]}


def path() -> Path:
    """The path of this machine's record, under $XDG_CACHE_HOME or ~/.cache."""
    name = "-".join(machine().values())
    name = "".join(letter if letter.isalnum() or letter in ".-+" else "_" for letter in name)
    return user_cache() / f"triton-{name}.json"


@dataclasses.dataclass
class CheckResult:
    """The results of a check so far.

    Args:
        groups: the name of each group that was checked → the number of its cases.
        failed: the name of each group with a failure → a text for each failure.
        dtypes: the dtypes of which every group was checked.
        refused: the dtypes that the kernels do not support on this GPU.
    """

    groups: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    dtypes: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)


def write(outcome: CheckResult) -> Path:
    """Write the record of this machine. Returns its path."""
    record = machine() | {"date": datetime.date.today().isoformat()} | dataclasses.asdict(outcome)
    with atomic_write(path()) as stream:
        stream.write(json.dumps(record, indent=1) + "\n")
    return path()


def read(file: Path | None = None) -> tuple[CheckResult, str]:
    """Read a record.

    Args:
        file: a record of another machine of this kind; None: that of this machine, `path()`.

    Returns:
        The outcome, empty if the file is missing, broken or not valid here. A text for messages: where and
        when the kernels were checked, or why there is no outcome.
    """
    holder = "another machine of this kind" if file else "this machine"
    file = file or path()
    try:
        record: dict[str, Any] = json.loads(file.read_text("utf-8"))
        is_this_machine = all(record[key] == value for key, value in machine().items())
        groups = dict(record["groups"])
        sum(groups.values())  # raises TypeError unless all counts are numbers
        outcome = CheckResult(groups, dict(record["failed"]), list(record["dtypes"]))
        outcome.refused = list(record.get("refused", []))
        since = f"on {holder} on {record['date']}"
    except FileNotFoundError:
        return CheckResult(), (
            f"its kernels were not checked on this machine; the first training, or {COMMAND}, does so"
        )
    # A broken record is ignored, and the text says why
    except (OSError, ValueError, KeyError, TypeError) as error:
        return CheckResult(), f"{file} cannot be read ({error}); {COMMAND} writes it anew"
    if not is_this_machine:
        return CheckResult(), f"{file} is about something else; {COMMAND} writes it anew"
    return outcome, since


def shipped_path() -> Path:
    """The path of the record that comes with the package for this kind of machine, if it exists."""
    return shipped("results/kernels") / path().name


def known() -> tuple[CheckResult, str]:
    """The record of this machine, completed by the one that comes with the package for this kind of machine.

    Returns:
        The outcome, in which a group checked on this machine replaces that of the other machine; and the
        text, as `read` returns it.
    """
    local, since = read()
    other, other_since = read(shipped_path())
    if not other.groups:
        return local, since
    failed = {group: wrong for group, wrong in other.failed.items() if group not in local.groups}
    dtypes = list(dict.fromkeys([*local.dtypes, *other.dtypes]))
    both = CheckResult(other.groups | local.groups, failed | local.failed, dtypes, local.refused)
    if local.groups or local.failed:
        return both, f"{since}, and {other_since}"
    return both, other_since


def _distrusted(outcome: CheckResult) -> tuple[str, ...]:
    """The dtypes with a failure; all dtypes if a failed group (routing) belongs to no dtype."""
    failed = tuple(group.partition(",")[0] for group in outcome.failed)
    if set(failed) <= set(DTYPES):
        return failed
    return DTYPES


def is_open(dtype: str) -> bool:
    """Whether a check of a dtype is worthwhile: it has not been completed, and nothing has failed.

    Args:
        dtype: one of DTYPES.
    """
    outcome, _ = known()
    return dtype not in (*outcome.dtypes, *outcome.refused, *_distrusted(outcome))


def verdict() -> tuple[tuple[str, ...], str]:
    """The dtypes in which the kernels may be used here.

    Returns:
        The names of the dtypes, which may be none; and the reason.
    """
    outcome, since = known()
    checked = sum(outcome.groups.values())
    failed = sum(map(len, outcome.failed.values()))
    trusted = tuple(dtype for dtype in outcome.dtypes if dtype not in _distrusted(outcome))
    if failed:
        if path().is_file():
            file = path()
        else:
            file = shipped_path()
        return trusted, f"{failed} of {checked} checks failed {since}, see {file}"
    if not checked:
        return (), since
    if not trusted:
        return (), f"their check was stopped after {checked} cases; {COMMAND} goes on with it"
    return trusted, f"{checked} checks passed {since}"
