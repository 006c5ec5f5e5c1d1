"""The page itself: what was found as JSON in a template, with its style and its program."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from moa_fairseq.experiments.look.sentences import check_pairing, score_signature
from moa_fairseq.experiments.look.trained_run import Examination
from moa_fairseq.experiments.records.json_files import changes
from moa_fairseq.experiments.tables import values_of
from moa_fairseq.files import atomic_write

HERE = Path(__file__).parent


def assemble(runs: Sequence[Examination], made_by: dict[str, Any]) -> dict[str, Any]:
    """Everything that the page shows, as JSON.

    Args:
        runs: one or two, as `examine` reads them.
        made_by: the page's provenance.

    Raises:
        UserError: for two runs of different text.
    """
    readable = [run for run in runs if run.sentences]
    if len(readable) == 2:
        check_pairing(readable[0].sentences, readable[1].sentences, [run.name for run in runs])
    empty: list[dict[str, Any]] = [{}] * max((len(run.sentences) for run in runs), default=0)
    rows = zip(*(run.sentences or empty for run in runs))
    scored = ("score" in sentence for run in runs for sentence in run.sentences)
    differences = []
    if len(runs) == 2:
        hidden = {"experiment": None, "summary": None}
        first, second = runs
        change = changes(_settings(second.recipe | hidden), _settings(first.recipe | hidden))
        differences = list(change.items())
    return {
        "made_by": made_by,
        "score": score_signature() if any(scored) else None,
        "runs": [run.facts for run in runs],
        "differences": differences,
        "sentences": list(map(list, rows)),
    }


def _settings(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without what is null: a setting that is null is not set."""
    settings = {}
    for key, value in recipe.items():
        if value is not None:
            settings[key] = _settings(value) if isinstance(value, dict) else value
    return settings


def write(data: dict[str, Any], path: Path) -> int:
    """Write the page, whole or not at all.

    The text in it cannot end its element or change its direction: JSON has <, >, &, ' and everything beyond
    ASCII as escapes.

    Args:
        data: what it shows.
        path: of the file.

    Returns:
        Its size in bytes.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    style = (HERE / "page.css").read_text("utf-8")
    program = (HERE / "page.js").read_text("utf-8")
    text = environment.get_template("page.html").render(
        data=data,
        title=" and ".join(values_of(data["runs"], "name")),
        style=style,
        program=program,
        style_digest=_digest(style),
        program_digest=_digest(program),
    )
    with atomic_write(path) as stream:
        stream.write(text)
    return len(text.encode())


def _digest(text: str) -> str:
    """What the page's policy names a style or a program by: no other runs."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
