"""What the package says of itself is true, and said once."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import moa_fairseq
from moa_fairseq.experiments.recipes.loading import shipped_recipes

ROOT = Path(__file__).resolve().parents[1]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_stands_in_one_place():
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == moa_fairseq.__version__
    assert moa_fairseq.__version__ not in text("setup.py")
    assert f"\nversion: {moa_fairseq.__version__}\n" in text("CITATION.cff")
    assert f"\n## {moa_fairseq.__version__}" in text("CHANGELOG.md")


@pytest.mark.thorough
def test_help_waits_for_nothing_and_verbs_find_everything_registered():
    program = """
import sys
sys.argv = ["moa-fairseq"]
from moa_fairseq.cli import build_parser
build_parser(["--help"])
assert not {"torch", "numpy", "fairseq"} & set(sys.modules)
build_parser(["complexity"])
from fairseq.models import ARCH_MODEL_REGISTRY
assert "moa_transformer_base" in ARCH_MODEL_REGISTRY
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_pythons_are_those_that_setup_takes():
    """All run the layers; fairseq's extra, setup.sh and the tests with fairseq take the older ones."""
    lowest, below = map(
        int, re.search(r'python_requires=">=3\.(\d+),<3\.(\d+)"', text("setup.py")).groups()
    )
    above = int(
        re.search(r"ve-fairseq==[\d.]+; python_version < '3\.(\d+)'", text("setup.py"))[1]
    )
    script = text("scripts/setup.sh")
    assert f"(3, {lowest}) <= sys.version_info[:2] <= (3, $newest)" in script
    assert f"newest=${{1:-{above - 1}}}" in script and f"find_python {below - 1})" in script
    workflow = text(".github/workflows/test.yml")
    for pythons in (range(lowest, above), range(above, below)):
        assert str([f"3.{minor}" for minor in pythons]).replace("'", '"') in workflow


def test_without_a_compiler_fairseq_is_not_built(tmp_path):
    line = ["bash", str(ROOT / "scripts" / "fairseq_wheel.sh"), str(tmp_path / "out")]
    environment = {**os.environ, "CXX": "no-compiler-of-this-name"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "no-compiler-of-this-name" in done.stderr and not (tmp_path / "out").exists()


def test_both_checks_run_one_script():
    for name in (".ci/run", ".github/workflows/test.yml"):
        assert "bash scripts/test.sh" in text(name)


def test_the_commit_hook_has_the_same_ruff():
    pinned = re.search(r"^ruff==(\S+)", text("scripts/requirements.txt"), re.M)[1]
    assert f"rev: v{pinned}" in text(".pre-commit-config.yaml")


def test_what_the_integrations_are_tested_with_is_what_they_ask_for():
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+)", text("scripts/requirements-integrations.txt"), re.M)
    )
    asked, *others = re.findall(r'"(?:hf|vision)": \[(.*?)\]', text("setup.py"), re.S)
    for words in re.findall(r'"(.*?)"', " ".join([asked, *others])):
        requirement = Requirement(words)
        assert requirement.specifier.contains(pins[requirement.name])
    oldest = re.search(
        r"transformers==(\S+)\.\n", text("scripts/requirements-integrations.txt")
    )[1]
    assert f"transformers>={oldest.rpartition('.')[0]}," in asked


def test_types_are_announced():
    assert (ROOT / "moa_fairseq" / "py.typed").is_file() and '"py.typed"' in text("setup.py")


@pytest.mark.thorough
@pytest.mark.slow
def test_an_installation_has_the_recipes_and_the_papers(tmp_path):
    """`pip install .`, used from another folder."""
    source = tmp_path / "source"
    site = tmp_path / "site"
    parts = ("papers", "measured", "throughput", "kernels", "benchmarks")
    for name in ("moa_fairseq", "configs", *(f"results/{part}" for part in parts)):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    wheel = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*wheel, "--wheel-dir", tmp_path, source], check=True, timeout=300)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(site)
    (tmp_path / "elsewhere").mkdir()

    def run(*words):
        code = "import sys; from moa_fairseq.cli import main; sys.exit(main())"
        environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore"}
        return subprocess.run(
            [sys.executable, "-P", "-c", code, *words],
            **{
                "cwd": tmp_path / "elsewhere",
                "env": environment,
                "text": True,
                "capture_output": True,
            },
            timeout=300,
            check=False,
        )

    for name in (
        "quickstart_moa",
        "configs/quickstart_moa.yaml",
        "configs/quickstart/quickstart_moa.yaml",
    ):
        done = run("recipe", name, "--dry-run", "--gpus", "0")
        assert done.returncode == 0 and f"--user-dir {site}/moa_fairseq" in done.stdout, (
            done.stderr
        )
    done = run("recipe", "quickstart_mao", "--dry-run")
    assert done.returncode == 2 and "quickstart_moa" in done.stderr
    done = run("compare")
    assert done.returncode == 0 and "SwitchHead" in done.stdout, done.stderr
    names = {
        path.name for path in (site / "moa_fairseq" / "experiments" / "look").glob("page.*")
    }
    assert names == {"page.py", "page.html", "page.css", "page.js"}
    installed = site / "moa_fairseq" / "share" / "configs"
    here = ROOT / "configs"
    files = {path.relative_to(here) for path in here.rglob("*.yaml")}
    assert {path.relative_to(installed) for path in installed.rglob("*.yaml")} == files
    assert {path.relative_to(here) for path in shipped_recipes().values()} < files
    share = site / "moa_fairseq" / "share" / "results"
    for name in ("kernels", "benchmarks"):
        assert {path.name for path in (share / name).glob("*.json")} == {
            path.name for path in (ROOT / "results" / name).glob("*.json")
        }
    code = "from moa_fairseq.layers.experts import validation; print(validation.shipped_path().parent)"
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(site)}}
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(site)}}
    found = subprocess.run(
        [sys.executable, "-c", code], **place, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == share / "kernels"
    done = run("recipe", "wikitext103_lm_moa_47m", "--dry-run", "--gpus", "0")
    assert done.returncode == 0, done.stderr
