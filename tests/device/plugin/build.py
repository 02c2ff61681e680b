"""Compile the plugin for the installed Paddle, once for each runtime. Tested in tests/device/test_plugin.py."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("source")
LIBRARY = "libpaddle-rehearsal.so"
# ``fake`` is the runtime for CUDA over functions that only look like those of CUDA: for tests, without a GPU.
RUNTIMES = ("simulated", "cuda", "fake")
_FOLDERS = {"simulated": ("simulated",), "cuda": ("cuda",), "fake": ("cuda", "fake")}
_FLAGS = (
    "-std=c++17 -O1 -fPIC -Wall -Wno-unused-variable -pthread -fvisibility=hidden -DPADDLE_WITH_CUSTOM_DEVICE"
).split()
# Kernels that compute on the host are nine tenths of what is compiled.
_KERNELS = "kernels.cc"
_NVCC_FLAGS = "-std=c++17 -O2 -Xcompiler=-fPIC,-Wall,-fvisibility=hidden".split()
# Where there is a card, the code is for it. Elsewhere it is compiled to see that it can be: warnings are errors.
_FOR_THIS_CARD, _FOR_NO_CARD = ["-arch=native"], ["-arch=sm_80", "-Werror", "all-warnings"]


class BuildError(RuntimeError):
    """Say that the plugin cannot be compiled here."""


def missing_tools(runtime: str = "simulated") -> str:
    """Return why the plugin cannot be compiled here, or an empty text if it can."""
    if shutil.which(_compiler()) is None:
        return "no C++ compiler: install g++, or name one in the environment variable CXX"
    if runtime == "cuda" and shutil.which("nvcc") is None:
        return "no nvcc: install the CUDA toolkit, and have its bin folder on PATH"
    paddle = _paddle()
    if paddle is None:
        return "paddlepaddle is not installed"
    if not (paddle / "include" / "paddle" / "phi" / "backends" / "device_ext.h").is_file():
        return "the installed paddlepaddle has no headers for plugins"
    return ""


def build(runtime: str = "simulated") -> Path:
    """Compile the plugin if the cache does not have it, and return the directory for ``CUSTOM_DEVICE_ROOT``.

    Any number of processes may call this at the same time: one compiles, and the others wait for it.

    Args:
        runtime: One of :data:`RUNTIMES`.

    Raises:
        BuildError: There is no compiler, or it fails; the text has its output.
    """
    paddle = _paddle()
    reason = missing_tools(runtime)
    if reason or paddle is None:
        raise BuildError(reason)
    folders = [SOURCES, *(SOURCES / name for name in _FOLDERS[runtime])]
    sources = sorted(path for folder in folders for kind in ("*.cc", "*.cu") for path in folder.glob(kind))
    # ``_KERNELS`` includes them: Paddle's headers, which are large, are read once.
    sources = [path for path in sources if not path.name.startswith("kernels_")]
    headers = sorted(path for folder in folders for path in folder.glob("*.h"))
    headers += sorted(SOURCES.glob("kernels_*.cc"))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paddle_flexckpt" / "device_plugin"
    root = cache / f"{runtime}-{_digest(paddle, [*sources, *headers])}"
    if (root / LIBRARY).is_file():
        return root
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process has ended
        if not (root / LIBRARY).is_file():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                finished = Path(scratch) / "root"
                finished.mkdir()
                objects = _compile(runtime, paddle, sources, cache)
                _link(runtime, paddle, objects, finished / LIBRARY)
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


@functools.cache
def _toolkit() -> Path:
    """Return the directory of the CUDA toolkit that nvcc belongs to; what is on PATH may be a script that calls it."""
    asked = subprocess.run(
        ["nvcc", "--dryrun", "-c", str(SOURCES / "cuda" / "native.cu")], capture_output=True, text=True
    )
    for line in asked.stderr.splitlines():
        name, _, value = line.removeprefix("#$ ").partition("=")
        if name == "TOP":
            return Path(value).resolve()
    raise BuildError(f"nvcc does not say where its toolkit is:\n{asked.stderr}")


def _command(runtime: str, paddle: Path, source: Path) -> list[str]:
    """Return the command that compiles a source, but for the names of source and object."""
    if source.suffix == ".cu" and runtime == "cuda":
        return ["nvcc", *_NVCC_FLAGS, *(_FOR_THIS_CARD if _has_card() else _FOR_NO_CARD)]
    folders = [paddle / "include", paddle / "include" / "third_party", SOURCES]
    # The fake's header is in the place of CUDA's.
    folders += [SOURCES / "fake"] if runtime == "fake" else [_toolkit() / "include"] if runtime == "cuda" else []
    language = ["-x", "c++"] if source.suffix == ".cu" else []
    defines = [f'-DREHEARSAL_FRAMEWORK="{paddle}"', f'-DREHEARSAL_RUNTIME="{runtime}"']
    return [_compiler(), *_FLAGS, *defines, *(f"-I{folder}" for folder in folders), *language]


def _has_card() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _compile(runtime: str, paddle: Path, sources: list[Path], cache: Path) -> list[Path]:
    """Compile the sources that the cache has no object of, as many at a time as there are processors."""
    objects = {}
    for source in sources:
        headers = sorted({*SOURCES.glob("*.h"), *source.parent.glob("*.h")})
        if source.name == _KERNELS:
            headers += sorted(SOURCES.glob("kernels_*.cc"))
        # What is the same under all runtimes is compiled once.
        own = "" if source.parent == SOURCES else f"{runtime}-"
        objects[cache / f"{own}{source.stem}-{_digest(paddle, [source, *headers])}.o"] = source
    # The kernels first, so that no processor is left alone with them at the end.
    waiting = sorted((o for o in objects if not o.is_file()), key=lambda o: objects[o].name == _KERNELS)
    running: list[tuple[Path, Path, subprocess.Popen[str]]] = []
    failures: list[str] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            target = waiting.pop()
            own_target = target.with_suffix(f".{os.getpid()}.o")  # a killed process leaves no half of an object
            command = [*_command(runtime, paddle, objects[target]), "-c", "-o", str(own_target), str(objects[target])]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running.append((own_target, target, process))
        own_target, target, process = running.pop(0)
        output = process.communicate()[0]
        if process.returncode:
            failures.append(output)
        else:
            own_target.rename(target)
    if failures:
        raise BuildError("the compiler failed:\n" + "\n".join(failures))
    return list(objects)


def _link(runtime: str, paddle: Path, objects: list[Path], target: Path) -> None:
    libraries = paddle / "libs"
    command = [_compiler(), "-shared", "-pthread", "-o", str(target), *map(str, objects), f"-L{libraries}"]
    command += ["-l:libphi_core.so", "-l:libcommon.so", f"-Wl,-rpath,{libraries}"]
    if runtime == "cuda":
        folders = (_toolkit() / each for each in ("lib64", "lib", "targets/x86_64-linux/lib"))
        found = [path for folder in folders for path in sorted(folder.glob("libcudart.so*"))]
        if not found:
            raise BuildError(f"there is no libcudart below {_toolkit()}")
        command += [str(found[0]), f"-Wl,-rpath,{found[0].parent}"]
    linked = subprocess.run(command, capture_output=True, text=True)
    if linked.returncode:
        raise BuildError(f"the linker failed:\n{linked.stderr}")
