"""Which tests run, in which order, on how many examples. What they share is in shared_fixtures.py."""

import random

import pytest

# Of each property: by default, and with --all
EXAMPLES = (100, 1000)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", dest="thorough", help="run the tests marked thorough, too"
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


def pytest_collection_modifyitems(config, items):
    """Without --all, what is marked thorough is left out unless it is named. The slow ones begin first.

    `thorough(keep="text")` keeps the cases whose id has that text, or one of a tuple of texts.
    """
    if not (config.getoption("thorough") or any("::" in word for word in config.args)):
        left_out = [item for item in items if is_thorough(item)]
        items[:] = [item for item in items if not is_thorough(item)]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def is_thorough(item):
    mark = item.get_closest_marker("thorough")
    if mark is None:
        return False
    keep = mark.kwargs.get("keep", ())
    return not any(text in item.name for text in ([keep] if isinstance(keep, str) else keep))
