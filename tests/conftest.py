"""Which tests run, in which order, on how many examples. What they share is in shared_fixtures.py."""

import collections
import datetime
import os
import random

import pytest

# Of each property: by default, and with --all
EXAMPLES = (100, 300)
# Long lists of cases run in parts, another part each day
DATE = os.environ.setdefault("MOA_FAIRSEQ_TESTS_DATE", datetime.date.today().isoformat())
DAY = datetime.date.fromisoformat(DATE).toordinal()
# A forked process waits forever for the threads that its parent had for a sum over many numbers
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", dest="thorough", help="also run the tests marked thorough"
    )


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config):
    """A process that only hands tests out to others (of pytest-xdist) does not import torch and fairseq."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        thorough = config.getoption("thorough")
        if config.option.hypothesis_seed is None:
            config.option.hypothesis_seed = random.getrandbits(32) if thorough else 0
        settings.register_profile(
            "moa_fairseq",
            database=None,
            deadline=None,
            max_examples=EXAMPLES[thorough],
            suppress_health_check=[
                HealthCheck.function_scoped_fixture
            ],  # they share a tmp_path
        )
        settings.load_profile("moa_fairseq")
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_terminal_summary(terminalreporter, config):
    seed = getattr(config.option, "hypothesis_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"properties: --hypothesis-seed={seed}")
    if config.getoption("thorough"):
        terminalreporter.write_line(f"parts of long lists: MOA_FAIRSEQ_TESTS_DATE={DATE}")


def pytest_collection_modifyitems(config, items):
    """Choose among the tests marked thorough, which run with --all or by name. Slow tests begin first.

    `thorough(keep="text")`: the cases whose id has that text, or one of a tuple of texts, always run.
    `thorough(one_in=3)`: with --all a third of the other cases runs, another third on each of three days.
    """
    if not any("::" in word for word in config.args):
        thorough = config.getoption("thorough")
        cases = collections.Counter()  # so far, of each function
        left_out = []
        for item in items:
            mark = item.get_closest_marker("thorough")
            if mark is None or is_kept(item, mark):
                continue
            function = item.nodeid.partition("[")[0]
            if not thorough or (cases[function] - DAY) % mark.kwargs.get("one_in", 1):
                left_out.append(item)
            cases[function] += 1
        config.hook.pytest_deselected(items=left_out)
        deselected = set(left_out)
        items[:] = [item for item in items if item not in deselected]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def is_kept(item, mark):
    keep = mark.kwargs.get("keep", ())
    return any(text in item.name for text in ([keep] if isinstance(keep, str) else keep))
