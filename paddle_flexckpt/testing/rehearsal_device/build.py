"""Compile the rehearsal device for the installed Paddle, once. Tested in tests/device/test_plugin.py."""

from __future__ import annotations

import fcntl
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
    "-std=c++17 -O1 -g1 -fPIC -Wall -Wno-unused-variable -pthread -fvisibility=hidden -DPADDLE_WITH_CUSTOM_DEVICE"
).split()


class BuildError(RuntimeError):
    """Say that the rehearsal device cannot be compiled here."""


def missing_tools() -> str:
    """Return why the rehearsal device cannot be compiled here, or an empty text if it can."""
    if shutil.which(_compiler()) is None:
        return "no C++ compiler: install g++, or name one in the environment variable CXX"
    paddle = _paddle()
    if paddle is None:
        return "paddlepaddle is not installed"
    if not (paddle / "include" / "paddle" / "phi" / "backends" / "device_ext.h").is_file():
        return "the installed paddlepaddle has no headers for plugins"
    return ""


def build() -> Path:
    """Compile the plugin if the cache does not have it, and return the directory for ``CUSTOM_DEVICE_ROOT``.

    Any number of processes may call this at the same time: one compiles, and the others wait for it.

    Raises:
        BuildError: There is no compiler, or it fails; the text has its output.
    """
    paddle = _paddle()
    reason = missing_tools()
    if reason or paddle is None:
        raise BuildError(reason)
    sources = sorted(SOURCES.glob("*.cc"))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paddle_flexckpt" / "rehearsal_device"
    root = cache / _digest(paddle, [*sources, *sorted(SOURCES.glob("*.h"))])
    if (root / LIBRARY).is_file():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process has ended
        if not (root / LIBRARY).is_file():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                finished = Path(scratch) / "root"
                finished.mkdir()
                _link(paddle, _compile(paddle, sources, cache), finished / LIBRARY)
                finished.rename(root)
    return root


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _paddle() -> Path | None:
    """Find the directory of the installed paddle package without importing it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _digest(paddle: Path, files: list[Path]) -> str:
    """Name a build by all that goes into it."""
    digest = hashlib.sha256(" ".join([str(paddle), _compiler(), *_FLAGS]).encode())
    for file in [Path(__file__), *files, paddle / "version" / "__init__.py"]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(paddle: Path, sources: list[Path], cache: Path) -> list[Path]:
    """Compile the sources that the cache has no object of, as many at a time as there are processors."""
    include = [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}", f"-I{SOURCES}"]
    define = f'-DREHEARSAL_FRAMEWORK="{paddle}"'
    headers = sorted(SOURCES.glob("*.h"))
    objects = {cache / f"{source.stem}-{_digest(paddle, [source, *headers])}.o": source for source in sources}
    # The largest first, so that no processor is left alone with one at the end.
    waiting = sorted((o for o in objects if not o.is_file()), key=lambda o: objects[o].stat().st_size)
    running: list[tuple[Path, Path, subprocess.Popen[str]]] = []
    said: list[str] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            target = waiting.pop()
            own = target.with_suffix(f".{os.getpid()}.o")  # a killed process leaves no half of an object
            command = [_compiler(), *_FLAGS, define, *include, "-c", "-o", str(own), str(objects[target])]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running.append((own, target, process))
        own, target, process = running.pop(0)
        output = process.communicate()[0]
        if process.returncode:
            said.append(output)
        else:
            own.rename(target)
    if said:
        raise BuildError("the compiler failed:\n" + "\n".join(said))
    return list(objects)


def _link(paddle: Path, objects: list[Path], target: Path) -> None:
    libraries = paddle / "libs"
    command = [_compiler(), "-shared", "-pthread", "-o", str(target), *map(str, objects), f"-L{libraries}"]
    command += ["-l:libphi_core.so", "-l:libcommon.so", f"-Wl,-rpath,{libraries}"]
    linked = subprocess.run(command, capture_output=True, text=True)
    if linked.returncode:
        raise BuildError(f"the linker failed:\n{linked.stderr}")
