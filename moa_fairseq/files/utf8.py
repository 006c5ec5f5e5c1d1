"""Python's UTF-8 mode, for this program and its children."""

import codecs
import io
import locale
import os
import sys


def utf8_environment() -> dict[str, str]:
    """The environment in which Python and its children read and write UTF-8, whatever the locale says."""
    environment = os.environ | {"PYTHONUTF8": "1"}
    environment.pop("PYTHONIOENCODING", None)
    return environment


def use_utf8() -> None:
    """Restart this program in Python's UTF-8 mode, unless it already reads and writes UTF-8.

    Python reads the names of files and the standard streams in the locale's encoding, and so do its children
    and libraries. This must be called first, because the restarted program repeats everything before it.
    """
    standard = (sys.stdin, sys.stdout, sys.stderr)  # a closed stream is None
    streams = [stream for stream in standard if isinstance(stream, io.TextIOWrapper)]
    encodings = {stream.encoding for stream in streams}
    encodings |= {sys.getfilesystemencoding(), locale.getpreferredencoding(False)}
    if {codecs.lookup(encoding).name for encoding in encodings} == {"utf-8"}:
        return
    environment = utf8_environment()
    if environment != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    for stream in streams:  # with -E or -I Python ignores its environment
        stream.reconfigure(encoding="utf-8")
