#!/usr/bin/env python3
"""Tatoeba's sentence pairs as training, validation and test text.

  python data-prep/tatoeba.py deu.txt data/tatoeba           (--languages en,de --held-out 2000)
  moa-fairseq prepare tatoeba data/tatoeba_ende --from data/tatoeba

deu.txt: two columns (English, German), separated by a tab, of deu-eng.zip from https://www.manythings.org/anki
(CC BY 2.0; further columns are passed over); plain or .gz. All pairs of one English sentence go to the same
part, so that no test sentence was seen in training. The order is shuffled; both depend on the text alone.
There is no published split: scores compare models with each other, and only on the same version of the file.
"""

import argparse
import gzip
import hashlib
from pathlib import Path


def main() -> None:
    """Write {train,valid,test}.{en,de}."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--languages", default="en,de", help="endings of the files, in the columns' order"
    )
    parser.add_argument(
        "--held-out", type=int, default=2000, help="pairs of valid and of test, about"
    )
    args = parser.parse_args()
    with gzip.open(args.file) if args.file.suffix == ".gz" else open(args.file, "rb") as lines:
        pairs = sorted(
            {tuple(line.decode("utf-8").split("\t")[:2]) for line in lines if b"\t" in line}
        )
    if not pairs:
        parser.error(f"{args.file} has no line with a tab: give the text file out of the archive.")
    pairs = [tuple(" ".join(side.split()) for side in pair) for pair in pairs]
    pairs.sort(key=lambda pair: hashlib.sha256("\t".join(pair).encode()).digest())
    share = args.held_out / len(pairs)
    parts = {"train": [], "valid": [], "test": []}
    for pair in pairs:
        place = int(hashlib.sha256(b"split" + pair[0].encode()).hexdigest(), 16) / 2**256
        parts["valid" if place < share else "test" if place < 2 * share else "train"].append(pair)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        for language, column in zip(args.languages.split(","), zip(*rows)):
            (args.folder / f"{name}.{language}").write_text(
                "\n".join(column) + "\n", encoding="utf-8"
            )
        print(f"{name}: {len(rows):,} pairs")


if __name__ == "__main__":
    main()
