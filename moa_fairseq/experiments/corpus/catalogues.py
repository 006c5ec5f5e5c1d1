"""English-German messages from the gettext catalogues (`.po`, `.mo`) in a wheel, and the wheel's licence.

Nothing is unpacked and nothing is imported: members are read into memory one by one, so neither a
hostile member name nor the package's own code can do anything.
"""

import email.message
import email.parser
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polib

from moa_fairseq.errors import UserError

# `.../de/LC_MESSAGES/x.po`, `.../locales/de.po`, `.../plone-de.po` etc. Only standard German: regional
# and informal variants (de_AT, de_CH, de_Informal) would translate the same English a second time.
_GERMAN_MEMBER = re.compile(
    r"(?:^|[/._-])de(?:[_-]DE)?(?:/(?:LC_MESSAGES/)?[^/]+)?\.(?:po|mo)$", re.IGNORECASE
)
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_TESTS = re.compile(r"(?:^|/)tests?/", re.IGNORECASE)
# A wheel is an untrusted archive: a member that unpacks to more than this is not a catalogue.
MAX_MEMBER_BYTES = 32 << 20
_MO_MAGIC = (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde")
_CHARSET = re.compile(rb"charset=([A-Za-z0-9_.-]+)")
# Plone's convention for symbolic message ids: the English text is in an extracted comment.
_DEFAULT_COMMENT = re.compile(r'Default:\s*"(.*)"\s*$', re.DOTALL)


def read_messages(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yield (English, German) of every finished translation in the wheel, in the order of member names.

    Untranslated, fuzzy and obsolete entries are skipped; of plural forms, the singular and the first plural
    are returned. A member that is not a readable catalogue is skipped.

    Raises:
        UserError: if `wheel` is not a zip file.
    """
    entries = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in catalogue_members(archive):
                entries += _read_catalogue(member, archive.read(member))
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{wheel} is not a readable wheel ({error}). Delete it and run again."
        ) from error
    for entry in entries:
        yield from _translations_in(entry)


def _translations_in(entry: Any) -> list[tuple[str, str]]:
    """(English, German) of an entry, or of its singular and first plural; [] if it is not finished."""
    english = _english_of(entry)
    if not english or entry.obsolete or "fuzzy" in entry.flags:
        return []
    pairs = [(english, entry.msgstr)]
    if entry.msgid_plural:
        german = entry.msgstr_plural
        pairs = [(english, german.get(0, "")), (entry.msgid_plural, german.get(1, ""))]
    return [pair for pair in pairs if all(map(str.strip, pair))]


def _english_of(entry: Any) -> str:
    """The English text of an entry; "" if its msgid is a key, such as `label_add_item`, without a comment."""
    comment = " ".join((entry.comment or "").splitlines())
    default = _DEFAULT_COMMENT.search(comment)
    if default:
        return default[1].replace('\\"', '"').replace("\\n", "\n")
    return entry.msgid if " " in entry.msgid.strip() else ""


def catalogue_members(archive: zipfile.ZipFile) -> list[str]:
    """Sorted names of the German catalogues in an open wheel, without a `.mo` that has its `.po` there."""
    members = set()
    for info in archive.infolist():
        is_german = _GERMAN_MEMBER.search(info.filename) and not _TESTS.search(info.filename)
        if is_german and info.file_size <= MAX_MEMBER_BYTES:
            members.add(info.filename)
    return sorted(
        name for name in members if name.endswith(".po") or f"{name[:-3]}.po" not in members
    )


def _read_catalogue(member: str, data: bytes) -> list[Any]:
    """The entries of a catalogue, of polib's classes; [] if it cannot be read."""
    try:
        if member.lower().endswith(".mo"):
            # polib opens a file if its argument names one: a real catalogue's first bytes rule that out.
            return list(polib.mofile(data)) if data.startswith(_MO_MAGIC) else []
        charset = _CHARSET.search(data[:4096])
        encoding = charset[1].decode("ascii") if charset else "utf-8"
        # For the same reason the text begins with a line break: no file name does.
        return list(polib.pofile("\n" + data.decode(encoding)))
    # polib raises OSError for a syntax error. One catalogue of thousands is no loss
    except (OSError, ValueError, LookupError, struct.error):
        return []


def read_licence(wheel: Path) -> str:
    """The licence in a wheel's metadata.

    Returns:
        The SPDX expression, else the licence classifiers, else the first line of the License field, else "not
        stated".
    """
    metadata = _metadata_of(wheel)
    if metadata["License-Expression"]:
        return metadata["License-Expression"].strip()
    classifiers = set()
    for value in metadata.get_all("Classifier", []):
        if value.startswith("License ::") and not value.endswith("OSI Approved"):
            classifiers.add(value.split(" :: ")[-1].strip())
    if classifiers:
        return "; ".join(sorted(classifiers))
    lines = (metadata["License"] or "").strip().splitlines()
    if lines and lines[0].strip().upper() != "UNKNOWN":
        return lines[0].strip()
    return "not stated"


def _metadata_of(wheel: Path) -> email.message.Message:
    """The headers of a wheel's METADATA; none if it has no such file."""
    text = ""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if _METADATA.fullmatch(name):
                text = archive.read(name).decode("utf-8", "replace")
                break
    return email.parser.Parser().parsestr(text, headersonly=True)
