"""Reading what `fairseq-generate` prints: S- source, T- target, H- hypothesis, D- decoded hypothesis."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.archives import contents
from moa_fairseq.experiments.data.encodings import encoding_remedy
from moa_fairseq.experiments.records.json_files import LIST, MAPPING, TEXT, check_kinds, read_yaml

_ENTRY = re.compile(r"([STHD])-([0-9]{1,18})(?:\t(.*))?$", re.DOTALL)
_DICTIONARY = re.compile(r"\[(\w+)\] dictionary: [0-9]+ types")
# "Generate SUBSET with beam=N: "; old versions log it with a time stamp. There are two patterns because one
# pattern would search for the second half again after every "| Generate " of a line.
_LAST_LINE = re.compile(r"(?:^|\| )Generate (?=.)")
_WITH_BEAM = re.compile(r". with beam=[0-9]+: ")


class GenerateLog(NamedTuple):
    """The sentences of a log, sorted by id; each list has an entry for each sentence.

    Args:
        ids: the numbers of the sentences in the data, from 0.
        targets: the references (T).
        hypotheses: the best hypotheses in the model's symbols (H).
        decoded: the same hypotheses after fairseq's --bpe and --tokenizer (D); equal to H without these
            flags, and in logs of old versions.
        target_lang: the target language, or None if the log does not name it.
        complete: whether the log has its closing line.
    """

    ids: list[int]
    targets: list[str]
    hypotheses: list[str]
    decoded: list[str]
    target_lang: str | None
    complete: bool

    @property
    def is_decoded(self) -> bool:
        """Whether fairseq applied --bpe or --tokenizer to the hypotheses."""
        return self.decoded != self.hypotheses


def read_generate_log(path: str | Path, allow_partial: bool = False) -> GenerateLog:
    """Parse the output of fairseq-generate.

    With --nbest, only the first hypothesis of a sentence counts, which is the best one.

    Args:
        path: a file with its standard output, or its --results-path file.
        allow_partial: whether a log may lack its closing "Generate ... with beam" line, and sentences without
            target or hypothesis are left out.

    Raises:
        UserError: naming the file and line, for a missing or incomplete log, bytes that are not UTF-8, a
            sentence that occurs twice, or a log without targets or translations.
    """
    entries, language, is_complete = _parse(path)
    targets = entries["T"]
    hypotheses = entries["H"]
    if not hypotheses:
        raise UserError(
            f"{path} holds no translation (no line H-...). Give the output of fairseq-generate run "
            f"without --quiet."
        )
    if not targets:
        raise UserError(
            f"{path} holds no reference (no line T-...): the data was binarised without its target side. "
            f"Score the H- lines as a text file with --hypothesis and --reference."
        )
    ids = sorted(targets.keys() & hypotheses.keys())
    lonely = sorted(targets.keys() ^ hypotheses.keys())
    if (lonely or not is_complete) and not (allow_partial and ids):
        reason = "has no closing line 'Generate ... with beam=...'"
        if is_complete:
            reason = f"has a target or a hypothesis, but not both, for sentence {lonely[0]}"
        raise UserError(
            f"{path} {reason}: the generation was cut short, or is still running. Run fairseq-generate to "
            f"the end, or score what is there with --allow-partial."
        )
    return GenerateLog(
        ids=ids,
        targets=[targets[i] for i in ids],
        hypotheses=[hypotheses[i] for i in ids],
        decoded=[entries["D"].get(i, hypotheses[i]) for i in ids],
        target_lang=language,
        complete=is_complete,
    )


def _parse(path: str | Path) -> tuple[dict[str, dict[int, str]], str | None, bool]:
    """The lines of a log. Raise UserError for a sentence that occurs twice.

    Returns:
        Kind of line → sentence id → text; the target language, or None if the log does not name it; and
        whether the log has its closing line.
    """
    entries: dict[str, dict[int, str]] = {kind: {} for kind in "STHD"}
    language = None
    is_complete = False
    for number, line in enumerate(read_lines(path), 1):
        match = _ENTRY.match(line)
        if match is None:
            generate = _LAST_LINE.search(line)
            if generate and _WITH_BEAM.search(line, generate.end()):
                is_complete = True
            # The log names the source's dictionary first and the target's last
            if dictionary := _DICTIONARY.search(line):
                language = dictionary[1]
            continue
        kind = match[1]
        sentence = int(match[2])
        text = match[3] or ""
        if kind in "HD":
            # "score<TAB>text"; with --nbest, a sentence has further hypotheses
            entries[kind].setdefault(sentence, text.partition("\t")[2])
            continue
        if sentence in entries[kind]:
            raise UserError(
                f"{path}, line {number}: {kind}-{sentence} occurs for the second time, so the file holds "
                f"more than one run. Give the log of a single fairseq-generate."
            )
        entries[kind][sentence] = text
    return entries, language, is_complete


def beside_recipe(path: str | Path) -> tuple[Path, str | None]:
    """A file with translations, and the target language from a recipe.yaml next to it.

    Args:
        path: a file, or a run folder, which means its first log.

    Returns:
        The file, and the language, or None without a recipe that names one.

    Raises:
        UserError: for a folder without a log, and for a damaged recipe.yaml.
    """
    path_given = Path(path)
    folder = path_given if path_given.is_dir() else path_given.parent
    file = folder / "recipe.yaml"
    remedy = "Restore it; or remove it, and say --target-lang."
    recipe: Any = read_yaml(file, remedy) if file.is_file() else {}
    check_kinds(recipe, {"data": MAPPING, "generate": MAPPING}, str(file), remedy)
    data = recipe.get("data") or {}
    generate = recipe.get("generate") or {}
    check_kinds(data, {"target": TEXT}, f"{file}: data", remedy)
    check_kinds(generate, {"subsets": LIST}, f"{file}: generate", remedy)
    language = data.get("target")
    if not path_given.is_dir():
        return path_given, language
    logs = sorted(folder.glob("generate-*.txt"))
    if not logs:
        raise UserError(
            f"{path} holds no generate-SUBSET.txt: run its generate stage, or name a log."
        )
    for subset in (generate.get("subsets") or [])[:1]:
        if (first := folder / f"generate-{subset}.txt") in logs:
            return first, language
    return logs[0], language


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file without their line ends, split at LF only (as Perl and fairseq do).

    Args:
        path: the file; ARCHIVE.tar.xz/NAME is a file in an archive.

    Raises:
        UserError: for a file that cannot be read, and for a line that is not UTF-8, with its number.
    """
    for archive in Path(path).parents:
        if archive.suffix == ".xz" and archive.is_file():
            packed = contents(archive)
            name = Path(path).relative_to(archive).as_posix()
            if name not in packed:
                raise UserError(f"{archive} holds no {name}, but {', '.join(sorted(packed)[:5])} …")
            return lines_of(packed[name], path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:  # it says why
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from error
    return lines_of(data, path)


def lines_of(data: bytes, path: str | Path) -> list[str]:
    """The lines of a text in UTF-8 without their line ends, split at LF only.

    Args:
        data: the bytes of the text.
        path: the file of the text, or the name of a text in an archive, for messages.

    Raises:
        UserError: for a line that is not UTF-8, with its number.
    """
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        remedy = "Unpack the archive, mend the file, and pack it again."
        if Path(path).is_file():
            remedy = encoding_remedy(Path(path))
        problem = f"{path}, line {number}: byte 0x{data[error.start]:02x} is not UTF-8"
        raise UserError(f"{problem}. {remedy}") from error
    if lines[-1] == "":
        lines.pop()
    return lines
