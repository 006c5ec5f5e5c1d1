import pytest

from moa_fairseq.experiments.corpus.clean import _words, clean_message, matching_key

GOOD = ("The file could not be saved.", "Die Datei konnte nicht gespeichert werden.")


def test_a_plain_pair_passes_unchanged():
    assert list(clean_message(*GOOD)) == [GOOD]


@pytest.mark.parametrize(
    ("english", "german"),
    [
        ("The file %s was saved", "Die Datei %s wurde gespeichert"),
        ("The file %1 was saved", "Die Datei %1 wurde gespeichert"),
        ("The file %(name)s was saved", "Die Datei %(name)s wurde gespeichert"),
        ("The file {name} was saved", "Die Datei {name} wurde gespeichert"),
        ("The file ${name} was saved", "Die Datei ${name} wurde gespeichert"),
        ("The <file> was saved here", "Die <datei> wurde hier gespeichert"),
        ("The <b>file</b> was saved", "Die Datei wurde gespeichert"),  # markup on one side only
        ("Save the file &amp; leave", "Datei speichern &amp; gehen"),
        ("See https://example.org for this", "Siehe dazu https://example.org für mehr"),
        ("Set the `name` of it", "Den `name` dafür setzen"),
        ("Call the function save() now", "Jetzt die Funktion save() rufen"),
        ("Edit your config.json file now", "Jetzt die Datei config.json bearbeiten"),
        ("The user_id_of the file", "Die user_id_of der Datei"),
        ("Set MAX_SIZE of the file", "MAX_SIZE der Datei setzen"),
        ("The file was saved", "Die Datei wurde gespeichert ✔"),
        ("The file was\x07 saved", "Die Datei wurde\x07 gespeichert"),
        ("The door is open", "Die TÃ¼r ist offen"),
        ("Save file", "Datei speichern"),  # too short
        ("The file " + "very " * 90 + "long", "Die Datei " + "sehr " * 90 + "lang"),
        (
            "The file " + "very " * 70 + "long",
            "Die Datei " + "sehr " * 85 + "lang",
        ),  # the German alone
        (
            "The file was saved",
            "Die Datei wurde unter dem angegebenen Namen am angegebenen Ort gespeichert",
        ),
        ("Wait for 10 minutes", "Warten Sie 15 Minuten"),
        ("Page 2 of 2 is shown to the user", "Dem Benutzer wird die Seite 2 gezeigt"),
        ("Simple OpenStack Dashboard", "Simple OpenStack Dashboard"),
        (
            "The file was saved on this disk",
            "The file has been saved on a disk",
        ),  # untranslated
        ("Die Datei ist nicht gespeichert", "Die Datei wurde nicht gesichert"),  # German source
        ("Сохранить этот файл", "Diese Datei speichern"),
        ("Fula (Latin) (Guinea)", "Fulfulde (Lateinisch) (Guinea)"),  # a list of names
        ("Save (the file now", "Die Datei jetzt sichern"),
    ],
)
def test_what_is_no_plain_translation_is_dropped(english, german):
    assert list(clean_message(english, german)) == []


@pytest.mark.parametrize(
    ("message", "pair"),
    [
        (("&Save the file", "Datei &speichern"), ("Save the file", "Datei speichern")),
        (("Save _the file", "_Datei speichern"), ("Save the file", "Datei speichern")),
        (("Save the file...", "Datei speichern …"), ("Save the file", "Datei speichern")),
        (("Save the file:", "Datei speichern"), None),  # one side alone ends so
        (("Save\nthe   file", " Datei\n speichern "), ("Save the file", "Datei speichern")),
        (
            ("Save <b>the</b> file", 'Die <b class="x">Datei</b> speichern'),
            ("Save the file", "Die Datei speichern"),
        ),
        (
            (
                "About 20 % of all 1,000 files are saved",
                "Etwa 20% aller 1.000 Dateien sind gesichert",
            ),
            None,
        ),
        (("Food & drink for all", "Essen & Getränke für alle"), None),
    ],
)
def test_dress_is_taken_off(message, pair):
    assert list(clean_message(*message)) == [pair or message]


@pytest.mark.parametrize(
    ("english", "german", "pairs"),
    [
        (
            "The first line.\n\nThe second\nline is here.",
            "Die erste Zeile.\n\nDie zweite Zeile\nsteht hier.",
            [
                ("The first line.", "Die erste Zeile."),
                ("The second line is here.", "Die zweite Zeile steht hier."),
            ],
        ),
        (
            "The first line.\n\nThe second\nline is here.",
            "Die erste Zeile. Die zweite Zeile\nsteht hier.",
            [],
        ),
        (  # a bold heading is not glued to its text
            "<b>Save your file</b>\nThe text goes here.",
            "<b>Datei speichern</b>\nHier steht der Text.",
            [
                ("Save your file", "Datei speichern"),
                ("The text goes here.", "Hier steht der Text."),
            ],
        ),
    ],
)
def test_paragraphs_are_paired_one_to_one(english, german, pairs):
    assert list(clean_message(english, german)) == pairs


def test_a_placeholder_costs_only_its_own_sentence():
    english = "The file {name} is gone. " + GOOD[0]
    german = "Die Datei {name} ist weg. " + GOOD[1]
    assert list(clean_message(english, german)) == [GOOD]
    assert list(clean_message(english, "Oh je! " + german)) == []


def test_matching_key_ignores_case_punctuation_and_spacing():
    assert matching_key("Save  the file!") == matching_key("save the “File”")
    assert matching_key("Straße öffnen") == matching_key("STRASSE ÖFFNEN")
    assert matching_key("Save the file") != matching_key("Save the files")
    assert matching_key("?! …") == ""


def test_a_name_with_an_underscore_is_no_shortcut():
    """Both sides have it: the pair is dropped with its name, and no letter of it is lost."""
    assert (
        list(clean_message("Edit the file my_name now", "Jetzt die Datei my_name bearbeiten"))
        == []
    )
    pair = ("Edit the file now", "Jetzt die Datei bearbeiten")
    assert list(clean_message("Edit _the file now", "Jetzt die _Datei bearbeiten")) == [pair]


def test_english_in_the_place_of_german_is_dropped_whatever_its_words():
    assert (
        list(clean_message("The file was saved on a disk", "It is not possible to open that"))
        == []
    )
    assert (
        list(
            clean_message(
                "Es ist nicht der erste Ordner", "Die Datei wurde auf Platte gesichert"
            )
        )
        == []
    )


def test_a_letter_that_grows_in_lower_case_splits_no_word():
    """The lower case of İ has a separate dot, which is no letter."""
    assert _words("İstanbul liegt") == ["i\u0307stanbul", "liegt"]
