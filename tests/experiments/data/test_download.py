"""Downloads from a server on this machine: resumed, from a mirror, and refused when they are not the file."""

import contextlib
import errno
import gzip
import hashlib
import http.server
import re
import subprocess
import threading
import time

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import download as module
from moa_fairseq.experiments.data.catalogue import PublicFile
from moa_fairseq.experiments.data.download import download

CONTENT = gzip.compress(bytes(range(256)) * 4000, mtime=0) + b"x" * 3_000_000


PLAIN = {  # path → status, content and its kind
    "/page.gz": (200, b"<html><title>Please log in</title></html>", "text/html"),
    "/disguised.gz": (200, b"<!DOCTYPE html><html>", "application/gzip"),
    "/busy.gz": (503, b"", "text/plain"),
    "/slow.gz": (408, b"", "text/plain"),
    "/often.gz": (429, b"", "text/plain"),
}
ODD = {  # path → status and headers; /endless ones never stop sending
    "/endless.gz": [200],
    "/astray.gz": [302, ("Location", "http://[::bad")],
    "/word.gz": [200, ("Content-Length", "abc")],
    "/minus.gz": [200, ("Content-Length", "-5")],
    "/digits.gz": [200, ("Content-Length", "9" * 5000)],
    "/416.gz": [416],
    "/416-range.gz": [416, ("Content-Range", "bytes */7")],
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT at /file.gz with ranges; `server.cut` bytes are sent per answer before it hangs up."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Range")))
        name = self.path.partition("?")[0]
        if name in PLAIN:
            return self._send(*PLAIN[name])
        if name in ODD:
            self.send_response(ODD[name][0])
            for header in ODD[name][1:]:
                self.send_header(*header)
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(ConnectionError):
                while name.startswith("/endless"):
                    self.wfile.write(b"\x1f\x8b" + b"x" * 99_998)
                    self.server.sent += 100_000
            return None
        if name == "/silent.gz":
            return time.sleep(1)
        if name not in ("/file.gz", "/plain.gz"):
            return self._send(404, b"gone", "text/plain")
        start = 0
        status = 200
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if (
            wanted
            and name != "/plain.gz"
            and self.headers.get("If-Range") in (None, self.server.tag)
        ):
            start = int(wanted.group(1))
            status = 206
            if start >= len(self.server.content):
                return self._send(416, b"", "text/plain")
        return self._send(status, self.server.content[start:], "application/gzip", start)

    def _send(self, status, body, kind, start=0):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.path != "/plain.gz":
            self.send_header("ETag", self.server.tag)
        if status == 206:
            total = start + len(body)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        elif status == 416:
            self.send_header("Content-Range", f"bytes */{len(self.server.content)}")
        self.end_headers()
        cut = self.server.cut.pop(0) if self.server.cut and status in (200, 206) else len(body)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[:cut])
        self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "PAUSES", (0, 0))
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.requests = []
    running.cut = []
    running.content = CONTENT
    running.tag = '"1"'
    running.sent = 0
    running.url = f"http://127.0.0.1:{running.server_port}/"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


SHA = hashlib.sha256(CONTENT).hexdigest()


def source(server, *names, **pins):
    urls = tuple(server.url + name for name in names or ("file.gz",))
    return PublicFile("sub/file.gz", urls, **{"sha256": SHA, **pins})


def fetch(server, folder, *names, **pins):
    return download(source(server, *names, **pins), folder)


def test_whole(server, tmp_path):
    path = fetch(server, tmp_path, size=len(CONTENT), md5=hashlib.md5(CONTENT).hexdigest())
    assert path == tmp_path / "sub" / "file.gz" and path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file.gz"]


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("file.gz", [None, "bytes=1500000-", "bytes=2200000-"]),
        ("plain.gz", [None, "bytes=1500000-"]),
    ],
)
def test_a_broken_connection_is_taken_up_where_it_broke(server, tmp_path, name, spans):
    """Or from the start, at a server without ranges."""
    server.cut = [1_500_000, 700_000][: len(spans) - 1]
    assert fetch(server, tmp_path, name).read_bytes() == CONTENT
    assert [span for _, span in server.requests] == spans


@pytest.mark.parametrize("second", ["file.gz?mirror", "plain.gz"])
def test_two_mirrors_that_hang_up_finish_what_the_other_began(server, tmp_path, second):
    """Each answer breaks off; the second mirror knows other time stamps, or no ranges at all."""
    tries = len(module.PAUSES) + 1
    server.cut = [450_000] * tries + [
        450_000 * (tries + 1) if second == "plain.gz" else 450_000
    ] * tries
    with pytest.raises(UserError, match="bytes were received"):
        fetch(server, tmp_path, "file.gz", second, size=len(CONTENT))
    received = (tmp_path / "sub" / "file.gz.part").stat().st_size
    assert received >= 450_000 * (tries + 1)  # the second one went on, and threw nothing away
    assert fetch(server, tmp_path, "file.gz", second, size=len(CONTENT)).read_bytes() == CONTENT
    assert server.requests[-1] == ("/file.gz", f"bytes={received}-")
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["file.gz"]


@pytest.fixture
def broken_off(server, tmp_path):
    """A download of which the first million bytes were received; the file that is half there."""
    server.cut = [1_000_000, 0, 0]
    with pytest.raises(UserError, match="1,000,000 bytes"):
        fetch(server, tmp_path)
    return tmp_path / "sub" / "file.gz.part"


@pytest.mark.parametrize(
    "content", [CONTENT[:-7], CONTENT[:999_999]], ids=["longer", "shorter"]
)
def test_a_mirror_of_another_length_is_not_gone_on_from(server, tmp_path, broken_off, content):
    """Neither where it has more than was received elsewhere, nor where it has less."""
    pins = {"size": len(CONTENT)}
    server.content = content
    with pytest.raises(UserError, match=f"{len(content):,} bytes instead of {len(CONTENT):,}"):
        fetch(server, tmp_path, "file.gz?mirror", **pins)
    server.content = CONTENT
    assert fetch(server, tmp_path, **pins).read_bytes() == CONTENT
    assert server.requests[-1][1] == "bytes=1000000-"


def test_a_download_that_was_whole_but_for_its_name_is_not_fetched_again(
    server, tmp_path, broken_off
):
    broken_off.write_bytes(CONTENT)
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert server.requests[3:] == [("/file.gz", f"bytes={len(CONTENT)}-")]


def test_what_is_sent_all_over_again_takes_the_place_of_a_longer_part(
    server, tmp_path, broken_off
):
    """By a server without ranges: the part's tail is not kept, and one request is enough."""
    broken_off.write_bytes(b"\x1f\x8b" + b"?" * (len(CONTENT) + 99_998))
    server.requests.clear()
    assert fetch(server, tmp_path, "plain.gz").read_bytes() == CONTENT
    assert len(server.requests) == 1


@pytest.mark.parametrize("pins", [{}, {"sha256": None}])
def test_a_part_that_turns_out_wrong_is_fetched_anew_at_once(
    server, tmp_path, broken_off, pins
):
    """Without a checksum nothing is gone on from: nobody could tell an older file's beginning."""
    broken_off.write_bytes(b"\x1f\x8b" + b"?" * 999_998)
    server.tag = '"2"'
    assert fetch(server, tmp_path, **pins).read_bytes() == CONTENT
    assert server.requests[-1][1] is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_download_is_taken_up_by_the_next_run(
    server, tmp_path, monkeypatch, error
):
    count = iter([None, error()])

    class Bar(module.tqdm):
        def update(self, amount=1):
            problem = next(count)
            if problem:
                raise problem

    with monkeypatch.context() as patch:
        patch.setattr(module, "tqdm", Bar)
        with pytest.raises(error):
            fetch(server, tmp_path)
    assert not (tmp_path / "sub" / "file.gz").exists()
    kept = (tmp_path / "sub" / "file.gz.part").stat().st_size
    assert fetch(server, tmp_path).read_bytes() == CONTENT
    assert 0 < kept < len(CONTENT) and server.requests[1][1] == f"bytes={kept}-"


def test_the_next_mirror_serves(server, tmp_path):
    assert (
        fetch(server, tmp_path, "gone.gz", "page.gz", "busy.gz", "file.gz").read_bytes()
        == CONTENT
    )
    assert [name for name, _ in server.requests].count("/busy.gz") == 3


@pytest.mark.parametrize(
    ("names", "pins", "words", "requests"),
    [
        (["page.gz"], {}, ["page.gz", "web page"], 1),
        (["disguised.gz"], {}, ["disguised.gz", "is a web page instead of the file"], 1),
        (["gone.gz"], {}, ["gone.gz", "HTTP 404"], 1),
        (["astray.gz"], {}, ["astray.gz"], 3),
        (["busy.gz"], {}, ["HTTP 503"], 3),
        (["slow.gz"], {}, ["HTTP 408"], 3),
        (["often.gz"], {}, ["HTTP 429"], 3),
        (["file.gz"], {"sha256": "0" * 64}, [SHA, "instead of 000"], 1),
        (["file.gz"], {"sha256": None, "md5": "0" * 32}, ["md5"], 1),
        (["file.gz"], {"size": 12}, [f"{len(CONTENT):,} bytes instead of 12"], 1),
        (["gone.gz", "page.gz"], {}, ["gone.gz", "page.gz"], 2),
        (["word.gz"], {}, ["word.gz: ", "Content-Length"], 1),
        (["minus.gz"], {}, ["minus.gz: ", "Content-Length"], 1),
        (["digits.gz"], {}, ["digits.gz: ", "Content-Length"], 1),
        (["416.gz"], {}, ["HTTP 416"], 1),
        (["416.gz"], {"sha256": None}, ["HTTP 416"], 1),
        (["416-range.gz"], {"size": 7}, ["HTTP 416"], 1),
        (["endless.gz"], {"size": 300_000}, ["300,000 bytes"], 1),
        (["endless.gz"], {"about": 150_000, "sha256": None}, ["300,000 bytes"], 1),
    ],
)
def test_what_is_not_the_file_is_refused(server, tmp_path, names, pins, words, requests):
    with pytest.raises(UserError) as error:
        fetch(server, tmp_path, *names, **pins)
    for word in [*words, "Could not download file.gz", "--from"]:
        assert word in str(error.value)
    assert "\n" not in str(error.value) and len(server.requests) == requests
    assert not list((tmp_path / "sub").iterdir())  # nothing wrong is gone on from
    assert server.sent < 30_000_000  # what the network's buffers hold, and not what a disk does


@pytest.mark.parametrize(
    ("name", "kind"), [("file.gz", "gzip"), ("file.zip", "zip"), ("file.tar", "tar")]
)
def test_formats(server, tmp_path, name, kind):
    server.content = b"something else"
    wrong = source(server, sha256=None)._replace(name=name)
    with pytest.raises(UserError, match=f"is not a {kind} file"):
        download(wrong, tmp_path)


def test_nobody_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PAUSES", (0,))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    gone = PublicFile("file.gz", ("http://127.0.0.1:9/file.gz",))
    with pytest.raises(
        UserError, match=r"127\.0\.0\.1:9/file\.gz: Failed to establish .* refused\."
    ):
        download(gone, tmp_path)


def test_a_server_that_sends_nothing_is_one_that_broke_off(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    assert (
        download(source(server, "silent.gz", "file.gz"), tmp_path, ()).read_bytes() == CONTENT
    )
    assert [path for path, _ in server.requests] == ["/silent.gz", "/file.gz"]


def test_pip_has_an_end_too(tmp_path, monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(module.subprocess, "run", hang)
    wheel = PublicFile("x-1-py3-none-any.whl", ("pip:x==1",), size=1024 * 1000, sha256="0" * 64)
    with pytest.raises(UserError, match=r"pip .* 1,600 seconds"):
        download(wheel, tmp_path, ())
    assert not list(tmp_path.glob(".*"))


def test_full_disk(server, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.tqdm, "update", full)
    with pytest.raises(UserError, match="disk is full"):
        fetch(server, tmp_path)
