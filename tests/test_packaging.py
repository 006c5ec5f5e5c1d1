"""What the package says of itself is true, and said once."""

import re
import subprocess
import sys
from pathlib import Path

import moa_fairseq

ROOT = Path(__file__).resolve().parents[1]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_stands_in_one_place():
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == moa_fairseq.__version__
    assert moa_fairseq.__version__ not in text("setup.py")
    assert f"\nversion: {moa_fairseq.__version__}\n" in text("CITATION.cff")
    assert f"\n## {moa_fairseq.__version__}" in text("CHANGELOG.md")


def test_pythons_are_those_that_setup_takes():
    lowest, below = re.search(r'python_requires=">=(3\.\d+),<(3\.\d+)"', text("setup.py")).groups()
    pythons = [f"3.{minor}" for minor in range(int(lowest[2:]), int(below[2:]))]
    taken = re.search(r"\((3), (\d+)\) <= sys\.version_info\[:2\] <= \(3, (\d+)\)", text("scripts/setup.sh"))
    assert pythons == [f"3.{minor}" for minor in range(int(taken[2]), int(taken[3]) + 1)]
    assert str(pythons).replace("'", '"') in text(".github/workflows/test.yml")


def test_both_checks_run_one_script():
    for name in (".ci/run", ".github/workflows/test.yml"):
        assert "bash scripts/test.sh" in text(name)


def test_the_commit_hook_has_the_same_ruff():
    pinned = re.search(r"^ruff==(\S+)", text("scripts/requirements.txt"), re.M)[1]
    assert f"rev: v{pinned}" in text(".pre-commit-config.yaml")


def test_types_are_announced():
    assert (ROOT / "moa_fairseq" / "py.typed").is_file() and '"py.typed"' in text("setup.py")
