"""Is a file the one it should be? Checksums where they are known, else size and format."""

from __future__ import annotations

import hashlib
import re
import tarfile
import zipfile
from pathlib import Path

from moa_fairseq.data_prep.catalogue import PublicFile
from moa_fairseq.data_prep.stage_folder import sha256_of

_HTML = re.compile(rb"^\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)
_GZIP = (".tgz", ".gz")


def flaw_of(path: Path, source: PublicFile) -> str:
    """What is wrong with a file, as the second half of a sentence; "" when nothing is.

    Looks at the beginning, the size, and sha256 or md5 where they are published.
    """
    with open(path, "rb") as stream:
        head = stream.read(512)
    if _HTML.match(head):
        return "is a web page instead of the file (a login, an error or a confirmation page)"
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        return f"has {size:,} bytes instead of {source.size:,}"
    if not _has_the_format(path, head, source.name):
        return f"is no {_format_name(source.name)} file"
    for algorithm in ("sha256", "md5"):
        expected = getattr(source, algorithm)
        if expected:
            found = (sha256_of if algorithm == "sha256" else md5_of)(path)
            return "" if found == expected else f"has the {algorithm} {found} instead of {expected}"
    return ""


def _has_the_format(path: Path, head: bytes, name: str) -> bool:
    if name.endswith(_GZIP):
        return head[:2] == b"\x1f\x8b"
    if name.endswith(".zip"):
        return zipfile.is_zipfile(path)
    return tarfile.is_tarfile(path) if name.endswith(".tar") else bool(head)


def _format_name(name: str) -> str:
    return "gzip" if name.endswith(_GZIP) else name.rpartition(".")[2]


def md5_of(path: Path) -> str:
    """Hexadecimal md5 of a file."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
