"""Package metadata; the code lives in moa_fairseq/."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
# The one place of the version; importing the package would need torch.
SOURCE = (HERE / "moa_fairseq" / "__init__.py").read_text(encoding="utf-8")


SHARE = (
    "configs",
    *(f"results/{name}" for name in ("papers", "measured", "throughput", "kernels", "benchmarks")),
)


class BuildWithShare(build_py):
    """Puts the recipes, the papers' numbers, and those measured here into what is installed."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for name in SHARE:
                target = Path(self.build_lib) / "moa_fairseq" / "share" / name
                pictures = shutil.ignore_patterns("*.png")
                shutil.copytree(HERE / name, target, dirs_exist_ok=True, ignore=pictures)


setup(
    name="moa_fairseq",
    version=re.search(r'^__version__ = "(.+)"$', SOURCE, re.M).group(1),
    description="Mixtures of attention heads (MoA, MAE, SwitchHead, MoH) as a fairseq plugin",
    long_description=(HERE / "README.md").read_text(encoding="utf-8")
    if (HERE / "README.md").exists()
    else "",
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.15",
    packages=find_packages(include=["moa_fairseq", "moa_fairseq.*"]),
    cmdclass={"build_py": BuildWithShare},
    package_data={"moa_fairseq": ["**/*.json", "**/*.yaml", "experiments/look/page.*", "py.typed"]},
    install_requires=["torch>=2.5"],  # all that the attention needs
    extras_require={
        # the commands, from the raw data to the score
        "recipes": [
            "sacrebleu>=2.4,<3",
            "charset-normalizer>=3,<4",
            "subword-nmt>=0.3.8,<0.4",
            "sentencepiece>=0.2,<0.3",
            "sacremoses>=0.1,<0.3",
            "safetensors>=0.4,<1",
            "regex",
            "PyYAML>=6,<7",
            "matplotlib>=3.7,<4",
            "jinja2>=3.1,<4",
            "polib>=1.2,<2",
            "portalocker>=2.8,<5",
            "requests>=2.31,<3",
            "scipy>=1.11,<2",
            "tqdm>=4.60,<5",
            "tensorboardX>=2.6,<3",
        ],
        # sacreBLEU's tokenisers of Japanese and Korean, 50 MB
        "ja": ["sacrebleu[ja]>=2.4,<3"],
        "ko": ["sacrebleu[ko]>=2.4,<3"],
        # text in .zst
        "zst": ["zstandard>=0.22,<1"],
        # A working fairseq of your own serves as well: see docs/fairseq.md. There are wheels for Python 3.11
        # and 3.12, as in scripts/setup.sh; on a newer one the plugin's import says so.
        "fairseq": ["ve-fairseq==0.12.3; python_version < '3.13'"],
        # moa_fairseq.integrations.hf and .mixture_transformer, whose text needs what follows; transformers 5
        # cannot be imported beside fairseq's torchaudio
        "hf": [
            "transformers>=4.48,<6",
            "accelerate>=1.1",
            "subword-nmt>=0.3.8,<0.4",
            "sentencepiece>=0.2,<0.3",
            "sacremoses>=0.1,<0.3",
            "regex",
        ],
        # moa_fairseq.integrations.vision; timm's torchvision has to be built for the same torch
        "vision": ["timm>=1.0.9,<2"],
        # moa-fairseq zero-shot
        "zero-shot": ["lm_eval==0.4.13"],
        "triton": ["triton>=3.1; platform_system == 'Linux'"],
        # the tests of moa-fairseq look in an installed chromium
        "browser": ["playwright>=1.45,<2"],
        "test": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100,<7",
            "ruff>=0.6",
            "mypy>=1.11,<3",
        ],
    },
    entry_points={"console_scripts": ["moa-fairseq=moa_fairseq.cli:main"]},
    zip_safe=False,
)
