"""The README's first example saves under one layout and loads under others, and prints what it says.

The jobs: code of the README, as printed.
"""

from __future__ import annotations

import contextlib
import io
import os

import pytest

pytest.importorskip("paddle")
import paddle_flexckpt as fc
from tests.documents import code_block, output_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------


def run(code, directory):
    """What a script prints on this rank, in a directory of its own."""
    printed, before = io.StringIO(), os.getcwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return printed.getvalue()


# -- what is asserted -------------------------------------------------------------------------------------------------


def test_the_first_example_loads_other_layouts(world, tmp_path):
    code = code_block("README.md", "# train.py")
    printed = []
    for ranks in (2, 4, 1):
        first, *_ = world(ranks).run(run, code=code, directory=str(tmp_path))
        printed += [line for line in first.splitlines() if line.startswith("10 ")]
        assert [info.unique_id for info in fc.list_checkpoints(tmp_path / "checkpoints")] == [0]
    assert printed == output_block("README.md", "10 0 [64, 128]").splitlines()
