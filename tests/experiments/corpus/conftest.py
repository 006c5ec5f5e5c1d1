"""Small wheels with real gettext catalogues in them, made on the spot."""

import hashlib
import zipfile

import polib
import pytest

from moa_fairseq.experiments.corpus.build import Package


def po_text(entries):
    """A .po catalogue of (english, german) pairs or polib.POEntry objects."""
    catalogue = polib.POFile()
    catalogue.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Language": "de"}
    for entry in entries:
        if isinstance(entry, tuple):
            entry = polib.POEntry(msgid=entry[0], msgstr=entry[1])
        catalogue.append(entry)
    return catalogue


@pytest.fixture
def make_wheel(tmp_path):
    """make_wheel(name, {member: bytes}, licence) → (Package, path), the wheel lying in tmp_path/wheels."""

    def make(name, members, licence="License-Expression: MIT"):
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\n"
            archive.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
            tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
            for member, content in members.items():
                archive.writestr(member, content)
        data = path.read_bytes()
        return Package(
            name, "1.0", path.name, hashlib.sha256(data).hexdigest(), len(data)
        ), path

    return make


@pytest.fixture
def catalogue():
    """catalogue(entries) → bytes of a .po; catalogue(entries, compiled=True) → bytes of the .mo."""

    def make(entries, compiled=False):
        po = po_text(entries)
        return po.to_binary() if compiled else str(po).encode("utf-8")

    return make
