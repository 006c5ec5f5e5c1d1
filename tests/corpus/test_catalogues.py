import zipfile

import polib
import pytest

from moa_fairseq.corpus.catalogues import catalogue_members, read_messages
from moa_fairseq.errors import UserError

DE = "demo/locale/de/LC_MESSAGES/django.po"


def messages(path):
    return list(read_messages(path))


def test_fuzzy_obsolete_and_untranslated_entries_are_left_out(make_wheel, catalogue):
    entries = [
        ("Save the file", "Die Datei speichern"),
        polib.POEntry(msgid="Open the file", msgstr="Die Datei schließen", flags=["fuzzy"]),
        polib.POEntry(msgid="Burn the file", msgstr="Die Datei brennen", obsolete=True),
        ("Close the file", ""),
    ]
    _, wheel = make_wheel("demo", {DE: catalogue(entries)})
    assert messages(wheel) == [("Save the file", "Die Datei speichern")]


@pytest.mark.parametrize("compiled", [False, True])
def test_plural_entry_gives_both_numbers(make_wheel, catalogue, compiled):
    entry = polib.POEntry(
        msgid="One user was deleted",
        msgid_plural="Some users were deleted",
        msgstr_plural={0: "Ein Benutzer wurde gelöscht", 1: "Einige Benutzer wurden gelöscht"},
    )
    member = DE[:-3] + (".mo" if compiled else ".po")
    _, wheel = make_wheel("demo", {member: catalogue([entry], compiled)})
    assert messages(wheel) == [
        ("One user was deleted", "Ein Benutzer wurde gelöscht"),
        ("Some users were deleted", "Einige Benutzer wurden gelöscht"),
    ]


def test_key_msgid_takes_its_english_from_the_default_comment(make_wheel, catalogue):
    entries = [
        polib.POEntry(
            msgid="help_title", msgstr="Titel des Inhalts", comment='Default: "The title of\nthe \\"item\\""'
        ),
        polib.POEntry(msgid="label_without_default", msgstr="Irgendein Feld"),
    ]
    _, wheel = make_wheel("demo", {DE: catalogue(entries)})
    assert messages(wheel) == [('The title of the "item"', "Titel des Inhalts")]


def test_po_hides_its_mo_and_only_standard_german_is_read(make_wheel, catalogue):
    names = [
        DE,
        DE[:-3] + ".mo",
        "a/locale/de_DE/LC_MESSAGES/a.mo",
        "a/i18n/de.po",
        "a/i18n/plone-de.po",
        "a/locale/de_AT/LC_MESSAGES/a.po",
        "a/locale/de_Informal/LC_MESSAGES/a.po",
        "a/locale/nl/LC_MESSAGES/a.po",
        "a/tests/locale/de/LC_MESSAGES/a.po",
        "a/code.po",
    ]
    _, wheel = make_wheel("demo", {name: b"" for name in names})
    with zipfile.ZipFile(wheel) as archive:
        assert catalogue_members(archive) == sorted([names[0], *names[2:5]])


def test_hostile_member_names_and_contents_touch_nothing(make_wheel, catalogue, tmp_path):
    secret = tmp_path / "secret.po"
    secret.write_bytes(catalogue([("The secret of the house", "Das Geheimnis des Hauses")]))
    good = catalogue([("Save the file", "Die Datei speichern")])
    escape = "../../escaped/de/LC_MESSAGES/x.po"
    _, wheel = make_wheel(
        "demo",
        {
            escape: good,
            # polib would open these, were it handed the text as it is
            "a/de/LC_MESSAGES/path.po": str(secret).encode(),
            "a/de/LC_MESSAGES/path.mo": str(secret).encode(),
            "b/de/LC_MESSAGES/path.mo": str(secret).encode(),
        },
    )
    before = sorted(path for path in tmp_path.rglob("*"))
    assert messages(wheel) == [("Save the file", "Die Datei speichern")]
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert not (tmp_path.parent / "escaped").exists()


def test_broken_catalogues_are_skipped_and_the_rest_is_read(make_wheel, catalogue):
    good = catalogue([("Save the file", "Die Datei speichern")], compiled=True)
    _, wheel = make_wheel(
        "demo",
        {
            "a/de/LC_MESSAGES/torn.mo": good[:40],
            "a/de/LC_MESSAGES/magic.mo": b"not a catalogue",
            "a/de/LC_MESSAGES/syntax.po": b'msgid "unfinished\nmsgstr nonsense',
            "a/de/LC_MESSAGES/charset.po": b'msgid ""\nmsgstr "charset=utf-8"\n# \xff',
            "a/de/LC_MESSAGES/unknown.po": b'msgid ""\nmsgstr "charset=klingon"\n',
            "z/de/LC_MESSAGES/good.mo": good,
        },
    )
    assert messages(wheel) == [("Save the file", "Die Datei speichern")]


def test_latin1_catalogue_is_decoded_by_its_own_charset(make_wheel):
    text = (
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\n'
        'msgid "Open the door"\nmsgstr "Die Tür öffnen"\n'
    )
    _, wheel = make_wheel("demo", {DE: text.encode("latin-1")})
    assert messages(wheel) == [("Open the door", "Die Tür öffnen")]


def test_a_file_that_is_no_wheel_is_named(tmp_path):
    path = tmp_path / "x.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(UserError, match=r"x\.whl is not a readable wheel"):
        list(read_messages(path))
