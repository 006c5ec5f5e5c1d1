"""Pinned wheels through pip: fetched once, only the right ones, a failure named with its remedy."""

import subprocess
from pathlib import Path

import pytest

from moa_fairseq.experiments.corpus.build import Package, load_packages
from moa_fairseq.experiments.data import download as module
from moa_fairseq.experiments.data.download import Unavailable, obtain


@pytest.fixture
def wheel(make_wheel):
    package, path = make_wheel("demo", {})
    return package.public_file, path


@pytest.fixture
def pip(monkeypatch):
    """Stands in for the pip process: records commands, writes `data` to `file` or fails with `stderr`."""

    class Pip:
        data = None
        file = ""
        stderr = ""

        def __init__(self):
            self.commands = []

        def __call__(self, command, **options):
            self.commands.append(command)
            if self.data is not None:
                (Path(command[command.index("--dest") + 1]) / self.file).write_bytes(self.data)
            return subprocess.CompletedProcess(
                command, 1 if self.data is None else 0, "", self.stderr
            )

    double = Pip()
    monkeypatch.setattr(module.subprocess, "run", double)
    return double


def test_what_is_at_hand_needs_no_pip(wheel, tmp_path, pip):
    package, path = wheel
    assert obtain(package, [path.parent], tmp_path / "cache", offline=True) == path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Unavailable, match=r"demo-1\.0.* has the sha256 .* instead of"):
        obtain(package, [path.parent], tmp_path / "cache")
    with pytest.raises(Unavailable, match=r"demo-1\.0.*--offline"):
        obtain(package, [], tmp_path / "cache", offline=True)
    assert pip.commands == []


def test_download_lands_in_the_cache_once_and_replaces_a_damaged_file(wheel, tmp_path, pip):
    package, path = wheel
    pip.data, pip.file = path.read_bytes(), package.name
    kept = tmp_path / "cache" / package.name
    kept.parent.mkdir()
    kept.write_bytes(b"torn")
    for _ in range(2):
        assert obtain(package, [], kept.parent) == kept and kept.read_bytes() == pip.data
    assert len(pip.commands) == 1 and list(kept.parent.iterdir()) == [kept]


def test_a_download_with_another_hash_is_refused_and_not_kept(wheel, tmp_path, pip):
    package, path = wheel
    pip.data, pip.file = path.read_bytes()[:-4] + b"evil", package.name
    with pytest.raises(Unavailable, match=r"demo-1\.0.* has the sha256 .* instead of"):
        obtain(package, [], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.thorough
def test_pip_itself_refuses_another_hash(wheel, tmp_path, monkeypatch):
    """The real pip, offline, with the wheel in a folder that it is pointed to."""
    package, path = wheel
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    kept = obtain(package, [], tmp_path / "cache")
    assert kept.read_bytes() == path.read_bytes()
    with pytest.raises(Unavailable, match=r"demo-1\.0.*DO NOT MATCH THE HASHES"):
        obtain(package._replace(sha256="0" * 64), [], tmp_path / "other")


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            "WARNING: Retrying ... NewConnectionError\nERROR: No matching distribution",
            "no connection",
        ),
        ("first\nERROR: something odd\nlast", "pip says: ERROR: something odd"),
        ("/usr/bin/python: No module named pip", "No module named pip"),
        ("", "pip says"),
    ],
)
def test_every_failure_names_package_and_remedy(wheel, tmp_path, pip, stderr, message):
    pip.stderr = stderr
    with pytest.raises(Unavailable, match=message) as caught:
        obtain(wheel[0], [], tmp_path / "cache")
    assert "demo-1.0" in str(caught.value) and "--from" in str(caught.value)


def test_pip_is_asked_for_wheels_with_hashes_only(tmp_path, pip):
    universal = Package("demo", "1.0", "demo-1.0-py3-none-any.whl", "0" * 64, 1)
    windows = universal._replace(file="demo-1.0-cp311-cp311-win_amd64.whl")
    for package in (universal, windows):
        with pytest.raises(Unavailable):
            obtain(package.public_file, [], tmp_path)
    plain, command = pip.commands
    assert {"--no-deps", "--require-hashes"} <= set(plain)
    assert "-P" in plain[: plain.index("-m")]  # no pip.py of the working directory is run
    assert plain[plain.index("--only-binary") + 1] == ":all:" and "--platform" not in plain
    for flag, value in [
        ("--platform", "win_amd64"),
        ("--python-version", "311"),
        ("--abi", "cp311"),
    ]:
        assert command[command.index(flag) + 1] == value


def test_the_locked_list_is_well_formed():
    packages = load_packages()
    assert len({package.name.lower() for package in packages}) == len(packages) >= 30
    for package in packages:
        assert package.file.endswith(".whl") and package.file.split("-")[1] == package.version
        assert len(bytes.fromhex(package.sha256)) == 32 and package.size > 0
    assert sum(package.size for package in packages) < 130e6
