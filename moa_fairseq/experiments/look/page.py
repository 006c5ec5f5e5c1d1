"""The page itself: a template with the runs' data as JSON, the style and the program."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jinja2

from moa_fairseq.experiments.look.sentences import Sentence, check_pairing, score_signature
from moa_fairseq.experiments.look.trained_run import Examination
from moa_fairseq.experiments.records.json_files import Values, changes
from moa_fairseq.experiments.tables import values_of
from moa_fairseq.files import atomic_write

HERE = Path(__file__).parent


def assemble(runs: Sequence[Examination], made_by: Values) -> Values:
    """Everything that the page shows, as JSON.

    Args:
        runs: one or two runs, as `examine` returns them.
        made_by: the provenance of the page.

    Raises:
        UserError: for two runs with different text.
    """
    is_scored = any("score" in sentence for run in runs for sentence in run.sentences)
    return {
        "made_by": made_by,
        "score": score_signature() if is_scored else None,
        "runs": [run.facts for run in runs],
        "differences": _differences(*runs) if len(runs) == 2 else [],
        "sentences": _side_by_side(runs),
    }


def _differences(first: Examination, second: Examination) -> list[tuple[str, str]]:
    """How the recipe of the first run differs from that of the second; a UserError if their text differs."""
    names = [first.facts["name"], second.facts["name"]]
    check_pairing(first.sentences, second.sentences, names)
    return list(changes(_settings(second.recipe), _settings(first.recipe)).items())


def _settings(recipe: Values) -> Values:
    """A recipe without its title, and without the settings that are null, because null means "not set"."""
    settings = {}
    for key, value in recipe.items():
        if value is not None and key not in ("experiment", "summary"):
            settings[key] = _settings(value) if isinstance(value, dict) else value
    return settings


def _side_by_side(runs: Sequence[Examination]) -> list[list[Sentence]]:
    """Each sentence as a list with that of each run, which is {} if the run has no sentences."""
    count = min((len(run.sentences) for run in runs if run.sentences), default=0)
    rows: list[list[Sentence]] = []
    for index in range(count):
        rows.append([run.sentences[index] if run.sentences else {} for run in runs])
    return rows


def write(data: Values, path: Path) -> int:
    """Write the page, whole or not at all.

    Foreign text can neither end the HTML element that it is in nor change the direction of writing: in the
    JSON, <, >, &, ' and all characters beyond ASCII are escapes.

    Args:
        data: the data that the page shows, from `assemble`.
        path: the file to write.

    Returns:
        The size of the page in bytes.
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
    """The digest by which the page's security policy allows its style and its program, and no others."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
