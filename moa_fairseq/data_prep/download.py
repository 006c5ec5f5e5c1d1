"""Fetching one public file: resumable, from the first mirror that serves the right one."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any, Callable, Dict, List, Optional

from tqdm import tqdm

from moa_fairseq.data_prep.catalogue import PublicFile
from moa_fairseq.data_prep.stage_folder import disk_errors
from moa_fairseq.data_prep.verify import flaw_of
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write

BLOCK = 1 << 20
TIMEOUT = 60
# Tries for each address after the first; what was received is kept between them.
PAUSES = (1, 5, 20)
# Some servers refuse Python's own name.
HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; moa_fairseq data preparation)"}
GOOGLE_DRIVE = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"
_NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class _Refused(Exception):
    """This address does not serve the file; the next one may."""


def download(source: PublicFile, folder: Path, say: Callable[[str], None]) -> Path:
    """Fetch `source` to `folder/<its name>` and check it; returns the path.

    The bytes go to `<name>.part`, which a later call continues; the final name appears when the file
    was found right. Raises UserError naming every address that failed, and what to do.
    """
    target = folder / source.name
    failures = []
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for url in source.urls:
            say(f"downloading {url}")
            try:
                part = _Part(target)
                _fetch(_address(url), part)
                flaw = flaw_of(part.path, source)
                if flaw:
                    part.discard()
                    raise _Refused(f"what it serves {flaw}")
                part.finish(target)
                return target
            except _Refused as why:
                failures.append(f"{url}: {why}")
    raise UserError(
        f"Could not download {target.name}. {'; '.join(failures)}. Run the same command again to go on from "
        "what was received; or fetch the file in another way, put it into a folder and name that folder with "
        "--from (`moa-fairseq recipe`: --data)."
    )


class _Part:
    """The unfinished file and what is known of where it comes from."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self.note = target.with_name(target.name + ".part.json")

    def begun_at(self, url: str) -> Dict[str, Any]:
        """The note on a file that this address began to send; {} when there is nothing to go on from."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note if note.get("url") == url and self.size() else {}

    def size(self) -> int:
        """Bytes received so far."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def remember(self, **note: Any) -> None:
        """Write down what a continuation needs."""
        with atomic_write(self.note) as stream:
            json.dump(note, stream)

    def finish(self, target: Path) -> None:
        """Give the file its final name."""
        os.replace(self.path, target)
        self.note.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forget what was received."""
        for path in (self.path, self.note):
            path.unlink(missing_ok=True)


def _address(url: str) -> str:
    return GOOGLE_DRIVE.format(url.partition(":")[2]) if url.startswith("gdrive:") else url


def _fetch(url: str, part: _Part) -> None:
    """Receive everything at `url` into the part file. Raises _Refused when it cannot be had there."""
    for pause in (*PAUSES, None):
        try:
            _receive(url, part)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is longer than the file
                part.discard()
            elif error.code < 500 and error.code not in (408, 429):
                raise _Refused(f"HTTP {error.code} {error.reason}") from error
            why = f"HTTP {error.code} {error.reason}"
        except _NETWORK as error:
            why = f"{getattr(error, 'reason', None) or error or type(error).__name__}"
        if pause is None:
            kept = f" ({part.size():,} bytes were received and are kept)" if part.size() else ""
            raise _Refused(why + kept)
        time.sleep(pause)


def _receive(url: str, part: _Part) -> None:
    note = part.begun_at(url)
    headers = dict(HEADERS)
    if note.get("validator"):
        headers.update({"Range": f"bytes={part.size()}-", "If-Range": note["validator"]})
    with _open(url, headers) as answer:
        goes_on = answer.status == 206
        total = _total(answer, part.size() if goes_on else 0)
        validator = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        part.remember(url=url, validator=None if (validator or "W/").startswith("W/") else validator)
        with open(part.path, "ab" if goes_on else "wb") as stream:
            _copy(answer, stream, total, part.path.name)
    if total is not None and part.size() < total:
        raise http.client.IncompleteRead(b"", total - part.size())


def _open(url: str, headers: Dict[str, str]) -> http.client.HTTPResponse:
    """The answer to a request; a page that asks for confirmation (large files on Google Drive) gets it."""
    answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    if "text/html" not in answer.headers.get("Content-Type", ""):
        return answer
    with answer:
        page = answer.read(BLOCK).decode("utf-8", errors="replace")
    confirmed = confirmation_address(page, url)
    if confirmed:
        answer = urllib.request.urlopen(urllib.request.Request(confirmed, headers=headers), timeout=TIMEOUT)
        if "text/html" not in answer.headers.get("Content-Type", ""):
            return answer
        answer.close()
    title = re.search(r"<title[^>]*>(.*?)</title>", page, re.IGNORECASE | re.DOTALL)
    about = f" titled {' '.join(html.unescape(title.group(1)).split())!r}" if title else ""
    raise _Refused(f"it answers with a web page{about} instead of the file")


def confirmation_address(page: str, base: str) -> Optional[str]:
    """Where the "download anyway" form of a page leads, its hidden fields filled in; None without one."""
    form = re.search(r'<form[^>]*id="download-form"[^>]*action="([^"]*)"', page)
    if not form:
        return None
    fields: List = [
        (html.unescape(name), html.unescape(value))
        for name, value in re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', page)
    ]
    action = urllib.parse.urljoin(base, html.unescape(form.group(1)))
    return f"{action}?{urllib.parse.urlencode(fields)}"


def _total(answer: http.client.HTTPResponse, received: int) -> Optional[int]:
    """Bytes of the whole file, where the server tells."""
    length = answer.headers.get("Content-Length")
    if answer.status == 206:
        span = re.match(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if not span or int(span.group(1)) != received:
            raise _Refused("it answers with another part of the file than was asked for")
        return int(span.group(2))
    return int(length) if length else None


def _copy(answer: IO[bytes], stream: IO[bytes], total: Optional[int], label: str) -> None:
    look = {"unit": "B", "unit_scale": True, "desc": label, "disable": None, "leave": False}
    received = stream.tell()
    with contextlib.suppress(http.client.IncompleteRead), tqdm(total=total, initial=received, **look) as bar:
        while block := answer.read(BLOCK):
            stream.write(block)
            bar.update(len(block))
