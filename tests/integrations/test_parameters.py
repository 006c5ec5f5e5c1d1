"""The page of parameters is what its command prints."""

from pathlib import Path

import pytest

try:
    import timm  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401 (what loads its libraries)
except (ImportError, OSError, RuntimeError) as error:
    pytest.skip(
        f"bash scripts/test.sh --integrations runs these, in an environment of their own ({error})",
        allow_module_level=True,
    )

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_todays_counts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "integrations"))
    import parameters

    recorded = ROOT / "results" / "tables" / "moh-parameters.md"
    assert parameters.page() + "\n" == recorded.read_text(encoding="utf-8")
    for name, counted, printed in parameters.rows():
        if printed is not None:
            assert abs(counted - printed) < 0.6, name
