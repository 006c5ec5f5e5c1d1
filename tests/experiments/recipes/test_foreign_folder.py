"""Modules that lie in the working directory are not imported by what the package starts there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moa_fairseq.process import Executor

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A working directory with modules that leave a mark when somebody imports them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in ("random", "sacrebleu", "yaml"):
        Path(f"{name}.py").write_text(
            f"open({str(tmp_path / 'marker')!r}, 'a').write('{name} ')\nraise OSError"
        )
    return tmp_path


@pytest.mark.thorough
def test_a_command_of_a_recipe(planted):
    Path("log.txt").write_text(
        "S-0\ta b\nT-0\ta b c d\nH-0\t-1\ta b c d\n| Generate test with beam=5: x\n"
    )
    Executor().run(
        ["moa-fairseq", "score", "log.txt", "--json"], Path("x.log"), Path("scores.json")
    )
    assert '"score": 100.0' in Path("scores.json").read_text() and not Path("marker").exists()


@pytest.mark.thorough
def test_workers_of_the_program(planted):
    """A fork server is `python -c ...`, which imports from the working directory unless it is told not to."""
    (planted / "bin").mkdir()
    # Like a console script, it imports from its own folder
    program = planted / "bin" / "program.py"
    program.write_text(
        """
import sys
from moa_fairseq import cli
from moa_fairseq.text import workers
def run(args):
    with workers._context("moa_fairseq.text.tokenizer").Pool(1) as pool:
        print(pool.apply(eval, ("__import__('sys').path",)))
    return 0
if __name__ == "__main__":
    cli.importlib.import_module("moa_fairseq.experiments.scoring.average").run = run
    sys.argv = ["moa-fairseq", "average", "--inputs", "x", "--output", "y"]
    sys.exit(cli.main())
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "''" not in done.stdout and str(ROOT) in done.stdout and not Path("marker").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "script", ["scripts/wmt14_ende_moa_base.sh", "scripts/launch/multinode.sh"]
)
def test_scripts(planted, script):
    words = (
        ["quickstart_moa", "--nodes", "1", "--node-rank", "0", "--master", "h"]
        if "launch" in script
        else []
    )
    command = ["bash", str(ROOT / script), *words, "--dry-run", "--gpus", "0"]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not Path("marker").exists()
    assert "fairseq-train" in done.stdout, done.stderr[-2000:]
