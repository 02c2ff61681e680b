"""Static graphs of semi-automatic parallelism (``dist.to_static``) train in the CPU world as one process does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.strategies import BY_NAME, SIZES
from tests.semi_auto.test_training import ARRAY, LOSS, copies, shapes_of

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

JOBS = "tests.semi_auto.jobs_static"


@pytest.mark.parametrize("name", ["dp2-stage1", "dp2-stage3", "mp2"])
def test_a_static_graph_trains_as_one_process_does(world2, name):
    reports = world2.run(f"{JOBS}:compare", strategy=name, sizes="even")
    # Each rank tells the loss of its own rows.
    losses = np.mean([report["losses"] for report in reports], axis=0)
    assert np.abs(losses - reports[0]["alone"]).max() <= LOSS
    for report in reports:
        assert report["missing"] == []
        assert report["array"] <= ARRAY
    wanted = {
        f"{key}.{moment}": np.prod(shape) * copies(BY_NAME[name], key, moment)
        for key, shape in shapes_of(SIZES["even"]).items()
        for moment in ("moment1_0", "moment2_0")
    }
    assert {key: sum(report["held"][key] for report in reports) for key in wanted} == wanted
