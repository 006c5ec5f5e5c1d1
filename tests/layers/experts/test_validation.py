"""The check of Triton's kernels on a machine: what it compiles and writes, and what `auto` makes of it."""

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from test_triton import python

import moa_fairseq
from moa_fairseq.files import shipped
from moa_fairseq.layers.experts import (
    ExpertPermutation,
    compile_ahead,
    every_expert,
    projection,
    resolve_backend,
    validate,
    validation,
)
from moa_fairseq.layers.experts import triton as backend

HERE = Path(__file__).parent


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """A machine with a GPU that Triton serves, and an empty cache folder; the kernels are never run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU / 80 GB")
    monkeypatch.setattr(backend, "why_not", lambda: "")
    monkeypatch.setattr(projection, "_checked", projection._checked)
    caches = (validation.machine, projection._auto_backend, projection._announce)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


def automatic():
    projection._auto_backend.cache_clear()
    return projection._auto_backend()


def outcome(failed=(), dtypes=("bfloat16", "float16", "float32")):
    return validation.CheckResult(
        {"routing": 3, "bfloat16": 4}, {"bfloat16": list(failed)} if failed else {}, dtypes
    )


def test_auto_takes_triton_only_where_it_was_checked(on_a_gpu, caplog):
    chosen, reason = automatic()
    assert chosen == "grouped" and "python -m moa_fairseq.layers.experts.validate" in reason
    written = validation.write(outcome())
    assert written.parent == on_a_gpu / "moa_fairseq" and "A_GPU___80_GB" in written.name
    with caplog.at_level("INFO"):
        projection._auto_backend.cache_clear()
        assert resolve_backend("auto") == "auto"
    assert "expert backend: triton" in caplog.text and "7 checks passed" in caplog.text
    validation.write(outcome(["MoA queries: weight is off"]))
    assert automatic()[0] == "auto" and "1 of 7 checks failed" in automatic()[1]
    assert projection.backend_of_auto(torch.bfloat16)[0] == "grouped"
    assert projection.backend_of_auto(torch.float16)[0] == "triton"
    written = validation.write(
        validation.CheckResult({"routing": 3}, {"routing": ["x is wrong"]}, ["float16"])
    )
    assert automatic()[0] == "grouped" and "1 of 3 checks failed" in automatic()[1]
    validation.write(outcome())
    for broken in ("{", "[]", json.dumps({**json.loads(written.read_text()), "triton": "0.0"})):
        written.write_text(broken)
        assert automatic()[0] == "grouped", broken


def test_a_check_of_another_machine_is_not_believed(on_a_gpu):
    """Of another GPU, torch, Triton or source text, each alone: the name of the file is not all."""
    written = validation.write(outcome())
    good = json.loads(written.read_text())
    assert automatic()[0] == "auto" and {"gpu", "torch", "triton", "kernels"} <= good.keys()
    for key in validation.machine():
        written.write_text(json.dumps({**good, key: "other"}))
        assert automatic()[0] == "grouped", key
        assert "something else" in automatic()[1]


def test_every_source_of_the_kernels_is_part_of_what_was_checked(
    on_a_gpu, monkeypatch, tmp_path
):
    folder = Path(validation.__file__).parent / "triton"
    shutil.copytree(folder, tmp_path / "triton")
    monkeypatch.setattr(validation, "__file__", str(tmp_path / "validation.py"))
    before = validation.machine()["kernels"]
    for source in folder.glob("*.py"):
        copy = tmp_path / "triton" / source.name
        copy.write_bytes(source.read_bytes() + b"#")
        validation.machine.cache_clear()
        assert validation.machine()["kernels"] != before, source.name
        copy.write_bytes(source.read_bytes())


def test_auto_trusts_the_dtypes_that_were_gone_through(on_a_gpu, monkeypatch):
    """A check that was stopped: bfloat16 passed, the others have not been looked at."""
    validation.write(outcome(dtypes=[]))
    assert automatic()[0] == "grouped" and "stopped after 7 cases" in automatic()[1]
    validation.write(outcome(dtypes=["bfloat16"]))
    assert automatic()[0] == "auto"
    assert projection.backend_of_auto(torch.bfloat16)[0] == "triton"
    assert projection.backend_of_auto(torch.float16)[0] == "grouped"
    taken = []
    monkeypatch.setattr(backend, "takes", lambda rows, weight: True)
    monkeypatch.setattr(backend, "project", lambda rows, *_: taken.append(rows.dtype))
    for device in ("cpu", "cpu bfloat16"):
        monkeypatch.setitem(every_expert._STEP, device, -1)
    order = ExpertPermutation(torch.tensor([[0, 2], [1, 2]]), 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = torch.ones(2, 8, dtype=dtype)
        weight = torch.ones(3, 4, 8, dtype=dtype)
        projection.project(rows, weight, order, is_up=True, backend="auto")
    assert taken == [torch.bfloat16]


def test_a_stopped_check_leaves_what_it_knows_and_goes_on(on_a_gpu, monkeypatch):
    seen = []
    stop_at = "float16, sizes of no tile, MoA outputs"

    def check(dtype, name, use, device, repeats):
        group = f"{str(dtype)[6:]}, {name}, {use}"
        if group == stop_at:
            raise KeyboardInterrupt
        seen.append(group)
        yield group, []
        yield group, []

    monkeypatch.setattr(validate, "_check_products", check)
    monkeypatch.setattr(validate, "check_routing", lambda device: iter([("routing", [])]))
    monkeypatch.setattr(backend, "takes", lambda *_: True)
    with pytest.raises(KeyboardInterrupt):
        validate._check(["bfloat16", "float16"], "cpu", 1)
    known, _ = validation.read()
    assert known.dtypes == ["bfloat16"] and sum(known.groups.values()) == 1 + 2 * len(seen)
    assert automatic()[0] == "auto", "what is known is of no use"
    before = list(seen)
    stop_at = ""
    validate._check(["bfloat16", "float16"], "cpu", 1)
    assert len(seen) == len(set(seen)) == 16 and seen[: len(before)] == before
    assert validation.read()[0].dtypes == ["bfloat16", "float16"]


def test_what_failed_is_checked_once_more(on_a_gpu, monkeypatch):
    validation.write(outcome(["weight is off"]))
    monkeypatch.setattr(validate, "_check_products", lambda *_: iter([("again", [])]))
    monkeypatch.setattr(backend, "takes", lambda *_: True)
    found = validate._check(["bfloat16"], "cpu", 1)
    assert found.failed == {} and found.dtypes == ["bfloat16"] and found.groups["routing"] == 3


@pytest.mark.thorough
def test_processes_compile_all_that_the_check_runs(tmp_path):
    """Side by side, beforehand: not one kernel is left for the check itself to compile."""
    pytest.importorskip("triton", reason="Triton is not installed")
    (tmp_path / "sitecustomize.py").write_text("import no_gpu")
    program = """
import os, sys, torch
from pathlib import Path
from moa_fairseq.layers.experts import compile_ahead, validate
def kernels():
    return {path.parent.name for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")}
if __name__ == "__main__":
    cases = [(torch.bfloat16, "a layer", use, "cpu") for use in ("MoA queries", "MoA outputs")]
    compile_ahead.run(validate.compile_case, cases, 2)
    before = kernels()
    labels = [label for case in cases for label, _ in validate._check_products(*case, 1)]
    print(len(before), len(kernels() - before), len(labels), file=sys.stderr)
"""
    (tmp_path / "program.py").write_text(program)
    paths = (tmp_path, HERE, Path(moa_fairseq.__file__).parents[1])
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = python(
        tmp_path / "program.py", PYTHONPATH=os.pathsep.join(map(str, paths)), **environment
    )
    assert "compiled 2 cases" in done.stdout and "not compiled" not in done.stdout, (
        done.stdout + done.stderr
    )
    beforehand, later, checks = map(int, done.stderr.split("\n")[-2].split())
    assert beforehand >= 8 and later == 0 and checks == 2 * (1 + 4)


def wait_forever(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def test_workers_of_a_killed_check_end(tmp_path, monkeypatch):
    """As of a training that its scheduler ends; without a parent they would stay on the GPU."""
    fork = multiprocessing.get_context("fork")  # spawned ones import torch first
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: fork)
    check = fork.Process(target=compile_ahead.run, args=(wait_forever, [(tmp_path,)] * 2, 2))
    check.start()
    deadline = time.monotonic() + 20
    while len(workers := os.listdir(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check.kill()
    check.join()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_another_gpu_of_this_kind_showed_comes_with_the_package(on_a_gpu, monkeypatch):
    """Only where the GPU, torch, Triton and the kernels' text are those of the record."""
    (record,) = shipped("results/kernels").glob("*H200*.json")
    found = json.loads(record.read_text(encoding="utf-8"))
    key = {name: found[name] for name in validation.machine()}
    monkeypatch.setattr(validation, "machine", lambda: key)
    assert automatic()[0] == "auto" and validation.verdict()[0] == ("bfloat16", "float16")
    assert [validation.is_open(dtype) for dtype in validation.DTYPES] == [False, False, True]
    validation.write(
        validation.CheckResult({"routing": 4, "float32, a layer": 2}, {}, ["float32"])
    )
    assert set(validation.verdict()[0]) == set(validation.DTYPES)
    validation.write(
        validation.CheckResult({"float16, a layer": 2}, {"float16, a layer": ["off"]}, [])
    )
    assert validation.verdict()[0] == ("bfloat16",)
    validation.write(validation.CheckResult({"float16, a layer": 2}, {}, ["float16"]))
    theirs = validation.read(record)[0]
    theirs.failed["float16, a layer"] = ["off there"]  # and right here
    with pytest.MonkeyPatch.context() as patch:
        read = validation.read
        patch.setattr(
            validation, "read", lambda file=None: (theirs, "there") if file else read()
        )
        assert set(validation.verdict()[0]) == {"bfloat16", "float16"}
    for name in found.keys() & key.keys():
        monkeypatch.setattr(validation, "machine", lambda other=name: {**key, other: "another"})
        assert automatic()[0] == "grouped" and validation.is_open("bfloat16"), name


def test_a_dtype_that_the_kernels_do_not_take_is_asked_about_once(on_a_gpu, monkeypatch):
    monkeypatch.setattr(validate, "check_routing", lambda device: iter([("routing", [])]))
    monkeypatch.setattr(backend, "takes", lambda *_: False)
    assert validation.is_open("bfloat16")
    assert validate._check(["bfloat16"], "cpu", 1).dtypes == []
    assert not validation.is_open("bfloat16") and validation.is_open("float16")


def test_a_full_gpu_says_nothing_about_the_kernels(on_a_gpu, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(validate, "_configurations", lambda *_: iter([("tuned", {})]))
    monkeypatch.setattr(validate, "_run", lambda *a: full() if a[-1] == "triton" else {})
    monkeypatch.setattr(validate, "check_routing", lambda device: iter([("routing", [])]))
    monkeypatch.setattr(backend, "takes", lambda *_: True)
    with pytest.raises(torch.OutOfMemoryError):
        validate._check(["bfloat16"], "cpu", 1)
    assert validation.read()[0].failed == {} and validation.is_open("bfloat16")


def test_what_is_not_as_good_as_torch_is_complained_about():
    exact = {"output": torch.ones(3, dtype=torch.float64)}
    good = {"output": torch.ones(3)}
    bad = {"output": torch.tensor([1.0, 1.0, 1.01])}
    assert validate.complaints(good, good, exact) == []
    for wrong in (bad["output"], torch.tensor([1.0, 1.0, float("nan")])):
        assert "output is off" in validate.complaints({"output": wrong}, good, exact)[0]
