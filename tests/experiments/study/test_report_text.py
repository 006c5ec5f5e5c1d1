"""The text of a report: its tables of systems, contrasts, caches and translations."""

import re
from types import SimpleNamespace

import pytest
from played_study import of_system

from moa_fairseq.experiments.study.design import Study
from moa_fairseq.experiments.study.report_text import as_text


@pytest.mark.parametrize(("seeds", "columns"), [(4, 0), (3, 3)])
def test_the_text_of_a_report_has_its_systems_seeds_intervals_and_signatures(seeds, columns):
    """The number of seeds is a column of each table if it is not that of all rows."""
    interval = {"mean": -0.5, "low": -0.61234, "high": -0.4}
    pair = {"contrast": "gain", "n": 4, "p_holm": 0.01}
    contrast = {**pair, **interval, "first": "B", "second": "A", "verdict": "better"}
    bleu = {**pair, "first": 3.0, "second": 2.0, "difference": 1.0}
    content = {
        "runs": 8,
        "planned": 8,
        "systems": [of_system("A"), of_system("B", n=seeds, diverged=2)],
        "contrasts": [contrast | {"minimum_detectable_effect": 0.1}],
        "translations": [bleu | {"metric": key, "signature": f"{key}|1"} for key in ("x", "y")],
        "made_by": {"commit": {}, "hardware": {}, "precision": {}},
    }
    cache = {"system": "B", "cache_bytes": 64, "loss": 2.5, "is_pareto_optimal": True}
    content["cache"] = [{**cache, **interval, "decoding": {"cpu, 1": 0.5}}]
    systems = {name: SimpleNamespace(label=name) for name in "AB"}
    text = as_text(Study("toy", "?", 4, systems, {}), content, markdown=True)
    rows = re.findall(r"^\| ([AB]) ", text.partition("## Contrasts")[0], re.MULTILINE)
    assert rows == ["A", "B"]
    assert text.count("| seeds |") == columns
    assert text.count("| 2 |") == 1, "of the runs that diverged"
    assert text.count("-0.6123 … -0.4000") == 2, "of the contrast and of the cache"
    assert "x|1, y|1" in text
