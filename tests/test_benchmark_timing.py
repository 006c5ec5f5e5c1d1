"""What the benchmarks say of themselves: the backend that was measured, the commit, how it was timed."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from moa_fairseq.experiments.records import provenance
from moa_fairseq.layers.experts import projection

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("_bench", "kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import _bench

    return _bench


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--rounds", "-1"], ["--device", "cuda"]])
def test_what_cannot_be_timed_is_refused_by_its_flag(bench, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["attention.py", *words])
    with pytest.raises(SystemExit) as refusal:
        bench.arguments("timing")
    assert refusal.value.code == 2
    assert " ".join(words) in capsys.readouterr().err


@pytest.mark.parametrize("trusted", [True, False])
def test_a_result_names_its_backend_and_commit(bench, trusted, monkeypatch, tmp_path, capsys):
    """On a GPU whose kernels were not checked `auto` is `grouped`: said at once, and in the file."""
    found = ("triton", "9 checks passed") if trusted else ("grouped", "not triton: not checked")
    monkeypatch.setattr(projection, "backend_of_auto", lambda dtype: found)
    monkeypatch.setattr(
        sys, "argv", ["x.py", "--device", "cuda", "--miniature", "--output", str(tmp_path)]
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(provenance, "commit", lambda: "abc")
        args = bench.arguments("a benchmark")
    assert ("`auto` is grouped" in capsys.readouterr().err) is not trusted
    monkeypatch.setattr(provenance, "commit", lambda: "the next one, made while it measured")
    bench.report("x", args, {"rows": {}}, Figure())
    written = json.loads((tmp_path / "x-cuda.json").read_text())
    assert (
        written["auto"] == {"backend": found[0], "why": found[1]} and written["commit"] == "abc"
    )


class Graph:
    """A stand-in for torch.cuda's: it notes what happens, and refuses steps that wait for the host."""

    def __init__(self):
        self.mode = "default"
        self.captured = 0
        self.replays = 0

    def install(self, monkeypatch):
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(
            torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode)
        )
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextlib.contextmanager
    def capture(self, graph):
        self.captured += 1
        yield

    def replay(self):
        self.replays += 1


def test_on_a_gpu_graphs_are_replayed_where_nothing_waits(bench, monkeypatch):
    graph = Graph()
    graph.install(monkeypatch)

    def waits():
        if graph.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    times = bench.replay_times({"plain": lambda: None, "waits": waits}, 2, "cuda")
    assert list(times) == ["plain"] and graph.captured == 1 and graph.replays >= 3
    assert graph.mode == "default"


def test_on_a_cpu_times_are_eager_and_say_so(bench, monkeypatch, capsys):
    import kernels

    bench._say.cache_clear()
    args = argparse.Namespace(device="cpu", torch_dtype=torch.float32, rounds=1, miniature=True)
    product = torch.ones(4, 4)
    monkeypatch.setattr(kernels, "gemm", lambda *_: (lambda: product @ product, 64))
    rows = kernels.measure({"tokens": 8, "E": 4, "K": 2, "D": 8}, args)["rows"]
    assert {row["timed"] for row in rows.values()} == {"eager"} and "bmm step" in rows
    assert all(row["seconds"] == row["eager_seconds"] for row in rows.values())
    assert "no CUDA graphs on a CPU" in capsys.readouterr().out


def test_a_profile_lists_what_takes_a_step(bench):
    x = torch.ones(64, 64)
    rows = bench.profile(lambda: x @ x, "cpu")
    assert any(row["name"] == "aten::mm" and row["count"] == 1 for row in rows)
    assert rows == sorted(rows, key=lambda row: -row["microseconds"])
