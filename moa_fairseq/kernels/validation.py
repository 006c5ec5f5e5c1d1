"""Whether the Triton kernels were checked on this machine: a file that `validate` writes, `auto` reads.

A compiler's mistake is silent, and affects one kind of GPU with one version of Triton. So the file is valid
for one GPU, one torch, one Triton and one source text of the kernels. It lies in the user's cache folder.
"""

import datetime
import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

COMMAND = "python -m moa_fairseq.kernels.validate"


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


def write(checked: int, failed: List[str]) -> Path:
    """Record a check of so many cases and what failed in it."""
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    found = {**machine(), "date": datetime.date.today().isoformat(), "checked": checked, "failed": failed}
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, target)  # so that the file is always whole
    return target


def verdict() -> Tuple[bool, str]:
    """(whether the kernels may be trusted here, why)"""
    try:
        found: Dict[str, Any] = json.loads(path().read_text(encoding="utf-8"))
        same = all(found[key] == value for key, value in machine().items())
        checked, failed, date = int(found["checked"]), list(found["failed"]), found["date"]
    except FileNotFoundError:
        return False, f"its kernels have not been checked on this machine; {COMMAND} checks them in minutes"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return False, f"{path()} cannot be read ({error}); {COMMAND} writes it anew"
    if not same or not checked:
        return False, f"{path()} is about something else; {COMMAND} writes it anew"
    if failed:
        return False, f"{len(failed)} of {checked} checks failed on this machine on {date}, see {path()}"
    return True, f"{checked} checks passed on this machine on {date}"
