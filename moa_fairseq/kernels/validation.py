"""Whether the Triton kernels were checked on this machine: a file that `validate` writes, `auto` reads.

A compiler's mistake is silent, and affects one kind of GPU with one version of Triton. So the file is valid
for one GPU, one torch, one Triton and one source text of the kernels. It lies in the user's cache folder.
It is written while the check goes on: a dtype may be trusted from the moment when all its cases have passed.
"""

import dataclasses
import datetime
import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

COMMAND = "python -m moa_fairseq.kernels.validate"
DTYPES = ("bfloat16", "float16", "float32")  # that the kernels take


@cache
def machine() -> Dict[str, str]:
    """What a validation is valid for."""
    import triton

    digest = hashlib.sha256()
    for source in sorted((Path(__file__).parent / "triton").glob("*.py")):
        digest.update(source.read_bytes())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, interpreted"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"gpu": gpu, **versions, "kernels": digest.hexdigest()[:12]}


def path() -> Path:
    """The file of this machine, under $XDG_CACHE_HOME or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "-".join(machine().values())
    name = "".join(letter if letter.isalnum() or letter in ".-+" else "_" for letter in name)
    return root / "moa_fairseq" / f"triton-{name}.json"


@dataclasses.dataclass
class Outcome:
    """What a check has found so far.

    groups: name of each group of cases that was gone through → how many there are. failed: those in which
    something is wrong → what. dtypes: those of which every group was gone through.
    """

    groups: Dict[str, int] = dataclasses.field(default_factory=dict)
    failed: Dict[str, List[str]] = dataclasses.field(default_factory=dict)
    dtypes: List[str] = dataclasses.field(default_factory=list)


def write(outcome: Outcome) -> Path:
    """Record what is known."""
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    found = {**machine(), "date": datetime.date.today().isoformat(), **dataclasses.asdict(outcome)}
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, target)  # so that the file is always whole
    return target


def read() -> Tuple[Outcome, str]:
    """(what is known of this machine, since when or why nothing is)"""
    try:
        found: Dict[str, Any] = json.loads(path().read_text(encoding="utf-8"))
        same = all(found[key] == value for key, value in machine().items())
        outcome = Outcome(dict(found["groups"]), dict(found["failed"]), list(found["dtypes"]))
        date, _ = str(found["date"]), sum(outcome.groups.values())
    except FileNotFoundError:
        return Outcome(), f"its kernels were not checked on this machine; {COMMAND} does so in minutes"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Outcome(), f"{path()} cannot be read ({error}); {COMMAND} writes it anew"
    if not same:
        return Outcome(), f"{path()} is about something else; {COMMAND} writes it anew"
    return outcome, date


def verdict() -> Tuple[Tuple[str, ...], str]:
    """(the dtypes in which the kernels may be trusted here, why)"""
    outcome, known = read()
    checked = sum(outcome.groups.values())
    if not checked:
        return (), known
    if outcome.failed:
        failed = sum(map(len, outcome.failed.values()))
        return (), f"{failed} of {checked} checks failed on this machine on {known}, see {path()}"
    if not outcome.dtypes:
        return (), f"their check was stopped after {checked} cases; {COMMAND} goes on with it"
    return tuple(outcome.dtypes), f"{checked} checks passed on this machine on {known}"
