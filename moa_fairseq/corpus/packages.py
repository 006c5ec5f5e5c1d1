"""The locked list of wheels that the corpus is made of."""

import json
from pathlib import Path
from typing import List, NamedTuple

PACKAGES_FILE = Path(__file__).with_name("packages.json")


class Package(NamedTuple):
    """One pinned wheel. `size` is in bytes; `sha256` is of the whole file."""

    name: str
    version: str
    file: str
    sha256: str
    size: int


def load_packages(path: Path = PACKAGES_FILE) -> List[Package]:
    """The pinned wheels, in the order that decides ties between equally good translations."""
    return [Package(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["packages"]]
