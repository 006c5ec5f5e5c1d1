"""Dividing unique pairs into train, valid and test so that no sentence stands in two of them."""

import hashlib
from typing import Dict, List, NamedTuple, Sequence

from moa_fairseq.corpus.clean import matching_key

SPLITS = ("train", "valid", "test")
TEST_PAIRS = 1500
VALID_PAIRS = 1000
# A corpus made of fewer packages gives no more than these shares away.
MAX_TEST_SHARE = 1 / 12
MAX_VALID_SHARE = 1 / 18


class SourcedPair(NamedTuple):
    """A clean pair and the package it came from."""

    english: str
    german: str
    package: str


def unique_pairs(pairs: Sequence[SourcedPair]) -> List[SourcedPair]:
    """One pair per English sentence, with the German that most of its translations agree on (ties: first).

    English sentences that differ only in case, spacing or punctuation count as one.
    """
    by_english: Dict[str, List[SourcedPair]] = {}
    for pair in pairs:
        by_english.setdefault(matching_key(pair.english), []).append(pair)
    favourites = []
    for candidates in by_english.values():
        keys = [matching_key(pair.german) for pair in candidates]
        favourites.append(candidates[max(range(len(keys)), key=lambda place: keys.count(keys[place]))])
    return favourites


def split_pairs(pairs: Sequence[SourcedPair]) -> Dict[str, List[SourcedPair]]:
    """Assign unique pairs to "train", "valid" and "test", the same way for the same pairs in any order.

    Every English sentence occurs once, so the pairs that must stay together are those that share
    their German: such a group goes to one split as a whole. Groups are drawn in the order of a hash of
    that German; the order of lines within a split follows the same hash.
    """
    groups: Dict[str, List[SourcedPair]] = {}
    for pair in pairs:
        groups.setdefault(matching_key(pair.german), []).append(pair)
    room = {
        "test": min(TEST_PAIRS, int(len(pairs) * MAX_TEST_SHARE)),
        "valid": min(VALID_PAIRS, int(len(pairs) * MAX_VALID_SHARE)),
    }
    splits: Dict[str, List[SourcedPair]] = {name: [] for name in SPLITS}
    for key in sorted(groups, key=lambda key: hashlib.sha256(key.encode("utf-8")).hexdigest()):
        group = sorted(groups[key])
        for name in ("test", "valid"):
            if len(splits[name]) + len(group) <= room[name]:
                splits[name].extend(group)
                break
        else:
            splits["train"].extend(group)
    return splits
