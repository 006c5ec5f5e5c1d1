"""`trainer_updates` and `chunked_training` are shared by the tests here."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory, fairseq):
    """Random words, 17 in a line."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(3)
    for split, size in (("train", 3000), ("valid", 403), ("test", 411)):
        words = [f"w{generator.randint(0, 20)}" for _ in range(size)]
        lines = [" ".join(words[i : i + 17]) for i in range(0, size, 17)]
        (folder / split).write_text("".join(line + "\n" for line in lines))
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin")
    return folder / "bin"
