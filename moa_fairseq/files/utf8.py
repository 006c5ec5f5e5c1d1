"""Python's UTF-8 mode, for this program and its children."""

import codecs
import io
import locale
import os
import sys


def utf8_environment() -> dict[str, str]:
    """The environment of a Python that reads and writes UTF-8 whatever the locale says, and its children."""
    environment = os.environ | {"PYTHONUTF8": "1"}
    environment.pop("PYTHONIOENCODING", None)
    return environment


def use_utf8() -> None:
    """Begin this program anew in Python's UTF-8 mode, unless it is in it or the locale's encoding is UTF-8.

    Python takes the names of files and the standard streams in the locale's encoding, and so do its children
    and libraries. To be called first of all: what was done before is done again.
    """
    standard = (sys.stdin, sys.stdout, sys.stderr)  # None where it is closed
    streams = [stream for stream in standard if isinstance(stream, io.TextIOWrapper)]
    encodings = {stream.encoding for stream in streams}
    encodings |= {sys.getfilesystemencoding(), locale.getpreferredencoding(False)}
    if {codecs.lookup(encoding).name for encoding in encodings} == {"utf-8"}:
        return
    environment = utf8_environment()
    if environment != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    for stream in streams:  # of a Python that ignores its environment (-E, -I)
        stream.reconfigure(encoding="utf-8")
