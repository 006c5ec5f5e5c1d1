"""readers.yaml names every place that reads files with a library which could unpickle, execute or unpack."""

import ast
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("readers.yaml")
FOLDERS = ("moa_fairseq", "benchmarks", "scripts", "data-prep", "docs")
# As they are written in the source, whether they are called there or passed on.
READERS = {
    *(
        "torch.load",
        "torch.jit.load",
        "torch.hub.load",
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
    ),
    *("numpy.load", "np.load", "numpy.memmap", "np.memmap", "numpy.fromfile", "np.fromfile"),
    *("marshal.load", "marshal.loads", "shelve.open", "sqlite3.connect", "joblib.load"),
    *(
        "yaml.load",
        "yaml.safe_load",
        "yaml.unsafe_load",
        "OmegaConf.load",
        "json.load",
        "json.loads",
    ),
    *(
        "tarfile.open",
        "zipfile.ZipFile",
        "gzip.open",
        "bz2.open",
        "lzma.open",
        "zstandard.open",
    ),
    *("torch.compile", "triton.autotune"),  # their caches hold programs
    *(
        "importlib.import_module",
        "runpy.run_path",
        "ctypes.CDLL",
        "ast.literal_eval",
        "eval",
        "exec",
    ),
}
# Of any object: libraries' classes and functions that open what they are given.
ANY = {
    *("SentencePieceProcessor", "MMapIndexedDataset", "Dictionary.load", "from_pretrained"),
    *("load_checkpoint_to_cpu", "load_model_ensemble_and_task", "import_user_module"),
    *("TaskManager", "simple_evaluate", "SqliteDict", "SafeLoader"),
}


def readers_of(path):
    """The readers that a file of the source names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = ast.unparse(node)
            found |= {name} & READERS | {
                word for word in ANY if f".{name}".endswith(f".{word}")
            }
    return found


@pytest.fixture(scope="module")
def named():
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {f"{path.relative_to(ROOT)}:{name}" for path in paths for name in readers_of(path)}


def listed():
    rows = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    assert all(row["reads"] and row["stranger"] for row in rows)
    pairs = [(file, names) for row in rows for file, names in row["where"].items()]
    return [f"{file}:{name}" for file, names in pairs for name in names]


def test_every_reader_has_a_line(named):
    assert named - set(listed()) == set()


def test_every_line_stands_for_a_reader_and_each_has_one(named):
    assert set(listed()) - named == set() and len(listed()) == len(set(listed()))


@pytest.mark.parametrize(
    ("line", "reader"),
    [
        ("state = torch.load(path, weights_only=False)", "torch.load"),
        ("opener = gzip.open", "gzip.open"),
        ("x = np.load(file, allow_pickle=True)", "np.load"),
        ("model = transformers.AutoModel.from_pretrained(name)", "from_pretrained"),
        ("eval(text)", "eval"),
        ("model.eval()", None),
    ],
)
def test_a_new_one_is_noticed(tmp_path, line, reader):
    (tmp_path / "x.py").write_text(f"{line}\n")
    assert readers_of(tmp_path / "x.py") == ({reader} if reader else set())
