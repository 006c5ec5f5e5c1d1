"""Fetching one public file: resumable, from the first mirror that serves the right one, and checked."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import logging
import os
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from tqdm import tqdm

from moa_fairseq.data_prep.catalogue import PublicFile
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write, checksum, disk_errors

BLOCK = 1 << 20
TIMEOUT = 30
# Tries for each address after the first; what was received is kept between them.
PAUSES = (1, 5, 20)
# Some servers refuse Python's own name.
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; moa_fairseq data preparation)"}
GOOGLE_DRIVE = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"
_HTML = re.compile(rb"^\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)
_NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)

log = logging.getLogger(__name__)


class _Refused(Exception):
    """This address does not serve the file; the next one may."""


class Unavailable(UserError):
    """No address serves the file. why: what each of them answered."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def flaw_of(path: Path, source: PublicFile) -> str:
    """What is wrong with a file, as the second half of a sentence; "" when nothing is.

    Looks at the beginning, the size, the format, and sha256 or md5 where they are published.
    """
    with open(path, "rb") as stream:
        head = stream.read(512)
    if _HTML.match(head):
        return "is a web page instead of the file (a login, an error or a confirmation page)"
    size, kind = path.stat().st_size, source.name.rpartition(".")[2]
    if source.size is not None and size != source.size:
        return f"has {size:,} bytes instead of {source.size:,}"
    if kind in ("gz", "tgz"):
        good, kind = head[:2] == b"\x1f\x8b", "gzip"
    else:
        good = {"zip": zipfile.is_zipfile, "tar": tarfile.is_tarfile}.get(kind, lambda path: head)(path)
    if not good:
        return f"is no {kind} file"
    for algorithm in ("sha256", "md5"):
        expected = getattr(source, algorithm)
        if expected:
            found = checksum(path, algorithm)
            return "" if found == expected else f"has the {algorithm} {found} instead of {expected}"
    return ""


def download(source: PublicFile, folder: Path, pauses: Optional[Sequence[float]] = None) -> Path:
    """Fetch `source` to `folder/<its name>` and check it; returns the path.

    The bytes go to `<name>.part`, which a later call continues, at any mirror when the file's checksum is
    known (else each address has a part of its own, `<name>.<n>.part`); the final name
    appears when the file was found right. pauses: seconds before each new try of an address (PAUSES).
    Raises Unavailable naming every address that failed, and what to do.
    """
    target, failures = folder / source.name, []
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for number, url in enumerate(source.urls):
            log.info(f"downloading {url}")
            part = _Part(target, source, number)
            address = GOOGLE_DRIVE.format(url.partition(":")[2]) if url.startswith("gdrive:") else url
            try:
                flaw = "is still to come"
                while flaw:
                    begun = part.size()
                    _fetch(address, part, PAUSES if pauses is None else pauses)
                    flaw = flaw_of(part.path, source)
                    if flaw:
                        part.discard()
                        if not begun:
                            raise _Refused(f"what it serves {flaw}")
                        log.info(f"what was received in parts {flaw}; fetching all of it anew")
                os.replace(part.path, target)
                for left in range(len(source.urls)):
                    _Part(target, source, left).discard()
                return target
            except _Refused as why:
                failures.append(f"{url}: {why}")
    otherwise = source.gone or (
        "Run the same command again to go on from what was received; or fetch the file in another way, put "
        "it into a folder and name that folder with --from (`moa-fairseq recipe`: --data)."
    )
    why = "; ".join(failures)
    raise Unavailable(f"Could not download {target.name}. {why}. {otherwise}", why)


class _Part:
    """The unfinished file and a note on where it comes from: url, validator and total.

    shared: every mirror goes on from what another sent, as the checksum tells in the end whether it fits.
    """

    def __init__(self, target: Path, source: PublicFile, number: int) -> None:
        self.shared = bool(source.sha256 or source.md5)
        self.length = source.size
        self.path = target.with_name(target.name + (".part" if self.shared else f".{number}.part"))
        self.note = self.path.with_name(self.path.name + ".json")

    def begun(self) -> Dict[str, Any]:
        """The note on what was received; {} when there is nothing to go on from."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note if self.size() and isinstance(note, dict) else {}

    def size(self) -> int:
        """Bytes received so far."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def discard(self) -> None:
        """Forget what was received."""
        for path in (self.path, self.note):
            path.unlink(missing_ok=True)


def _fetch(url: str, part: _Part, pauses: Sequence[float]) -> None:
    """Receive everything at `url` into the part file. Raises _Refused when it cannot be had there."""
    for pause in (*pauses, None):
        try:
            _receive(url, part)
            return
        except urllib.error.HTTPError as error:
            why = f"HTTP {error.code} {error.reason}"
            if error.code == 416:  # the part is longer than the file
                if part.begun().get("url") not in (None, url):
                    raise _Refused("it serves a shorter file than what was received elsewhere") from error
                part.discard()
            elif error.code < 500 and error.code not in (408, 429):
                raise _Refused(why) from error
        except _NETWORK as error:
            why = f"{getattr(error, 'reason', None) or error or type(error).__name__}"
        if pause is None:
            kept = f" ({part.size():,} bytes were received and are kept)" if part.size() else ""
            raise _Refused(why + kept)
        time.sleep(pause)


def _receive(url: str, part: _Part) -> None:
    note, headers, received = part.begun(), dict(HEADERS), part.size()
    validator = note.get("validator") if note.get("url") == url else None
    if note and (validator or part.shared):
        headers["Range"] = f"bytes={received}-"
    if validator:  # the same address: what changed there since is sent from its beginning
        headers["If-Range"] = validator
    with _open(url, headers) as answer:
        goes_on, length = answer.status == 206, answer.headers.get("Content-Length")
        total = int(length) if length else None
        if goes_on:
            span = re.match(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if not span or int(span.group(1)) != received:
                raise _Refused("it answers with another part of the file than was asked for")
            total = int(span.group(2))
        known = part.length or note.get("total")
        if note and part.shared and None not in (known, total) and total != known and not validator:
            raise _Refused(f"it serves a file of another length ({total:,} bytes instead of {known:,})")
        # A server that sends all of it again: what is there already is passed over, or begun anew.
        passed_over = received if note and part.shared and not goes_on and not validator else 0
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "W/"
        with atomic_write(part.note) as stream:
            tag = None if tag.startswith("W/") else tag
            json.dump({"url": url, "validator": tag, "total": total}, stream)
        with open(part.path, "ab" if goes_on or passed_over else "wb") as stream:
            while passed_over and (block := answer.read(min(BLOCK, passed_over))):
                passed_over -= len(block)
            look = {"initial": stream.tell(), "desc": part.path.name, "disable": None, "leave": False}
            with (
                contextlib.suppress(http.client.IncompleteRead),
                tqdm.wrapattr(stream, "write", total, **look) as output,
            ):
                shutil.copyfileobj(answer, output, BLOCK)
    if total is not None and part.size() < total:
        raise http.client.IncompleteRead(b"", total - part.size())


def _open(url: str, headers: Dict[str, str]) -> http.client.HTTPResponse:
    """The answer to a request; a page that asks for confirmation (large files on Google Drive) gets it."""
    asked: Optional[str] = url
    for _ in range(2):
        answer = urllib.request.urlopen(urllib.request.Request(asked, headers=headers), timeout=TIMEOUT)
        if "text/html" not in answer.headers.get("Content-Type", ""):
            return answer
        with answer:
            page = answer.read(BLOCK).decode("utf-8", errors="replace")
        asked = confirmation_address(page, url)
        if not asked:
            break
    title = re.search(r"<title[^>]*>(.*?)</title>", page, re.IGNORECASE | re.DOTALL)
    about = f" titled {' '.join(html.unescape(title.group(1)).split())!r}" if title else ""
    raise _Refused(f"it answers with a web page{about} instead of the file")


def confirmation_address(page: str, base: str) -> Optional[str]:
    """Where the "download anyway" form of a page leads, its hidden fields filled in; None without one."""
    form = re.search(r'<form[^>]*id="download-form"[^>]*action="([^"]*)"', page)
    if not form:
        return None
    hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', page)
    fields = [(html.unescape(name), html.unescape(value)) for name, value in hidden]
    action = urllib.parse.urljoin(base, html.unescape(form.group(1)))
    return f"{action}?{urllib.parse.urlencode(fields)}"
