"""setup.sh: which environment it makes, which it refuses, and that it deletes nothing of others."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {
    "": ".venv",
    "--integrations": ".venv-integrations",
    "--zero-shot": ".venv-zero-shot",
}
# as today, and as it was written once: for each of the three
STAMPS = ("{}\ntorch==2.13.0", "{} torch==2.13.0", "{} torch==2.13.0 ", "{} /usr/bin/python")


@pytest.fixture
def project(tmp_path):
    """A folder with what setup.sh reads of this project."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
    requirements = ("scripts/requirements.txt", "scripts/requirements-integrations.txt")
    for name in ("setup.py", *requirements):
        (root / name).touch()
    return root


def setup(project, *words, script="scripts/setup.sh", **settings):
    """Run it without a package index and, but for PYTHON=, without a Python."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL", "PIP"))
    }
    kept |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": "no-python"}
    command = ["bash", project / script, *words]
    return subprocess.run(command, env={**kept, **settings}, capture_output=True, text=True)


@pytest.fixture
def base(tmp_path):
    """The Python of an environment without packages."""
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "base"]
    subprocess.run(command, check=True)
    return tmp_path / "base" / "bin" / "python"


@pytest.mark.thorough
def test_the_torch_of_a_virtual_environment_is_shared(project, base, tmp_path):
    """An environment that another one's Python makes has the system's packages only."""
    (site,) = (tmp_path / "base").glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("__version__ = '2.11.0+cu130'")
    done = setup(project, PYTHON=str(base))
    assert "keeping torch 2.11.0+cu130" in done.stdout, done.stdout + done.stderr
    python = project / ".venv" / "bin" / "python"
    assert subprocess.run([python, "-c", "import torch"], cwd=tmp_path).returncode == 0


@pytest.mark.thorough
def test_no_environment_without_torch_is_left_behind(project, base):
    done = setup(project, PYTHON=str(base))
    assert done.returncode == 1 and "could not install torch" in done.stderr
    assert not (project / ".venv").exists()


def test_the_environment_of_another_checkout_is_left_to_it(project, tmp_path):
    other = tmp_path / "an other"

    def refused(environment, *words, stamp=STAMPS[0], **settings):
        (environment / ".moa_fairseq_setup").write_text("1 2\n" + stamp.format(other))
        before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
        done = setup(project, *words, **settings)
        assert done.returncode == 1 and f"{environment} was set up for {other}," in done.stderr
        assert str(project) in done.stderr
        assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return re.search(r"rm -rf '.*?'|deactivate", done.stderr)[0]

    theirs = other / ".venv"
    theirs.mkdir(parents=True)
    for stamp in STAMPS:
        assert refused(theirs, stamp=stamp, VIRTUAL_ENV=str(theirs)) == "deactivate"
    for option, name in OPTIONS.items():
        shutil.copytree(theirs, project / name)
        subprocess.run(refused(project / name, *option.split()), shell=True, check=True)
        (project / name).symlink_to(theirs)
        subprocess.run(refused(project / name, *option.split()), shell=True, check=True)
        assert not os.path.lexists(project / name) and theirs.exists()


@pytest.mark.parametrize("stamp", STAMPS[:2])
def test_an_environment_of_this_checkout_under_another_path_is_its_own(
    project, tmp_path, stamp
):
    (project / ".venv").mkdir()
    (tmp_path / "path to it").symlink_to(project)
    text = "1 2\n" + stamp.format(tmp_path / "path to it")
    (project / ".venv" / ".moa_fairseq_setup").write_text(text)
    assert "PYTHON=no-python" in setup(project).stderr  # no other reason to stop


def folder(place):
    place.mkdir()
    (place / "notes.txt").write_text("mine")


def link(place):
    folder(place.with_name("thesis"))
    place.symlink_to(place.with_name("thesis"))


# Gets pip from ensurepip, and no torch
PYTHON = """#!/bin/sh
case "$*" in
  "-m ensurepip") touch "$0.pip" ;;
  *"pip --version") [ -e "$0.pip" ] ;;
  "-c ") ;;
  *) exit 1 ;;
esac
"""


def environment_without_pip(place):
    """As uv makes them."""
    (place / "bin").mkdir(parents=True)
    (place / "pyvenv.cfg").touch()
    (place / "bin" / "python").write_text(PYTHON)
    (place / "bin" / "python").chmod(0o755)


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (environment_without_pip, ()),
        (folder, ()),
        (folder, ("--integrations",)),
        (lambda place: place.write_text("mine"), ()),
        (lambda place: place.symlink_to("nowhere"), ()),
        (link, ()),  # which `venv --clear` would follow
    ],
)
def test_setup_deletes_nothing_that_it_did_not_make(project, make, flag):
    """A folder that it did not make stays, and the error names it. An environment without pip gets pip."""
    place = project / f".venv{''.join(flag)[1:]}"
    make(place)
    before = {path for path in project.rglob("*") if path.is_symlink() or path.is_file()}
    done = setup(project, *flag)
    assert done.returncode == 1
    assert before <= {
        path for path in project.rglob("*") if path.is_symlink() or path.is_file()
    }
    if make is environment_without_pip:
        assert (place / "bin" / "python.pip").exists() and "install torch" in done.stderr
    else:
        assert str(place) in done.stderr


@pytest.mark.parametrize(
    "flags", [["--integration"], ["--integrations", "--zero-shot"], [".venv"]]
)
def test_setup_takes_one_option_that_it_knows(project, flags):
    done = setup(project, *flags)
    assert done.returncode == 1 and f"'{' '.join(flags)}'" in done.stderr


@pytest.mark.parametrize("linked", ["checkout", "script"])
def test_setup_finds_its_checkout_through_a_link(project, tmp_path, linked):
    """A stamp with the link's path would be another checkout's once the link is gone."""
    folder(project / ".venv")
    script = "scripts/setup.sh" if linked == "checkout" else ""
    (tmp_path / "link").symlink_to(project if script else project / "scripts" / "setup.sh")
    done = setup(tmp_path / "link", script=script)
    assert done.returncode == 1 and str(project / ".venv") in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_takes_a_python_with_a_blank_in_its_path(project, tmp_path):
    python = tmp_path / "my python"
    python.write_text(
        f"#!/bin/sh\ncase $* in *venv*) echo \"$*\" > '{tmp_path}/asked'; exit 1;; esac\n"
    )
    python.chmod(0o755)
    assert setup(project, PYTHON=str(python)).returncode == 1
    assert str(project / ".venv") in (tmp_path / "asked").read_text()


def test_setup_refuses_an_environment_that_imports_another_checkout(project, tmp_path):
    """Its packages may be another's by a link; a set-up that did not end has left no stamp."""
    site = tmp_path / "other" / ".venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "other" / "moa_fairseq").mkdir()
    (site / "moa_fairseq").symlink_to(tmp_path / "other" / "moa_fairseq")
    (project / ".venv").mkdir()
    (project / ".venv" / "pyvenv.cfg").touch()
    (project / ".venv" / "lib").symlink_to(tmp_path / "other" / ".venv" / "lib")
    done = setup(project)
    assert (
        done.returncode == 1
        and f"{tmp_path / 'other'}," in done.stderr
        and str(project) in done.stderr
    )
    assert os.readlink(site / "moa_fairseq") == str(tmp_path / "other" / "moa_fairseq")
