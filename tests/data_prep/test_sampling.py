"""A random part of a training text."""

from moa_fairseq.data_prep.parallel_text import Piece
from moa_fairseq.data_prep.prepare import sample_pairs


def sample(folder, fraction, seed=1):
    """The pairs that are kept of a hundred numbered ones."""
    pairs = []
    for stem in ("old", "new"):
        pairs.append(tuple(Piece(folder / f"{stem}.{language}") for language in ("en", "de")))
    for piece, sign in zip(pairs[0], ("", "-")):
        piece.path.write_text("".join(f"{sign}{number}\n" for number in range(100)))
    facts = sample_pairs(*pairs, fraction, seed)
    english, german = ([int(x) for x in piece.path.read_text().split()] for piece in pairs[1])
    assert [-number for number in german] == english == sorted(english)
    assert facts == {"lines": len(english), "of": 100}
    return set(english)


def test_pairs_stay_together_and_samples_are_nested(tmp_path):
    samples = [sample(tmp_path, fraction) for fraction in (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)]
    assert [len(kept) for kept in samples] == [5, 10, 25, 50, 75, 100]
    assert all(small < large for small, large in zip(samples, samples[1:]))


def test_the_seed_decides(tmp_path):
    assert sample(tmp_path, 0.25) == sample(tmp_path, 0.25) != sample(tmp_path, 0.25, seed=2)


def test_something_is_left(tmp_path):
    assert len(sample(tmp_path, 0.0001)) == 1
