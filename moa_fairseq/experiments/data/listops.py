"""ListOps (Nangia and Bowman, NAACL-HLT 2018): nested operations on digits, generated from a seed."""

import dataclasses
import itertools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import INPUT, LABEL
from moa_fairseq.files import atomic_write
from moa_fairseq.text.workers import ordered_map

DIGITS = tuple("0123456789")
CLOSE = "]"
# Next to the binarised data: a line per sentence, a column per property by which scores are grouped.
GROUPS = "groups"
_GROUPS = ("dependency", "depth", "length")
_DRAWS = 10000  # draws of a block
_BLOCKS = 100000  # the most blocks
_MOST_IDLE = 10  # after so many blocks without a new expression, there are hardly any more


@dataclasses.dataclass(frozen=True)
class Expression:
    """One expression.

    Args:
        tokens: its text, such as `[MAX 2 [SM 9 4 ] ]`.
        value: its value, from 0 to 9.
        depth: the depth of the tree: 1 for a digit, and one more for each operator around it.
        length: the number of symbols; an operator and its two brackets are three.
        dependency: the dependency depth: the number of values in the longest chain of dependences that leads
            to the result; arguments that an operator does not select do not count.
    """

    tokens: str
    value: int
    depth: int = 1
    length: int = 1
    dependency: int = 1


_value = operator.attrgetter("value")


def _medians(arguments: Sequence[Expression]) -> Sequence[Expression]:
    """The argument in the middle by value, or the two arguments there."""
    ordered = sorted(arguments, key=_value)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


# The arguments that determine an operator's value: their sum modulo 10 for SM, else their mean, rounded down.
OPERATORS: dict[str, Callable[[Sequence[Expression]], Sequence[Expression]]] = {
    "[MIN": lambda arguments: [min(arguments, key=_value)],
    "[MAX": lambda arguments: [max(arguments, key=_value)],
    "[MED": _medians,
    "[SM": list,
}
SYMBOLS = (CLOSE, *OPERATORS, *DIGITS)


@dataclasses.dataclass(frozen=True)
class ListOps:
    """The settings of a ListOps data set, from datasets.yaml.

    Args:
        sizes: split → number of expressions, of which each dependency depth from 2 to max_depth has an
            equal share (a fifth, as max_depth is 6).
        seed: random seed of all expressions.
        max_length: longest expression, counted as in `Expression.length`.
        max_depth: greatest `Expression.depth`.
        operator_probability: probability that an argument is an operator instead of a digit.
        max_arguments: most arguments of an operator; the fewest are two.
    """

    sizes: Mapping[str, int]
    seed: int
    max_length: int
    max_depth: int
    operator_probability: float
    max_arguments: int

    def splits(self, workers: int = 1) -> dict[str, list[Expression]]:
        """The expressions of every split. No expression occurs twice, in one split or in two.

        They are drawn together and dealt out at random, so that all splits have the same distribution.

        Args:
            workers: processes; the expressions are the same for any number.

        Raises:
            UserError: if there are not enough different expressions.
        """
        depths = range(2, self.max_depth + 1)
        shares = {split: _even_shares(size, depths) for split, size in self.sizes.items()}
        totals = {depth: sum(share[depth] for share in shares.values()) for depth in depths}
        rng = random.Random(f"listops deal {self.seed}")
        out: dict[str, list[Expression]] = {split: [] for split in self.sizes}
        for depth, expressions in self._distinct_expressions(totals, workers).items():
            rng.shuffle(expressions)
            samples = iter(expressions)
            for split, share in shares.items():
                out[split].extend(itertools.islice(samples, share[depth]))
        for expressions in out.values():
            rng.shuffle(expressions)
        return out

    def _distinct_expressions(
        self, numbers: Mapping[int, int], workers: int
    ) -> dict[int, list[Expression]]:
        """Draw as many different expressions as requested of each dependency depth."""
        expressions: dict[int, list[Expression]] = {depth: [] for depth in numbers}
        texts: set[str] = set()
        idle = 0
        blocks = ([(self, number)] for number in range(_BLOCKS))
        for block in ordered_map(_draw_block, blocks, workers, "ListOps"):
            before = len(texts)
            for expression in block:
                depth = expression.dependency
                if len(expressions[depth]) < numbers[depth] and expression.tokens not in texts:
                    texts.add(expression.tokens)
                    expressions[depth].append(expression)
            if len(texts) == sum(numbers.values()):
                return expressions
            idle = idle + 1 if len(texts) == before else 0
            if idle == _MOST_IDLE:
                break
        depth = max(numbers, key=lambda depth: numbers[depth] - len(expressions[depth]))
        count = len(expressions[depth])
        problem = f"ListOps has only {count:,} different expressions of dependency depth {depth}"
        raise UserError(f"{problem}, but --sizes needs {numbers[depth]:,}. Give smaller --sizes.")

    def draw(self, rng: random.Random) -> Expression | None:
        """One random expression, or None if it is longer than max_length."""
        root = self._subtree(rng, self.max_depth)
        if root.depth < 2:
            # A digit becomes an argument of an operator
            arguments = self._arguments(rng, self.max_arguments - 1, self.max_depth - 1)
            arguments.insert(_random_below(rng, len(arguments)), root)
            root = _operation(rng, arguments)
        return root if root.length <= self.max_length else None

    def _subtree(self, rng: random.Random, max_depth: int) -> Expression:
        """A random digit, or an operator with random arguments."""
        if max_depth == 1 or rng.random() > self.operator_probability:
            value = _random_below(rng, 10)
            return Expression(DIGITS[value], value)
        return _operation(rng, self._arguments(rng, self.max_arguments, max_depth - 1))

    def _arguments(self, rng: random.Random, most: int, max_depth: int) -> list[Expression]:
        """Two to `most` random arguments of an operator."""
        return [self._subtree(rng, max_depth) for _ in range(2 + _random_below(rng, most - 1))]


def _even_shares(number: int, parts: Sequence[int]) -> dict[int, int]:
    """Part → its share of a number; the first parts have one more if the number is not a multiple."""
    quotient, remainder = divmod(number, len(parts))
    return {
        part: quotient + 1 if index < remainder else quotient for index, part in enumerate(parts)
    }


def _operation(rng: random.Random, arguments: Sequence[Expression]) -> Expression:
    """A random operator with these arguments."""
    name = tuple(OPERATORS)[_random_below(rng, len(OPERATORS))]
    chosen = OPERATORS[name](arguments)
    total = sum(map(_value, chosen))
    texts = [argument.tokens for argument in arguments]
    return Expression(
        tokens=" ".join([name, *texts, CLOSE]),
        value=total % 10 if name == "[SM" else total // len(chosen),
        depth=1 + max(argument.depth for argument in arguments),
        length=3 + sum(argument.length for argument in arguments),
        dependency=1 + max(argument.dependency for argument in chosen),
    )


def _random_below(rng: random.Random, end: int) -> int:
    """An integer from 0 to end − 1, by `random()`, which is the same in every version of Python."""
    return int(rng.random() * end)


def _draw_block(batch: list[tuple[ListOps, int]]) -> list[Expression]:
    """The different expressions of one block that are neither too long nor just a digit.

    Args:
        batch: one pair of the settings and the block's number; `ordered_map` hands out lists.
    """
    ((settings, number),) = batch
    # The seed and the block number determine an expression, whatever the number of processes
    rng = random.Random(f"listops {settings.seed} {number}")
    expressions = {}
    for _ in range(_DRAWS):
        expression = settings.draw(rng)
        if expression is not None:
            expressions[expression.tokens] = expression
    return list(expressions.values())


def write_split(folder: Path, split: str, expressions: Sequence[Expression]) -> dict[str, int]:
    """Write the sentences, classes and GROUPS of a split.

    Args:
        folder: the output folder for `input0/<split>`, `label/<split>` and `groups/<split>.tsv`, with a line
            per expression.
        split: the name of the split.
        expressions: the expressions of the split, in order.

    Returns:
        "lines" and "tokens": the numbers of expressions and of their tokens.
    """
    sentences = []
    classes = []
    groups = ["\t".join(_GROUPS)]
    tokens = 0
    for expression in expressions:
        sentences.append(expression.tokens)
        classes.append(str(expression.value))
        groups.append("\t".join(str(getattr(expression, group)) for group in _GROUPS))
        tokens += len(expression.tokens.split())
    contents = {
        folder / INPUT / split: sentences,
        folder / LABEL / split: classes,
        folder / GROUPS / f"{split}.tsv": groups,
    }
    for path, lines in contents.items():
        with atomic_write(path) as stream:
            stream.writelines(f"{line}\n" for line in lines)
    return {"lines": len(expressions), "tokens": tokens}
