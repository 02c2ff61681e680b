"""The rehearsal device itself: memory that the host cannot touch, streams, collectives, counters, its build."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("paddle")
from tests.device import plugin

HERE = Path(__file__).parent
CHECKS, RANKS = HERE / "plugin_checks.py", HERE / "plugin_ranks.py"
MISSING = plugin.missing_tools()
needs_device = pytest.mark.skipif(bool(MISSING), reason=MISSING)
pytestmark = pytest.mark.paddle


def checks_in(script: Path, *but: str) -> list[str]:
    return [name for name in re.findall(r"^def check_(\w+)", script.read_text(), re.M) if name not in but]


def variables(devices: int, **settings: object) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "REHEARSAL_"))}
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"GLOG_minloglevel": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    return {**inherited, **quiet, **plugin.environment(devices, **settings)}


def ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def start_ranks(size: int, *checks: str) -> list[subprocess.Popen[str]]:
    """Start a process for each rank without Paddle's launcher, which ends them all when one dies."""
    ends = [f"127.0.0.1:{port}" for port in ports(size)]
    world = {"PADDLE_TRAINERS_NUM": str(size), "PADDLE_TRAINER_ENDPOINTS": ",".join(ends)}
    world |= {"PADDLE_XCCL_BACKEND": "rehearsal", "PADDLE_DISTRI_BACKEND": "xccl"}
    ranks = []
    for rank, end in enumerate(ends):
        own = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": end, "FLAGS_selected_rehearsals": str(rank)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(RANKS), *checks],
                env={**variables(size), **world, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return ranks


def answers_of(rank: subprocess.Popen[str]) -> dict[str, str]:
    said = rank.communicate(timeout=300)[0]
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert lines, said
    answers: dict[str, str] = json.loads(lines[-1])
    return answers


# ---- one process ----


@pytest.fixture(scope="module")
def alone() -> Mapping[str, str]:
    """What the checks in one process have answered: one start serves them all."""
    ended = subprocess.run(
        [sys.executable, str(CHECKS), *checks_in(CHECKS)],
        env=variables(2, memory_gib=0.25),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answers: dict[str, str] = json.loads(ended.stdout.strip().splitlines()[-1])
    # The stacks at the time of a touch in another thread.
    assert "in a thread that is not the main one" in ended.stderr
    assert re.search(r'Current thread .*\n  File ".*plugin_checks.py", line \d+ in <lambda>', ended.stderr)
    return answers


@needs_device
@pytest.mark.parametrize("check", checks_in(CHECKS))
def test_in_one_process(alone, check):
    assert not alone[check], alone[check]


@needs_device
def test_a_host_touch_fails_the_test_that_makes_it(tmp_path):
    (tmp_path / "test_touch.py").write_text(
        textwrap.dedent(
            """
            import ctypes
            import paddle

            def test_before():
                assert paddle.ones([3]).sum().item() == 3

            def test_reads_the_device():
                weights = paddle.ones([5, 2])
                assert ctypes.string_at(weights.data_ptr(), 8)

            def test_after():
                assert paddle.ones([3]).sum().item() == 3
            """
        )
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ended = subprocess.run(command, env=variables(1), capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed, 2 passed" in ended.stdout
    assert "FAILED test_touch.py::test_reads_the_device" in ended.stdout
    assert re.search(r"^E .*HostTouchError: the host has touched memory of device rehearsal:0", ended.stdout, re.M)
    assert re.search(r"tensor '\w+' \('weights' of test_reads_the_device\(\)\) of shape \[5, 2\]", ended.stdout)


@needs_device
@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("import faulthandler; faulthandler.enable(); import paddle", "Segmentation fault"),
        ("import faulthandler, paddle; faulthandler.enable()", "Fatal Python error: Segmentation fault"),
        ("import paddle; paddle.disable_signal_handler()", ""),
    ],
)
def test_other_faults_go_on_to_the_handlers_before(order, text):
    code = f"{order}; paddle.ones([2]); import ctypes; ctypes.string_at(8)"
    ended = subprocess.run([sys.executable, "-c", code], env=variables(1), capture_output=True, text=True, timeout=300)
    assert ended.returncode in (-signal.SIGSEGV, -signal.SIGABRT)
    assert text in ended.stdout + ended.stderr
    assert "device memory" not in ended.stdout + ended.stderr


# ---- several ranks ----


LAST = {2: "a_peer_that_says_nothing", 4: "a_peer_that_dies"}  # after which no collective works


@pytest.fixture(scope="module")
def worlds() -> Callable[[int], list[tuple[int, dict[str, str]]]]:
    """``worlds(n)`` is how each of n ranks has ended, and what it has answered. They are started at the first call."""

    @functools.cache
    def of_size(size: int) -> list[tuple[int, dict[str, str]]]:
        ranks = start_ranks(size, *checks_in(RANKS, *LAST.values()), LAST[size])
        answers = [answers_of(rank) for rank in ranks]
        return [(rank.returncode, answer) for rank, answer in zip(ranks, answers)]

    return of_size


@needs_device
@pytest.mark.multiprocess
@pytest.mark.parametrize("check", checks_in(RANKS, *LAST.values()))
@pytest.mark.parametrize("size", [2, 4])
def test_collectives(worlds, size, check):
    wrong = {rank: answers[check] for rank, (_, answers) in enumerate(worlds(size)) if answers[check]}
    assert not wrong, "\n".join(f"rank {rank}:\n{said}" for rank, said in wrong.items())


@needs_device
@pytest.mark.multiprocess
def test_a_peer_that_dies_is_named(worlds):
    ended = worlds(4)
    assert [code for code, _ in ended] == [0, -signal.SIGKILL, 0, 0]
    assert [answers.get(LAST[4]) for _, answers in ended] == ["", None, "", ""]


@needs_device
@pytest.mark.multiprocess
def test_a_peer_that_says_nothing_is_named(worlds):
    assert [(code, answers[LAST[2]]) for code, answers in worlds(2)] == [(0, ""), (0, "")]


# ---- the build ----


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """A compiler that notes that it was called, and makes files of a line each."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\necho "$*" >>"$0.calls"\nwhile [ "$1" != -o ]; do shift; done\necho compiled >"$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def has_headers() -> bool:
    return not MISSING or MISSING.startswith("no C++ compiler")


@pytest.mark.skipif(not has_headers(), reason=MISSING)
def test_many_processes_may_build_at_once(compiler, tmp_path):
    code = "from tests.device.plugin import build; print(build())"
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    started = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) for _ in range(6)]
    roots = {process.communicate(timeout=300)[0].decode().strip() for process in started}
    assert [process.returncode for process in started] == [0] * 6
    (root,) = roots
    assert (Path(root) / "libpaddle-rehearsal.so").read_text() == "compiled\n"
    # Nothing else is left but the lock and the objects, each once.
    left = sorted(path.name for path in Path(root).parent.iterdir() if path.suffix != ".o")
    objects = [path.name for path in Path(root).parent.glob("*.o")]
    assert left == sorted([Path(root).name, "lock"])
    assert len(objects) == len({name.rpartition("-")[0] for name in objects}) > 0
    calls = (tmp_path / "compiler.calls").read_text().count("\n")
    assert plugin.build() == Path(root)
    assert (tmp_path / "compiler.calls").read_text().count("\n") == calls


@pytest.mark.skipif(not has_headers(), reason=MISSING)
def test_a_compiler_that_fails_is_quoted(compiler):
    compiler.write_text("#!/bin/sh\necho 'no such standard: c++17'\nexit 1\n")
    with pytest.raises(plugin.BuildError, match="no such standard"):
        plugin.build()


def test_without_a_compiler_the_reason_is_given(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "install g++" in plugin.missing_tools()
    with pytest.raises(plugin.BuildError, match="install g\\+\\+"):
        plugin.environment()


def test_without_paddle_the_reason_is_given(monkeypatch):
    build = importlib.import_module("tests.device.plugin.build")
    monkeypatch.setattr(build, "_paddle", lambda: None)
    monkeypatch.setenv("CXX", "true")
    assert plugin.missing_tools() == "paddlepaddle is not installed"


# Temporary tensors of 4 MiB are freed long before their stream has come to them.
FREED_EARLY = """
import paddle
from tests.device.plugin import configure
paddle.set_device("rehearsal:0")
for delay in range(600, 1500, 100):
    configure(delay_us=delay)
    total = paddle.zeros([1 << 20])
    paddle.device.synchronize()
    side = paddle.device.Stream()
    with paddle.device.stream_guard(side):
        for _ in range(200):
            total.add_(paddle.ones_like(total))
    side.synchronize()
    if total.min().item() != 200:
        print(delay, total.min().item(), total.max().item())
"""


@needs_device
def test_what_was_freed_is_as_it_was_until_its_stream_has_used_it():
    env = variables(2, memory_gib=0.5, seed=1)
    done = subprocess.run([sys.executable, "-c", FREED_EARLY], env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
