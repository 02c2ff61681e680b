"""The README's first example saves under one layout and loads under others, and prints what it says."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle_flexckpt as fc
from tests.distributed import jobs_readme as jobs
from tests.documents import code_block, output_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


def test_the_first_example_loads_other_layouts(world, tmp_path):
    code = code_block("README.md", "# train.py")
    printed = []
    for ranks in (2, 4, 1):
        first, *_ = world(ranks).run(jobs.run, code=code, directory=str(tmp_path))
        printed += [line for line in first.splitlines() if line.startswith("10 ")]
        assert [info.unique_id for info in fc.list_checkpoints(tmp_path / "checkpoints")] == [0]
    assert printed == output_block("README.md", "10 0 [64, 128]").splitlines()
