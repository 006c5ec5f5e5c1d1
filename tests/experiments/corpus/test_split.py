import random

import pytest

from moa_fairseq.experiments.corpus.build import (
    MAX_TEST_SHARE,
    MAX_VALID_SHARE,
    SourcedPair,
    split_pairs,
    unique_pairs,
)
from moa_fairseq.experiments.corpus.clean import matching_key


def random_pairs(seed, count=4000):
    """Pairs with many repeated English and German sides, in variants of case and punctuation."""
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(60)]

    def sentence():
        text = " ".join(draw.choices(words, k=2))
        return draw.choice([text, text.upper(), text + ".", text + "!", text.capitalize()])

    return [SourcedPair(sentence(), "g" + sentence(), draw.choice("abc")) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_no_sentence_is_in_two_splits(seed):
    pairs = unique_pairs(random_pairs(seed))
    # German that is shared
    assert len({matching_key(pair.german) for pair in pairs}) < 0.9 * len(pairs)
    splits = split_pairs(pairs)
    assert sorted(pair for members in splits.values() for pair in members) == sorted(pairs)
    for side in ("english", "german"):
        keys = {
            name: {matching_key(getattr(pair, side)) for pair in members}
            for name, members in splits.items()
        }
        assert all(keys.values()) and len(set.union(*keys.values())) == sum(
            map(len, keys.values())
        )


def test_order_of_input_does_not_matter_and_sizes_are_bounded():
    pairs = unique_pairs(random_pairs(1))
    shuffled = list(pairs)
    random.Random(2).shuffle(shuffled)
    splits = split_pairs(pairs)
    assert splits == split_pairs(shuffled)
    for split, share in (("test", MAX_TEST_SHARE), ("valid", MAX_VALID_SHARE)):
        bound = int(len(pairs) * share)
        assert 0.9 * bound <= len(splits[split]) <= bound


def test_a_full_size_corpus_gives_1500_test_and_1000_valid_pairs():
    pairs = [SourcedPair(f"e{number}", f"g{number}", "a") for number in range(25000)]
    sizes = {name: len(members) for name, members in split_pairs(pairs).items()}
    assert sizes == {"train": 22500, "valid": 1000, "test": 1500}


def test_the_most_frequent_translation_wins_and_ties_go_to_the_first():
    pairs = [
        SourcedPair("Save the file", "Datei sichern", "a"),
        SourcedPair("save the file!", "Datei speichern", "b"),
        SourcedPair("Save the file", "Datei speichern.", "c"),
        SourcedPair("Open it", "Öffnen", "a"),
        SourcedPair("Open it", "Aufmachen", "b"),
    ]
    assert unique_pairs(pairs) == [pairs[1], pairs[3]]
