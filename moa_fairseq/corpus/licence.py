"""The licence that a wheel's own metadata states."""

import email.parser
import re
import zipfile
from pathlib import Path

_METADATA = re.compile(r"^[^/]+\.dist-info/METADATA$")


def licence_of(wheel: Path) -> str:
    """The SPDX expression, else the licence classifiers, else the first line of the License field.

    "not stated" if the metadata has none of them.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _METADATA.match(name)]
        text = archive.read(names[0]).decode("utf-8", "replace") if names else ""
    metadata = email.parser.Parser().parsestr(text, headersonly=True)
    if metadata["License-Expression"]:
        return metadata["License-Expression"].strip()
    stated = [value for value in metadata.get_all("Classifier", []) if _is_licence(value)]
    classifiers = {value.split(" :: ")[-1].strip() for value in stated}
    if classifiers:
        return "; ".join(sorted(classifiers))
    lines = (metadata["License"] or "").strip().splitlines()
    return lines[0].strip() if lines and lines[0].strip().upper() != "UNKNOWN" else "not stated"


def _is_licence(classifier: str) -> bool:
    return classifier.startswith("License ::") and not classifier.endswith("OSI Approved")
