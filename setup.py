"""Packaging metadata of paddle-flexckpt."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BuildWithPatches(build_py):
    """Put the patches, which stand at the top of the repository where they are looked for, into the package.

    They are no package of their own: one that lies elsewhere than its name says makes ``pip install -e`` put a hook of
    the import system in place of a path, and type checkers run no hooks.
    """

    def run(self) -> None:
        """Build all else, then copy them; an editable installation finds them beside the package."""
        super().run()
        if getattr(self, "editable_mode", False):  # setuptools has it since 64, which editable installations need
            return
        target = Path(self.build_lib, "paddle_flexckpt", "patches")
        target.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.patch", "index.json", "README.md"):
            for path in sorted((HERE / "patches").glob(pattern)):
                shutil.copy(path, target)


def read_version() -> str:
    """Return the version written in ``paddle_flexckpt/_version.py`` without importing the package."""
    text = (HERE / "paddle_flexckpt" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("paddle_flexckpt/_version.py does not define __version__")
    return match.group(1)


def read_long_description() -> str:
    """Return the text of ``README.md`` for a package index; nothing where it is not shipped.

    An index has no other files, and links to them would lead nowhere: what they name is named in their place.
    """
    readme = HERE / "README.md"
    if not readme.is_file():
        return ""
    text = re.sub(r"\[([^]\n]*)\]\((?![a-z]+:)([^)\s]+)\)", _name_of, readme.read_text(encoding="utf-8"))
    return f"{text}\nThe documents that are named here are in the source distribution.\n"


def _name_of(link: "re.Match[str]") -> str:
    """Return what stands for a relative link: the document's name, after the link's words if they say more."""
    words, document = link[1], link[2].partition("#")[0]
    return f"`{document}`" if words in (document, link[2]) else f"{words} (`{document}`)"


# The "numpy floor": all that reading, planning and checking a checkpoint needs, without Paddle.
# Every lower bound is a version that has wheels for each supported Python, except NumPy, whose
# 1.26 has none for Python 3.13: there pip takes a 2.x release. safetensors knows complex64 from
# 0.7 on. .ci/compat runs the tests at these lower bounds.
INSTALL_REQUIRES = [
    "numpy>=1.26,<3",
    "safetensors>=0.7.0",
    "xxhash>=3.5.0",
    "ml_dtypes>=0.5.0",
]

REMOTE = ["fsspec>=2024.10.0", "s3fs>=2024.10.0"]

EXTRAS_REQUIRE = {
    # `import paddle` imports setuptools, which Paddle's wheels do not all declare and which
    # virtual environments do not contain from Python 3.12 on.
    "cpu": ["paddlepaddle>=3.0,<3.4", "setuptools"],
    # GPU builds are published per CUDA version in Paddle's own package index, not in the default one.
    "gpu": ["paddlepaddle-gpu>=3.0,<3.4", "setuptools"],
    # The pins that make this PaddleNLP release importable. It needs NumPy 1.26, so Python 3.12 at most.
    "paddlenlp": ["paddlenlp==3.0.0b4", "aistudio-sdk==0.2.6", "pyarrow<23", "setuptools"],
    # It needs pyarrow<23 besides, installed after it: together pip may find no versions that fit.
    "paddleformers": ["paddleformers==1.2.0", "setuptools"],
    # The oldest ones that the tests have run with.
    "remote": REMOTE,
    # aoa_config, or a mesh, as a YAML file; JSON needs nothing.
    "yaml": ["pyyaml>=6"],
    "viz": ["matplotlib>=3.7"],
    # Weights as deltas (WeightPublisher, flexckpt apply), and reading them.
    "rollout": ["zstandard>=0.22"],
    # Progress bars of commands; without it a line counts per cent.
    "cli": ["tqdm>=4.60"],
    # Zensical, by the same people, reads the same configuration and follows it.
    "docs": ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.28", "ruff>=0.6"],
    # tests/mutation uses functions of it that are not public. It needs Python 3.10.
    "mutation": ["mutmut>=3.8,<3.9"],
    "test": [
        *REMOTE,
        # A local S3 server. moto[server] would bring what moto needs for all of AWS, half of it for templates.
        "flask>=2.2",
        "flask-cors>=5",
        # Threads of the simulated cluster.
        "greenlet>=3.1",
        "hypothesis>=6.100",
        "import-linter>=2.5",
        "jsonschema>=4.20",
        "matplotlib>=3.7",
        "moto[s3]>=5.1",
        "mypy>=1.11",
        "pytest>=8",
        "pytest-xdist>=3.7",
        "pyyaml>=6",
        "ruff>=0.6",
        "tqdm>=4.60",
        "zstandard>=0.22",
    ],
}

setup(
    name="paddle-flexckpt",
    version=read_version(),
    description="Flexible distributed checkpoints for PaddlePaddle: save in one parallel layout, load in another.",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    entry_points={
        "console_scripts": ["flexckpt=paddle_flexckpt.cli.main:main"],
        "vllm.general_plugins": ["flexckpt=paddle_flexckpt.rollout.vllm_extension:register"],
    },
    packages=find_packages(include=["paddle_flexckpt", "paddle_flexckpt.*"]),
    # Said, although it is the default: so an editable installation is a line with this directory in a .pth file.
    package_dir={"": "."},
    cmdclass={"build_py": BuildWithPatches},
    package_data={
        "paddle_flexckpt": ["py.typed"],
        "paddle_flexckpt.aoa": ["families.json", "rules/*.json"],
    },
    zip_safe=False,
    python_requires=">=3.9,<3.14",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    keywords=["checkpoint", "deep learning", "distributed training", "paddlepaddle", "resharding"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
)
