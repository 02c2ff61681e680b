"""Every reshard that the CPU world has to offer, in all dtypes, against slices cut by hand."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

JOBS = "tests.semi_auto.jobs_reshard"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(8, 12), (7, 11)])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_every_change_of_placements(world, mesh, shape, dtype):
    ranks = math.prod(mesh)
    assert world(ranks).run(f"{JOBS}:every_reshard", dtype=dtype, shape=shape, mesh=mesh) == [[]] * ranks
