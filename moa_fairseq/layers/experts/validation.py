"""Whether the Triton kernels were checked on this machine: a file that `validate` writes, `auto` reads.

A compiler's mistake is silent, and affects one kind of GPU with one version of Triton. So the file is valid
for one GPU, one torch, one Triton and one source text of the kernels. It lies in the user's cache folder;
those of results/kernels, which come with this package, count as well. It is written while the check goes on:
a dtype may be trusted from the moment when all its cases have passed.
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
DTYPES = ("bfloat16", "float16", "float32")  # that the kernels take


@cache
def machine() -> dict[str, str]:
    """What a validation is valid for."""
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
    """The file of this machine, under $XDG_CACHE_HOME or ~/.cache."""
    name = "-".join(machine().values())
    name = "".join(letter if letter.isalnum() or letter in ".-+" else "_" for letter in name)
    return user_cache() / f"triton-{name}.json"


@dataclasses.dataclass
class CheckResult:
    """What a check has found so far.

    Args:
        groups: name of each group of cases that was gone through → how many there are.
        failed: those in which something is wrong → what.
        dtypes: those of which every group was gone through.
        refused: those that the kernels do not take on this GPU.
    """

    groups: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    dtypes: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)


def write(outcome: CheckResult) -> Path:
    """Record what is known."""
    record = machine() | {"date": datetime.date.today().isoformat()} | dataclasses.asdict(outcome)
    with atomic_write(path()) as stream:
        stream.write(json.dumps(record, indent=1) + "\n")
    return path()


def read(file: Path | None = None) -> tuple[CheckResult, str]:
    """What is known of this machine.

    Args:
        file: another than `path()`, such as the record of another machine of this kind.

    Returns:
        The outcome, empty where the file is missing, broken or about something else; and where and since when
        it is known, or why nothing is.
    """
    holder = "another machine of this kind" if file else "this machine"
    file = file or path()
    try:
        record: dict[str, Any] = json.loads(file.read_text("utf-8"))
        is_this_machine = all(record[key] == value for key, value in machine().items())
        outcome = _outcome_of(record)
        since = f"on {holder} on {record['date']}"
    except FileNotFoundError:
        return CheckResult(), (
            f"its kernels were not checked on this machine; the first training, or {COMMAND}, does so"
        )
    # Nothing is trusted; the text says why
    except (OSError, ValueError, KeyError, TypeError) as error:
        return CheckResult(), f"{file} cannot be read ({error}); {COMMAND} writes it anew"
    if not is_this_machine:
        return CheckResult(), f"{file} is about something else; {COMMAND} writes it anew"
    return outcome, since


def _outcome_of(record: dict[str, Any]) -> CheckResult:
    """The outcome in a record. Raises KeyError, TypeError or ValueError for a broken one."""
    groups = dict(record["groups"])
    outcome = CheckResult(groups, dict(record["failed"]), list(record["dtypes"]))
    outcome.refused = list(record.get("refused", []))
    sum(groups.values())  # a TypeError, unless all counts are numbers
    return outcome


def shipped_path() -> Path:
    """Where a record of this kind of machine lies that came with the package, if there is one."""
    return shipped("results/kernels") / path().name


def known() -> tuple[CheckResult, str]:
    """As `read`, completed by what comes with the package: the check of another machine of this kind.

    Returns:
        The outcome, in which this machine's own cases count before the other's; and where and since when it
        is known, or why nothing is.
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
    """The dtypes in which something failed; all of them where it was no dtype's own group."""
    failed = tuple(group.partition(",")[0] for group in outcome.failed)
    if set(failed) <= set(DTYPES):
        return failed
    return DTYPES


def is_open(dtype: str) -> bool:
    """Whether a check of a dtype would tell anything: it was not done to its end, and nothing has failed.

    Args:
        dtype: one of DTYPES.
    """
    outcome, _ = known()
    return dtype not in (*outcome.dtypes, *outcome.refused, *_distrusted(outcome))


def verdict() -> tuple[tuple[str, ...], str]:
    """Which dtypes the kernels may be trusted in here.

    Returns:
        The dtypes by name, which may be none; and why.
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
