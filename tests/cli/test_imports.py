"""What a command imports: what it does not need would make it slow. Modules are counted, not seconds."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

from paddle_flexckpt.tools.step_record import RECORD, StepRecord
from tests.transfer.samples import save

READERS = (
    *("dcp_safetensors", "deepspeed", "huggingface", "megatron", "npz", "paddle_checkpoint", "paddle_pickles"),
    *("pickle_reader", "torch_dcp", "unified_checkpoint"),
)
# The readers of other programs' formats, what only saves or other commands do, and what is for programs.
UNUSED = {
    *(f"foreign.{name}" for name in READERS),
    *("foreign.paddle_files", "native.save_directory", "media.remote", "patching", "cli.doctor", "cli.rehearse"),
    *("tools.export", "tools.verification", "tools.rehearsal", "tools.conversion", "aoa.compile", "aoa.invert"),
    "aoa.parser",
}
WORKING = {
    "transfer.transfer",
    "transfer.options",
    "aoa.element_maps",
    "planning.matching",
    "native.reader",
}
PROGRAM = """
import contextlib, io, json, sys
from paddle_flexckpt.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    code = main(sys.argv[1:])
    assert code == 0, code
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, of which a manager has recorded one."""
    root = tmp_path_factory.mktemp("run")
    values = {"layers.0.w": np.ones((4, 8), np.float32), "layers.0.w.moment1_0": np.ones((4, 8), np.float32)}
    save(root / "plain" / "step_1", values, world=1, step=1)
    save(root / "managed" / "step_1", {**values, RECORD: StepRecord(1, 0.0).encode()}, world=1, step=1)
    return root


def imported(*words: str) -> tuple[set[str], set[str]]:
    """The modules of this package, and others but for those that numpy itself needs, that a command imports."""
    names = modules(PROGRAM, *words)
    start = "paddle_flexckpt."
    own = {name[len(start) :] for name in names if name.startswith(start)}
    return own, {name for name in names if not name.startswith(start)} - needed_by_numpy()


def public(names: set[str]) -> set[str]:
    """Those without an underscore: into how many private modules a public one is cut differs between Pythons."""
    return {name for name in names if not any(part.startswith("_") for part in name.split("."))}


def modules(program: str, *words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@functools.lru_cache(maxsize=1)
def needed_by_numpy() -> set[str]:
    """In numpy 1.26 hashlib is among them."""
    return modules("import json, sys, ml_dtypes, numpy, xxhash; print(json.dumps(sorted(sys.modules)))") - {
        "numpy",
        "ml_dtypes",
    }


def test_the_version_needs_nothing():
    own, others = imported("--version")
    assert own == {"_version", "cli", "cli.main"}
    assert not others & {"numpy", "ml_dtypes", "safetensors", "importlib.metadata"}


def test_inspect_imports_no_reader_and_no_engine(run):
    own, others = imported("inspect", str(run / "managed" / "step_1"))
    # It starts within 300 ms, of which numpy takes the most: modules are counted, as each takes some 2 ms.
    assert len(own) <= 47, sorted(own)
    assert len(public(others)) <= 50, sorted(public(others))
    assert not own & (UNUSED | WORKING | {"cli.outputs", "report", "transfer", "aoa", "planning"})
    assert "native.manifest" in own
    assert not others & {
        "paddle",
        "fsspec",
        "asyncio",
        "ssl",
        "hashlib",
        "importlib.metadata",
        "pickletools",
        "difflib",
    }


@pytest.mark.parametrize("words", [["ls", "plain"], ["du", "plain/step_1"], ["du", "managed/step_1", "--by", "rank"]])
def test_ls_and_du_import_no_engine(run, words):
    own, others = imported(words[0], str(run / words[1]), *words[2:])
    assert not own & (UNUSED | WORKING - {"aoa.element_maps"} | {"cli.outputs", "report"})
    assert not others & {"paddle", "fsspec", "importlib.metadata", "pickletools"}


@pytest.mark.parametrize("words", [["show", "plain/step_1", "layers.0.w"], ["ls", "managed"]])
def test_a_command_that_reads_tensors_imports_no_compiler_of_statements(run, words):
    own, others = imported(words[0], str(run / words[1]), *words[2:])
    assert not own & (UNUSED | {"aoa.operations", "aoa.rule", "aoa.steps", "aoa.structure"})
    assert own >= WORKING
    assert not others & {"paddle", "fsspec", "importlib.metadata", "pickletools"}


def test_a_reader_is_imported_where_its_files_are(tmp_path):
    np.savez(tmp_path / "arrays.npz", weight=np.ones(3, np.float32))
    own, _ = imported("inspect", str(tmp_path))
    assert "foreign.npz" in own
    assert not own & (UNUSED - {"foreign.npz"})
