"""What several files of tests here share."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
collect_ignore_glob = []
try:
    if tuple(map(int, metadata.version("transformers").split(".")[:2])) < (4, 57):
        collect_ignore_glob = ["test_mixture_*.py"]  # exported models need a newer version
except metadata.PackageNotFoundError:
    pass  # the tests skip themselves


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder of each case of reference_models.py; treat it as read-only."""
    if not PYTHON.exists() or subprocess.call([PYTHON, "-c", "import fairseq, safetensors"]):
        pytest.skip(f"{PYTHON} has no fairseq or no safetensors, which write the references")
    place = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("reference_models.py")
    done = subprocess.run([PYTHON, script, place], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return place
