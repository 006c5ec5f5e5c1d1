"""ListOps: the values against an evaluator of its own, limits, splits and seeds."""

import collections
import statistics

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import listops
from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.listops import OPERATORS, Expression, ListOps
from moa_fairseq.experiments.data.manifest import read_manifest

SIZES = {"train": 600, "valid": 50, "test": 203}


def settings(sizes, **changed):
    """The published settings, but for these."""
    return ListOps(**{**datasets()["listops"].generated, "sizes": sizes, **changed})


@pytest.fixture(scope="module")
def splits():
    return settings(SIZES).splits()


def parse(tokens):
    """Tokens → a digit, or [operator, argument, ...]."""
    stack = [[]]
    for token in tokens.split():
        if token == "]":
            done = stack.pop()
            stack[-1].append(done)
        elif token.startswith("["):
            stack.append([token[1:]])
        else:
            stack[-1].append(int(token))
    ((tree,),) = stack
    return tree


def evaluate(tree):
    if isinstance(tree, int):
        return tree
    name = tree[0]
    values = [evaluate(argument) for argument in tree[1:]]
    functions = {"MIN": min, "MAX": max, "SM": lambda v: sum(v) % 10, "MED": statistics.median}
    return int(functions[name](values))


def depth(tree):
    return 1 if isinstance(tree, int) else 1 + max(map(depth, tree[1:]))


def length(tree):
    """An operator, its bracket and the closing one are three symbols."""
    return 1 if isinstance(tree, int) else 3 + sum(map(length, tree[1:]))


def dependency(tree):
    """1 + that of the arguments which the result is made of."""
    if isinstance(tree, int):
        return 1
    values = [evaluate(argument) for argument in tree[1:]]
    below = [dependency(a) for a in tree[1:]]
    if tree[0] in ("MIN", "MAX"):
        below = [below[values.index(evaluate(tree))]]
    elif tree[0] == "MED":
        order = sorted(zip(values, range(len(values))))
        middle = order[(len(order) - 1) // 2 : len(order) // 2 + 1]
        below = [below[place] for _, place in middle]
    return 1 + max(below)


def test_values_and_depths_are_those_of_an_independent_evaluator(splits):
    seen = collections.Counter()
    for found in [found for split in splits.values() for found in split]:
        tree = parse(found.tokens)
        assert found == Expression(
            found.tokens, evaluate(tree), depth(tree), length(tree), dependency(tree)
        )
        seen.update(token for token in found.tokens.split() if token in OPERATORS)
    assert set(seen) == set(OPERATORS) and min(seen.values()) > 100


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ("[MED 1 2 3 9 ]", 2),
        ("[MED 0 1 ]", 0),
        ("[SM 9 9 ]", 8),
        ("[MAX [MIN 4 5 ] [SM 7 5 ] ]", 4),
    ],
)
def test_the_evaluator_by_hand(tokens, value):
    assert evaluate(parse(tokens)) == value


def test_limits(splits):
    every = [found for split in splits.values() for found in split]
    assert (
        max(found.length for found in every) in (49, 50)
        and max(found.depth for found in every) == 6
    )
    assert min(found.depth for found in every) == 2
    assert all(
        2 <= len(node) - 1 <= 5 for found in every for node in _nodes(parse(found.tokens))
    )


def _nodes(tree):
    if isinstance(tree, list):
        yield tree
        for argument in tree[1:]:
            yield from _nodes(argument)


def test_each_dependency_depth_has_its_share_of_every_split(splits):
    for split, size in SIZES.items():
        counts = collections.Counter(found.dependency for found in splits[split])
        assert (
            sorted(counts) == [2, 3, 4, 5, 6]
            and sum(counts.values()) == len(splits[split]) == size
        )
        assert max(counts.values()) - min(counts.values()) <= 1


def test_no_expression_stands_twice(splits):
    every = [found.tokens for split in splits.values() for found in split]
    assert len(set(every)) == len(every) == sum(SIZES.values())


def test_all_splits_have_the_same_distribution():
    """Filled one after the other, the first would have the short ones, which are drawn again and again."""
    drawn = settings({"train": 1000, "test": 1000}, max_depth=2, max_arguments=2).splits()
    # Such as [MIN 1 2 ]
    shortest = [sum(found.length == 5 for found in split) for split in drawn.values()]
    assert 250 < sum(shortest) <= 400 and min(shortest) > 0.4 * sum(shortest)


def test_another_seed_draws_others():
    one, other = (settings({"train": 30}, seed=seed).splits() for seed in (7, 8))
    assert one != other


def test_more_than_there_are(monkeypatch):
    monkeypatch.setattr(listops, "_MOST_IDLE", 1)
    with pytest.raises(
        UserError, match=r"only [\d,]+ different expressions of dependency depth 2"
    ):
        settings({"train": 5000}, max_depth=2, max_arguments=2).splits()


def test_prepared_data_is_what_fairseqs_task_reads(prepare, made, tmp_path, said):
    first, out = prepare("listops", None)
    assert first.sentences == {"train": 100, "valid": 10, "test": 20}
    assert any("train: 100 expressions" in line for line in said)
    folder = out / "binarised"
    text = out / "text"
    config = SentencePredictionConfig(
        data=str(folder), num_classes=10, init_token=0, regression_target=False, seed=1
    )
    task = SentencePredictionTask.setup_task(config)
    groups = (folder / "groups" / "test.tsv").read_text("utf-8").splitlines()
    lines = (text / "input0" / "test").read_text("utf-8").splitlines()
    data = task.load_dataset("test")
    assert len(data) == len(lines) == 20 and groups[0] == "dependency\tdepth\tlength"
    for place, (line, row) in enumerate(zip(lines, groups[1:])):
        tree = parse(line)
        assert task.dictionary.string(data[place]["net_input.src_tokens"][1:]) == line
        assert data[place]["target"].item() == evaluate(tree)  # class 7 is the value 7
        assert row == f"{dependency(tree)}\t{depth(tree)}\t{length(tree)}"
    manifest = read_manifest(out)
    assert (
        manifest["settings"]["generated"]["seed"] == 1
        and manifest["lines"]["train"]["found"] == 100
    )
    assert "binarised/input0/train.bin" in manifest["outputs"]
    # one seed gives the same bytes
    assert made.tree(prepare("listops", None, "again")[1]) == made.tree(out)
