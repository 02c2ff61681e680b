"""That what is simulated is what happens: the layer sees every call, and a stop in it is what a kill is."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.crash.file_system import Call, Fault
from tests.crash.harness import Tree, read_tree, write_tree
from tests.crash.scenarios import find
from tests.crash.tracing import TOKEN, changes, strace, victim

TRACED = ["fresh, 2 ranks", "overwrite, 2 ranks", "repair of 2 files"]


def recorded(calls: list[Call]) -> list[str]:
    """Return the calls that change a disk, or what is durable on it, in the form of :func:`changes`."""
    lines = []
    for call in calls:
        if call.name == "close" or (call.name == "open" and not call.writes):
            continue
        lines.append(TOKEN.sub("*", " ".join([call.name, call.path, *([call.target] if call.target else [])])))
    return lines


@pytest.mark.parametrize("name", TRACED)
def test_the_layer_sees_every_call_that_changes_a_file(bench, tmp_path, name):
    tracer = strace("-e", "trace=file,desc", "-o", str(tmp_path / "trace"))
    bench = bench(find(name))
    expected = recorded(bench.act().calls)
    write_tree(bench.root, bench.before)
    done = victim(bench.root, name, tracer=tracer)
    assert done.returncode == 0, done.stderr
    assert changes((tmp_path / "trace").read_text(), bench.root) == expected
    assert len(expected) > 5


def test_the_trace_shows_what_goes_past_the_layer(tmp_path):
    """The parser finds writes of streams and of memory maps, so the comparison above would as well."""
    tracer = strace("-e", "trace=file,desc", "-o", str(tmp_path / "trace"))
    script = tmp_path / "script.py"
    script.write_text(
        "import mmap, os, sys\n"
        "os.chdir(sys.argv[1])\n"
        "with open(sys.argv[1] + '/a', 'w+b') as stream:\n"
        "    stream.write(b'x' * 8192)\n"
        "    stream.flush()\n"
        "    with mmap.mmap(stream.fileno(), 0) as mapped:\n"
        "        mapped[0] = 1\n"
        "os.posix_fallocate(os.open('a', os.O_RDWR), 0, 9000)\n"
    )
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run([*tracer, sys.executable, str(script), str(root)], check=True)
    found = changes((tmp_path / "trace").read_text(), str(root))
    assert found[:3] == ["open a", "write a", "mmap a"]
    assert found[-1] == "fallocate a"


def outline(tree: Tree) -> dict[str, object]:
    """Return names, and contents; of manifests and parts the size, as safetensors orders their metadata at random."""
    return {
        path: content if content is None or path.endswith((".safetensors", ".saving")) else len(content)
        for path, content in tree.items()
    }


@pytest.mark.parametrize("name", ["overwrite, 1 ranks", "second id, then overwrite the first, 2 ranks"])
def test_a_kill_leaves_the_disk_of_a_stop(bench, name):
    bench = bench(find(name))
    calls = bench.record().calls
    for at in range(3, len(calls), len(calls) // 3):
        stopped = bench.act(Fault(at, "job"))
        simulated = read_tree(bench.root)
        write_tree(bench.root, bench.before)
        done = victim(bench.root, name, "--kill-at", str(at))
        assert done.returncode == -signal.SIGKILL, (at, done.returncode, done.stderr)
        assert outline(read_tree(bench.root)) == outline(simulated), f"call {at}: {calls[at]}"
        bench.check(len(stopped.returns), at, f"killed before call {at} ({calls[at]})")


@pytest.mark.parametrize("call, number", [("writev", 4), ("fsync", 3), ("fsync", 6), ("rename", 1), ("unlink", 2)])
def test_old_or_new_after_a_kill_by_the_kernel(bench, call, number):
    """Nothing is replaced in this process: the kernel delivers SIGKILL at the call."""
    name = "overwrite, 2 ranks"
    bench = bench(find(name))
    write_tree(bench.root, bench.before)
    names = {"rename": "rename,renameat,renameat2", "unlink": "unlink,unlinkat"}.get(call, call)
    tracer = strace("-e", f"trace={names}", "-e", f"inject={names}:signal=SIGKILL:when={number}", "-o", "/dev/null")
    done = victim(bench.root, name, tracer=tracer)
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)
    found = bench.check(0, number, f"killed at {call} {number}")
    assert found == bench.scenario.states[1 if call == "unlink" else 0]
    assert read_tree(bench.root) != bench.before


@pytest.mark.parametrize("call", ["writev", "fsync"])
def test_a_call_that_the_kernel_interrupts_is_made_again(bench, tmp_path, call):
    """EINTR of the kernel: the interpreter tries again, and the save goes well."""
    name = "overwrite, 2 ranks"
    bench = bench(find(name))
    write_tree(bench.root, bench.before)
    trace = tmp_path / "trace"
    tracer = strace("-e", f"trace={call}", "-e", f"inject={call}:error=EINTR:when=2+3", "-o", str(trace))
    done = victim(bench.root, name, tracer=tracer)
    assert done.returncode == 0, done.stderr
    assert trace.read_text().count("EINTR") >= 2
    assert bench.check(1, 0, f"{call} interrupted") == bench.scenario.states[1]
