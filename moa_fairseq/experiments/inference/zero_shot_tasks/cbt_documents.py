"""The Children's Book Test as running text: what its tokeniser put apart is put together."""

from typing import Any

GAP = "XXXXX"
# In this order, as the test's tokeniser (Penn Treebank's) separated them.
_TOGETHER = (
    *((" n't", "n't"), (" '", "'"), ("`` ", '"'), ("''", '"')),
    *((f" {mark}", mark) for mark in ":;!?,."),
)


def running_text(sentence: str) -> str:
    """A tokenised sentence as people write it, brackets and hyphens as they are."""
    for apart, together in _TOGETHER:
        sentence = sentence.replace(apart, together)
    return sentence


def with_choices(documents: Any) -> Any:
    """Adds to each document its context up to the gap, and what follows with each of the ten words.

    Args:
        documents: a data set of sentences (20), question with one XXXXX, options (10) and answer.

    Returns:
        It with "context", "choices" (each with the space before the gap, if there is one) and "gold".
    """

    def fill(document: dict[str, Any]) -> dict[str, Any]:
        before, after = running_text(document["question"]).split(GAP, 1)
        sentences = [running_text(sentence) for sentence in document["sentences"]]
        context = " ".join([*sentences, before])
        start = context.rstrip()
        space = context[len(start) :]
        return {
            "context": start,
            "choices": [space + option + after for option in document["options"]],
            "gold": document["options"].index(document["answer"]),
        }

    return documents.map(fill)
