"""The Triton backend: its checks on the GPU or under the interpreter, its machine code, its refusals.

Triton decides when it loads whether it compiles or interprets, so both run in processes of their own.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.layers.experts import ExpertPermutation, projection, resolve_backend
from moa_fairseq.layers.experts import triton as backend

HERE = Path(__file__).parent


def python(*arguments, **environment):
    """Run Python without the interpreter of this process; the package is found where it was found here."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(Path(moa_fairseq.__file__).parents[1]), inherited.get("PYTHONPATH", "")]
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **environment,
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def compile_side_by_side(checks, processes, **environment):
    """As many processes as that run a share of the checks each; → the names of the tests of each."""
    command = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=no", checks)
    with ThreadPoolExecutor(processes) as pool:
        shares = [f"{i}/{processes}" for i in range(processes)]
        done = pool.map(
            lambda i: python(*command, MOA_FAIRSEQ_COMPILE=i, **environment), shares
        )
        return [re.findall(r"::(\S+) ", each.stdout) for each in done]


@pytest.mark.thorough
def test_processes_share_the_checks_and_compile_what_tuning_may_time(tmp_path):
    checks = tmp_path / "test_share.py"
    checks.write_text("""
import pytest
from moa_fairseq.layers.experts.triton import table
@pytest.mark.parametrize("number", range(5))
def test_one(number):
    assert table._ahead is table.timed
""")
    pytest.importorskip("triton", reason="Triton is not installed")
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    shares = compile_side_by_side(checks, 2)
    assert [len(share) for share in shares] == [3, 2] and not set(shares[0]) & set(shares[1])
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", checks, MOA_FAIRSEQ_COMPILE="0/1"
    )
    assert "5 passed" in done.stdout, done.stdout


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("checks", ["triton_checks.py", "triton_routing_checks.py"])
def test_equals_the_reference_on_the_gpu_or_under_the_interpreter(checks):
    pytest.importorskip("triton", reason="Triton is not installed")
    interpreted = (
        {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    )
    if torch.cuda.is_available():
        compile_side_by_side(HERE / checks, os.cpu_count())
    done = python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        HERE / checks,
        "--tb=short",
        **interpreted,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def compiled(tmp_path, *arguments):
    """What triton_compile.py says of each kernel: with the Triton at hand, or the one in a folder.

    MOA_FAIRSEQ_TEST_TRITON=DIR names another, as torch for a GPU brings it: `pip install --target DIR
    triton==3.6.0`.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = os.environ.get("MOA_FAIRSEQ_TEST_TRITON", "")
    root = str(Path(moa_fairseq.__file__).parents[1])
    search = os.pathsep.join(filter(None, [folder, root, os.environ.get("PYTHONPATH", "")]))
    version = python("-c", "import triton; print(triton.__version__)", PYTHONPATH=search).stdout
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 4):
        pytest.skip("compiling without the GPU is spelled differently before Triton 3.4")
    options = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": search}
    done = python(HERE / "triton_compile.py", *arguments, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.thorough
@pytest.mark.slow
def test_kernels_become_machine_code_for_ampere_and_hopper(tmp_path):
    """Without such a GPU: the largest tiles of each kernel compile, fit, and use its matrix instructions."""
    lines = compiled(tmp_path, "80", "90", "--dtypes", "bf16", "--sizes", "512 × 128")
    products = [line for line in lines if line["is_product"]]
    assert len(lines) == 36 and len(products) == 18
    assert all(0 <= line["shared"] <= line["limit"] for line in lines)
    instructions = {line["instruction"] for line in products}
    assert instructions == {"mma.sync", "wgmma.mma_async"}, "products without tensor cores"
    assert all(line["hazards"] == [0, 0] for line in lines)


@pytest.mark.thorough
@pytest.mark.slow
def test_no_configuration_of_hopper_has_a_hazard_of_its_pipeline(tmp_path):
    """Every tile that tuning may pick, of a kernel with each pipelined loop there is."""
    options = ("--all-configs", "--products-only", "--dtypes", "bf16", "--sizes", "512 × 128")
    kinds = ("outputs", "gate of outputs", "outer", "route")
    lines = compiled(tmp_path, "90", *options, "--kernels", *kinds)
    assert {line["kernel"] for line in lines} == set(kinds) and len(lines) > 20
    assert all(line["hazards"] == [0, 0] for line in lines)


@pytest.mark.thorough
def test_float32_without_tf32_has_one_configuration_that_fits_the_registers(tmp_path):
    options = ("--all-configs", "--dtypes", "fp32", "--sizes", "512 × 128")
    kinds = ("outputs", "gate of outputs", "outer")
    lines = compiled(tmp_path, "90", *options, "--kernels", *kinds)
    assert sorted(line["kernel"] for line in lines) == sorted(kinds)
    # bytes a thread; Triton 3.6 keeps 8, the largest tiles would spill 13,136
    assert max(line["stack"] or 0 for line in lines) < 64, "registers are spilled"


@pytest.mark.thorough
@pytest.mark.parametrize("pendings, found", [(1, "(1, 0)"), (0, "(0, 0)")])
def test_hazards_are_seen_in_the_compilers_own_words(pendings, found):
    """A tile is copied into what an unfinished product reads; and into what one read that was waited for."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"""
  %x = scf.for %i = %c0 to %c8 step %c1 iter_args(%acc = %zero) -> (f32) : i32 {{
    %v = ttg.memdesc_trans %a {{order = array<i32: 1, 0>}}
    %d = ttng.warp_group_dot %v, %b, %acc {{inputPrecision = 0 : i32, isAsync = true}}
    %p:3 = ttng.warp_group_dot_wait %d, %a, %b {{pendings = {pendings} : i32}}
    %t = ttg.async_copy_global_to_local %ptr, %a mask %m
    scf.yield %p : f32
  }}"""
    paths = os.pathsep.join([str(HERE), str(Path(moa_fairseq.__file__).parents[1])])
    program = f"from triton_compile import hazards; print(hazards({code!r}))"
    done = python("-c", program, PYTHONPATH=paths)
    assert done.stdout.strip() == found, done.stderr


def test_the_package_needs_no_triton():
    done = python(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "from moa_fairseq.layers.experts import resolve_backend\n"
        "print(resolve_backend('auto'))\n"
        "resolve_backend('triton')",
    )
    assert (
        done.returncode == 1
        and "triton cannot run here: Triton is not installed" in done.stderr
    )
    assert done.stdout.strip() == "grouped"


def test_refused_without_a_gpu_with_the_way_out(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    with pytest.raises(
        UserError, match=r"torch sees no GPU.*auto or grouped.*--model-overrides"
    ):
        resolve_backend("triton")


def test_which_gpus_triton_serves():
    assert backend.unfit((9, 0), "3.9.0") == backend.unfit((7, 5), "3.2.0") == ""
    assert backend.unfit((7, 0), "3.1.0") == ""
    assert "3.1 was the last, with torch 2.5" in backend.unfit((7, 0), "3.2.0")
    assert "3.2 was the last, with torch 2.6" in backend.unfit((7, 5), "3.10.1")
    assert "below 7.0" in backend.unfit((6, 1), "3.1.0")


@pytest.mark.thorough
def test_a_product_tells_a_compiler_that_errs():
    """Asked before use where Triton is old and the GPU older: under the interpreter, right and wrong."""
    pytest.importorskip("triton", reason="Triton is not installed")
    program = """
import torch
from moa_fairseq.layers.experts import triton
from moa_fairseq.layers.experts.triton import launch
print(repr(triton.wrong_product()))
triton.wrong_product.cache_clear()
launch.products = lambda rows, *_: torch.zeros_like(rows)
print(triton.wrong_product())
"""
    done = python("-c", program, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    right, wrong = done.stdout.splitlines()[-2:]
    assert right == "''" and "comes out wrong" in wrong


@pytest.mark.thorough
def test_a_scalar_bounds_a_loop_under_the_interpreter_of_triton_3_6():
    """It gives `int` an array of one element, which NumPy ≥ 2.4 refuses."""
    pytest.importorskip("triton", reason="Triton is not installed")
    program = """
import torch
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def as_in_3_6(tensor, *scope):
    patch(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.__index__()
interpreter._patch_lang_tensor = as_in_3_6
from moa_fairseq.layers.experts.triton import launch_routing
order, offsets = launch_routing.sort(torch.tensor([[2, 0], [1, 2]]), 3)
print(order.tolist(), offsets.tolist())
"""
    done = python("-c", program, TRITON_INTERPRET="1")
    assert done.stdout.split("\n")[0] == "[1, 2, 0, 3] [1, 2, 4]", done.stderr[-2000:]


@pytest.mark.thorough
def test_python_calls_of_a_step_stay_few():
    """Forward and backward. Each costs the host of a GPU as much as a kernel of a small batch."""
    pytest.importorskip("triton", reason="Triton is not installed")
    done = python(HERE / "host_calls.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["8K8E"] <= 245 and found["8K32E"] <= 355, (found, done.stderr[-2000:])
    assert found["8K32E"] > found["8K8E"] > found["dense"] > 100, found


def test_auto_takes_no_triton_for_few_tokens(monkeypatch):
    """A step of generation: every expert in one product, nothing sorted."""
    monkeypatch.setattr(backend, "takes", lambda *_: True)
    monkeypatch.setattr(backend, "project", lambda *_: 1 / 0)
    monkeypatch.setattr(ExpertPermutation, "sorted", property(lambda self: 1 / 0))
    order = ExpertPermutation(torch.tensor([[0, 2], [1, 2]]), 3)
    out = projection.project(
        torch.ones(2, 8), torch.ones(3, 4, 8), order, is_up=True, backend="auto"
    )
    assert (out == 8).all()
