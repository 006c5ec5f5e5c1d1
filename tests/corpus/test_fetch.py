import subprocess
from pathlib import Path

import pytest

from moa_fairseq.corpus.build import Package, load_packages
from moa_fairseq.data_prep import download as module
from moa_fairseq.data_prep.download import Unavailable, obtain


@pytest.fixture
def wheel(make_wheel):
    package, path = make_wheel("demo", {})
    return package.public_file, path


@pytest.fixture
def pip(monkeypatch):
    """Stands in for the pip process: records commands, writes a file or fails as told."""

    class Pip:
        data, stderr, commands = None, "", []

        def __call__(self, command, **options):
            self.commands.append(command)
            if self.data is not None:
                name = self.file
                (Path(command[command.index("--dest") + 1]) / name).write_bytes(self.data)
            return subprocess.CompletedProcess(command, 1 if self.data is None else 0, "", self.stderr)

    double = Pip()
    double.commands = []
    monkeypatch.setattr(module.subprocess, "run", double)
    return double


def test_from_folder_serves_without_pip(wheel, tmp_path, pip):
    package, path = wheel
    assert obtain(package, [path.parent], tmp_path / "cache", offline=True) == path
    assert pip.commands == []


def test_wrong_file_in_from_folder_is_refused_by_name(wheel, tmp_path, pip):
    package, path = wheel
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Unavailable, match=r"demo-1\.0.* has the sha256 .* instead of"):
        obtain(package, [path.parent], tmp_path / "cache")
    assert pip.commands == []


def test_offline_without_the_wheel_says_so(wheel, tmp_path, pip):
    with pytest.raises(Unavailable, match=r"demo-1\.0.*--offline"):
        obtain(wheel[0], [], tmp_path / "cache", offline=True)
    assert pip.commands == []


def test_download_lands_in_the_cache_once(wheel, tmp_path, pip):
    package, path = wheel
    pip.data, pip.file = path.read_bytes(), package.name
    cache = tmp_path / "cache"
    assert obtain(package, [], cache) == cache / package.name
    assert obtain(package, [], cache) == cache / package.name
    assert len(pip.commands) == 1
    assert [entry.name for entry in cache.iterdir()] == [package.name]


def test_damaged_cache_file_is_fetched_again(wheel, tmp_path, pip):
    package, path = wheel
    pip.data, pip.file = path.read_bytes(), package.name
    cached = tmp_path / "cache" / package.name
    cached.parent.mkdir()
    cached.write_bytes(b"torn")
    assert obtain(package, [], cached.parent).read_bytes() == pip.data


def test_a_download_with_another_hash_is_refused_and_not_kept(wheel, tmp_path, pip):
    package, path = wheel
    pip.data, pip.file = path.read_bytes()[:-4] + b"evil", package.name
    with pytest.raises(Unavailable, match=r"demo-1\.0.*what it serves has the sha256 .* instead of"):
        obtain(package, [], tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_itself_refuses_another_hash(wheel, tmp_path, monkeypatch):
    """The real pip, offline, with the wheel in a folder that it is pointed to."""
    package, path = wheel
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    kept = obtain(package, [], tmp_path / "cache")
    assert kept.read_bytes() == path.read_bytes()
    with pytest.raises(Unavailable, match=r"demo-1\.0.*not the pinned one"):
        obtain(package._replace(sha256="0" * 64), [], tmp_path / "other")


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES from the requirements file.", "not the pinned one"),
        ("WARNING: Retrying ... NewConnectionError\nERROR: No matching distribution found", "no connection"),
        ("ERROR: No matching distribution found for demo==1.0", "does not offer this version"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("first\nERROR: something odd", "pip says: ERROR: something odd"),
        ("", "pip gave no reason"),
    ],
)
def test_every_failure_names_package_and_remedy(wheel, tmp_path, pip, stderr, message):
    pip.stderr = stderr
    with pytest.raises(Unavailable, match=message) as caught:
        obtain(wheel[0], [], tmp_path / "cache")
    assert "demo-1.0" in str(caught.value)
    assert "--from" in str(caught.value) or "--cache" in str(caught.value)


def test_pip_is_asked_for_wheels_with_hashes_only(tmp_path, pip):
    universal = Package("demo", "1.0", "demo-1.0-py3-none-any.whl", "0" * 64, 1)
    windows = universal._replace(file="demo-1.0-cp311-cp311-win_amd64.whl")
    for package in (universal, windows):
        with pytest.raises(Unavailable):
            obtain(package.public_file, [], tmp_path)
    plain, command = pip.commands
    assert {"--no-deps", "--require-hashes"} <= set(plain)
    assert plain[plain.index("--only-binary") + 1] == ":all:"
    assert "--platform" not in plain
    for flag, value in [("--platform", "win_amd64"), ("--python-version", "311"), ("--abi", "cp311")]:
        assert command[command.index(flag) + 1] == value


def test_the_locked_list_is_well_formed():
    packages = load_packages()
    assert len(packages) >= 30
    assert len({package.name.lower() for package in packages}) == len(packages)
    for package in packages:
        assert package.file.endswith(".whl")
        assert package.file.split("-")[1] == package.version
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.size > 0
    assert sum(package.size for package in packages) < 130e6
