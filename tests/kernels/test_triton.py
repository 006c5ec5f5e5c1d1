"""The Triton backend: its checks on the GPU or under the interpreter, its machine code, its refusals.

Triton decides when it loads whether it compiles or interprets, so both run in processes of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.kernels import resolve_backend
from moa_fairseq.kernels import triton as backend

HERE = Path(__file__).parent


def python(*arguments, **environment):
    """Run Python without the interpreter of this process; the package is found where it was found here."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(Path(moa_fairseq.__file__).parents[1]), inherited.get("PYTHONPATH", "")]
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("checks", ["triton_checks.py", "triton_routing_checks.py"])
def test_equals_the_reference_on_the_gpu_or_under_the_interpreter(checks):
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / checks, "--tb=short", **interpreted
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def test_kernels_become_machine_code_for_ampere_and_hopper(tmp_path):
    """Without such a GPU: the largest tiles of each kernel compile, fit, and use its matrix instructions."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
        pytest.skip("compiling without the GPU is spelled differently before Triton 3.4")
    arguments = ("80", "90", "--dtypes", "bf16", "--sizes", "512 × 128")
    done = python(HERE / "triton_compile.py", *arguments, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    instructions = {line["instruction"] for line in lines if not line["kernel"].startswith("sum_")}
    assert len(lines) == 24
    assert all(0 <= line["shared"] <= line["limit"] for line in lines)
    assert instructions == {"mma.sync", "wgmma.mma_async"}, "products without tensor cores"
    assert all(line["hazards"] == [0, 0] for line in lines)


def test_the_package_needs_no_triton():
    done = python(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "from moa_fairseq.kernels import resolve_backend\n"
        "print(resolve_backend('auto'))\n"
        "resolve_backend('triton')",
    )
    assert done.returncode == 1 and "triton cannot run here: Triton is not installed" in done.stderr
    assert done.stdout.strip() == "grouped"


def test_refused_without_a_gpu_with_the_way_out(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "_INTERPRETED", False)
    with pytest.raises(UserError, match=r"torch sees no GPU.*auto or grouped.*--model-overrides"):
        resolve_backend("triton")


def test_which_gpus_triton_serves():
    assert backend.unfit((9, 0), "3.9.0") == backend.unfit((7, 5), "3.2.0") == ""
    assert backend.unfit((7, 0), "3.1.0") == ""
    assert "3.1 was the last, with torch 2.5" in backend.unfit((7, 0), "3.2.0")
    assert "3.2 was the last, with torch 2.6" in backend.unfit((7, 5), "3.10.1")
    assert "multiplies float16 to zeros" in backend.unfit((7, 0), "2.3.1")
    assert "below 7.0" in backend.unfit((6, 1), "3.1.0")
