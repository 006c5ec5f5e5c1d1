"""ListOps (Nangia and Bowman, NAACL-HLT 2018): nested operations on digits, drawn by a seed."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import INPUT, LABEL
from moa_fairseq.experiments.text.workers import ordered_map
from moa_fairseq.files import atomic_write

DIGITS = tuple("0123456789")
CLOSE = "]"
# Beside the binarised data: a line for each sentence, a column for each thing by which scores are told apart.
GROUPS = "groups"
_GROUPS = ("dependency", "depth", "length")
# Whether an expression is drawn is decided by its seed and block: so many blocks, however many processes.
_DRAWS = 10000
_BLOCKS = 100000
_MOST_IDLE = 10  # blocks in a row without anything new: there is nothing left


@dataclasses.dataclass(frozen=True)
class Expression:
    """One expression.

    Args:
        tokens: such as `[MAX 2 [SM 9 4 ] ]`.
        value: a digit.
        depth: 1 for a digit, one more for each operator around it.
        length: symbols, an operator's two brackets counted (three for each operator).
        dependency: the dependency depth: how many values that hang on each other lead to the result; the
            arguments that an operator does not choose do not count.
    """

    tokens: str
    value: int
    depth: int = 1
    length: int = 1
    dependency: int = 1


_value = operator.attrgetter("value")


def _middle(arguments: Sequence[Expression]) -> Sequence[Expression]:
    ordered = sorted(arguments, key=_value)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


# The arguments that an operator's value hangs on: their sum modulo 10 for SM, else their mean, rounded down.
OPERATORS: dict[str, Callable[[Sequence[Expression]], Sequence[Expression]]] = {
    "[MIN": lambda arguments: [min(arguments, key=_value)],
    "[MAX": lambda arguments: [max(arguments, key=_value)],
    "[MED": _middle,
    "[SM": list,
}
SYMBOLS = (CLOSE, *OPERATORS, *DIGITS)


@dataclasses.dataclass(frozen=True)
class ListOps:
    """The settings of a ListOps data set, as datasets.yaml has them.

    Args:
        sizes: split → expressions; a fifth of each has each dependency depth from 2 to max_depth = 6.
        seed: what all of them are drawn by.
        max_length: longest expression, as `Expression.length` counts.
        max_depth: greatest `Expression.depth`.
        operator_probability: that an argument is an operator and no digit.
        max_arguments: most arguments of an operator; it has two or more.
    """

    sizes: Mapping[str, int]
    seed: int
    max_length: int
    max_depth: int
    operator_probability: float
    max_arguments: int

    def splits(self, workers: int = 1) -> dict[str, list[Expression]]:
        """The expressions of every split. No expression stands twice, in one split or in two.

        They are drawn together and dealt out at random, so that all splits have the same distribution.

        Args:
            workers: processes; the expressions are the same for any number.

        Raises:
            UserError: where so many different ones cannot be had.
        """
        depths = range(2, self.max_depth + 1)
        shares = {  # that differ by one at most
            depth: [len(range(place, size, len(depths))) for size in self.sizes.values()]
            for place, depth in enumerate(depths)
        }
        found = self._drawn({depth: sum(share) for depth, share in shares.items()}, workers)
        chance = random.Random(f"listops deal {self.seed}")
        out: dict[str, list[Expression]] = {split: [] for split in self.sizes}
        for depth, share in shares.items():
            chance.shuffle(found[depth])
            drawn = iter(found[depth])
            for expressions, count in zip(out.values(), share):
                expressions.extend(itertools.islice(drawn, count))
        for expressions in out.values():
            chance.shuffle(expressions)
        return out

    def _drawn(self, wanted: Mapping[int, int], workers: int) -> dict[int, list[Expression]]:
        """Dependency depth → so many different expressions as wanted."""
        found: dict[int, list[Expression]] = {depth: [] for depth in wanted}
        known: set[str] = set()
        idle = 0
        blocks = ([(self, block)] for block in range(_BLOCKS))
        for drawn in ordered_map(_block, blocks, workers, "ListOps"):
            before = len(known)
            for expression in drawn:
                depth = expression.dependency
                if len(found[depth]) < wanted[depth] and expression.tokens not in known:
                    known.add(expression.tokens)
                    found[depth].append(expression)
            if len(known) == sum(wanted.values()):
                return found
            idle = idle + 1 if len(known) == before else 0
            if idle == _MOST_IDLE:
                break
        depth = max(wanted, key=lambda depth: wanted[depth] - len(found[depth]))
        problem = f"ListOps: only {len(found[depth]):,} different expressions of dependency depth {depth}"
        raise UserError(f"{problem} were found, and {wanted[depth]:,} are wanted: ask for fewer (--sizes).")

    def draw(self, chance: random.Random) -> Expression | None:
        """One expression, or None where it grew too long."""
        root = self._subtree(chance, self.max_depth)
        if root.depth < 2:
            arguments = self._arguments(chance, self.max_arguments - 1, self.max_depth - 1)
            arguments.insert(_below(chance, len(arguments)), root)
            root = _operation(chance, arguments)
        if root.length <= self.max_length:
            return root
        return None

    def _subtree(self, chance: random.Random, max_depth: int) -> Expression:
        if max_depth == 1 or chance.random() > self.operator_probability:
            value = _below(chance, 10)
            return Expression(DIGITS[value], value)
        return _operation(chance, self._arguments(chance, self.max_arguments, max_depth - 1))

    def _arguments(self, chance: random.Random, most: int, max_depth: int) -> list[Expression]:
        return [self._subtree(chance, max_depth) for _ in range(2 + _below(chance, most - 1))]


def _operation(chance: random.Random, arguments: Sequence[Expression]) -> Expression:
    name = tuple(OPERATORS)[_below(chance, len(OPERATORS))]
    chosen = OPERATORS[name](arguments)
    total = sum(map(_value, chosen))
    return Expression(
        " ".join([name, *(argument.tokens for argument in arguments), CLOSE]),
        total % 10 if name == "[SM" else total // len(chosen),
        1 + max(argument.depth for argument in arguments),
        3 + sum(argument.length for argument in arguments),
        1 + max(argument.dependency for argument in chosen),
    )


def _below(chance: random.Random, end: int) -> int:
    """Of 0 … end − 1, by `random`, which draws the same numbers in every version of Python."""
    return int(chance.random() * end)


def _block(batch: list[tuple[ListOps, int]]) -> list[Expression]:
    """The expressions of one block that are neither too long nor just a digit, each once."""
    ((settings, block),) = batch
    chance = random.Random(f"listops {settings.seed} {block}")
    drawn = (settings.draw(chance) for _ in range(_DRAWS))
    return list({expression.tokens: expression for expression in drawn if expression is not None}.values())


def write_split(folder: Path, split: str, expressions: Sequence[Expression]) -> dict[str, int]:
    """Write sentences, classes and GROUPS of a split.

    Args:
        folder: gets `input0/<split>`, `label/<split>` and `groups/<split>.tsv`, with a line for each
            expression.
        split: its name.
        expressions: in order.

    Returns:
        lines, and tokens of the sentences.
    """
    rows = [[str(getattr(expression, group)) for group in _GROUPS] for expression in expressions]
    contents = {
        folder / INPUT / split: [expression.tokens for expression in expressions],
        folder / LABEL / split: [str(expression.value) for expression in expressions],
        folder / GROUPS / f"{split}.tsv": ["\t".join(row) for row in [_GROUPS, *rows]],
    }
    for path, lines in contents.items():
        with atomic_write(path) as stream:
            stream.writelines(line + "\n" for line in lines)
    tokens = sum(len(expression.tokens.split()) for expression in expressions)
    return {"lines": len(expressions), "tokens": tokens}
