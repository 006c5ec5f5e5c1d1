"""The choices of the Children's Book Test as running text, without the harness that asks for them."""

import pytest

from moa_fairseq.experiments.inference.zero_shot_tasks.cbt_documents import with_choices


class Documents(list):
    def map(self, change):
        return [change(document) for document in self]


@pytest.mark.parametrize(
    ("question", "context", "choices"),
    [
        ("The XXXXX sat .", " The", [" cat sat.", " dog sat."]),
        ("`` XXXXX sat , '' he said .", ' "', ['cat sat," he said.', 'dog sat," he said.']),
        ("( XXXXX )", " (", [" cat )", " dog )"]),
        ("XXXXX sat .", "", [" cat sat.", " dog sat."]),
    ],
)
def test_a_choice_begins_with_the_space_before_the_gap(question, context, choices):
    document = {
        "sentences": ["He ran !"],
        "question": question,
        "options": ["cat", "dog"],
        "answer": "dog",
    }
    (asked,) = with_choices(Documents([document]))
    assert asked == {"context": "He ran!" + context, "choices": choices, "gold": 1}
