import zipfile

import polib
import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.corpus.catalogues import catalogue_members, read_messages

DE = "demo/locale/de/LC_MESSAGES/django.po"
GOOD = ("Save the file", "Die Datei speichern")


@pytest.fixture
def messages(make_wheel):
    """messages({member: bytes}) → the pairs that are read from a wheel of them."""
    return lambda members: list(read_messages(make_wheel("demo", members)[1]))


def test_fuzzy_obsolete_and_untranslated_entries_are_left_out(messages, catalogue):
    entries = [
        GOOD,
        polib.POEntry(msgid="Open the file", msgstr="Die Datei schließen", flags=["fuzzy"]),
        polib.POEntry(msgid="Burn the file", msgstr="Die Datei brennen", obsolete=True),
        ("Close the file", ""),
        polib.POEntry(msgid="label_without_default", msgstr="Irgendein Feld"),
    ]
    assert messages({DE: catalogue(entries)}) == [GOOD]


@pytest.mark.parametrize("compiled", [False, True])
def test_plural_entry_gives_both_numbers(messages, catalogue, compiled):
    entry = polib.POEntry(
        msgid="One user was deleted",
        msgid_plural="Some users were deleted",
        msgstr_plural={0: "Ein Benutzer wurde gelöscht", 1: "Einige Benutzer wurden gelöscht"},
    )
    assert messages(
        {DE[:-3] + (".mo" if compiled else ".po"): catalogue([entry], compiled)}
    ) == [
        ("One user was deleted", "Ein Benutzer wurde gelöscht"),
        ("Some users were deleted", "Einige Benutzer wurden gelöscht"),
    ]


def test_key_msgid_takes_its_english_from_the_default_comment(messages, catalogue):
    comment = 'Default: "The title of\nthe \\"item\\""'
    entry = polib.POEntry(msgid="help_title", msgstr="Titel des Inhalts", comment=comment)
    assert messages({DE: catalogue([entry])}) == [
        ('The title of the "item"', "Titel des Inhalts")
    ]


def test_po_hides_its_mo_and_only_standard_german_is_read(make_wheel):
    read = [DE, *("a/locale/de_DE/LC_MESSAGES/a.mo", "a/i18n/de.po", "a/i18n/plone-de.po")]
    locales = [f"a/locale/{name}/LC_MESSAGES/a.po" for name in ("de_AT", "de_Informal", "nl")]
    left = [DE[:-3] + ".mo", *locales, "a/tests/locale/de/LC_MESSAGES/a.po", "a/code.po"]
    _, wheel = make_wheel("demo", {name: b"" for name in [*read, *left]})
    with zipfile.ZipFile(wheel) as archive:
        assert catalogue_members(archive) == sorted(read)


def test_hostile_and_broken_members_touch_nothing_and_the_rest_is_read(
    messages, catalogue, tmp_path
):
    secret = tmp_path / "secret.po"
    secret.write_bytes(catalogue([("The secret of the house", "Das Geheimnis des Hauses")]))
    good = catalogue([GOOD], compiled=True)
    path = str(secret).encode()
    members = {
        "../../escaped/de/LC_MESSAGES/x.mo": good,
        "a/de/LC_MESSAGES/path.po": path,  # polib would open these, were it handed the text as it is
        "b/de/LC_MESSAGES/path.mo": path,
        "a/de/LC_MESSAGES/torn.mo": good[:40],
        "a/de/LC_MESSAGES/magic.mo": b"not a catalogue",
        "a/de/LC_MESSAGES/syntax.po": b'msgid "unfinished\nmsgstr nonsense',
        "a/de/LC_MESSAGES/charset.po": b'msgid ""\nmsgstr "charset=utf-8"\n# \xff',
        "a/de/LC_MESSAGES/unknown.po": b'msgid ""\nmsgstr "charset=klingon"\n',
        "z/de/LC_MESSAGES/good.mo": good,
    }
    assert messages(members) == [GOOD, GOOD]
    assert {path.name for path in tmp_path.iterdir()} == {"secret.po", "wheels"}
    assert not (tmp_path.parent / "escaped").exists()


def test_latin1_catalogue_is_decoded_by_its_own_charset(messages):
    text = (
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=ISO-8859-1\\n"\n\n'
        'msgid "Open the door"\nmsgstr "Die Tür öffnen"\n'
    )
    assert messages({DE: text.encode("latin-1")}) == [("Open the door", "Die Tür öffnen")]


def test_a_file_that_is_no_wheel_is_named(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(UserError, match=r"x\.whl is not a readable wheel"):
        list(read_messages(tmp_path / "x.whl"))
