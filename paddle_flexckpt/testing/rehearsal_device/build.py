"""Compile the rehearsal device for the installed Paddle, once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("plugin")
LIBRARY = "libpaddle-rehearsal.so"
_FLAGS = (
    "-std=c++17 -O2 -g1 -fPIC -Wall -Wno-unused-variable -pthread -fvisibility=hidden -DPADDLE_WITH_CUSTOM_DEVICE"
).split()


class BuildError(RuntimeError):
    """The rehearsal device cannot be compiled here."""


def missing_tools() -> str:
    """Return why the rehearsal device cannot be compiled here, or an empty text if it can."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler: install g++, or name one in the environment variable CXX"
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.submodule_search_locations is None:
        return "paddlepaddle is not installed"
    if not (
        Path(spec.submodule_search_locations[0]) / "include" / "paddle" / "phi" / "backends" / "device_ext.h"
    ).is_file():
        return "the installed paddlepaddle has no headers for plugins"
    return ""


def build() -> Path:
    """Compile the plugin if the cache does not have it, and return the directory for ``CUSTOM_DEVICE_ROOT``.

    Raises:
        BuildError: There is no compiler, or it fails; the text has its output.
    """
    reason = missing_tools()
    if reason:
        raise BuildError(reason)
    spec = importlib.util.find_spec("paddle")
    assert spec is not None and spec.submodule_search_locations is not None
    paddle = Path(spec.submodule_search_locations[0])
    sources = sorted(SOURCES.glob("*.cc"))
    digest = hashlib.sha256(str(paddle).encode())
    for file in [*sources, *sorted(SOURCES.glob("*.h")), paddle / "version" / "__init__.py"]:
        digest.update(file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paddle_flexckpt" / "rehearsal_device"
    root = cache / digest.hexdigest()[:16]
    if (root / LIBRARY).is_file():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        include = [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}", f"-I{SOURCES}"]
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        running = [
            subprocess.Popen(
                [compiler, *_FLAGS, *include, "-c", "-o", target, str(source)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, target in zip(sources, objects)
        ]
        said = [process.communicate()[0] for process in running]
        if any(process.returncode for process in running):
            raise BuildError("the compiler failed:\n" + "\n".join(said))
        output = Path(scratch) / "root"
        output.mkdir()
        libraries = paddle / "libs"
        link = [compiler, "-shared", "-pthread", "-o", str(output / LIBRARY), *objects, f"-L{libraries}"]
        link += ["-l:libphi_core.so", "-l:libcommon.so", f"-Wl,-rpath,{libraries}"]
        linked = subprocess.run(link, capture_output=True, text=True)
        if linked.returncode:
            raise BuildError(f"the linker failed:\n{linked.stderr}")
        try:
            output.rename(root)
        except OSError:
            if not (root / LIBRARY).is_file():  # another process may have finished first
                raise
    return root
