"""Models with running statistics, which data-parallel ranks do not share: one rank's are saved, and loaded by all."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_batch_norm as jobs

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]


@pytest.mark.parametrize("drift", [False, True], ids=["in step", "one unit apart"])
def test_a_data_parallel_model_saves_by_default_and_loads_everywhere(world, tmp_path, drift):
    first, second = world(2).run(jobs.save, directory=str(tmp_path), drift=drift)
    held, others = first["held"], second["held"]
    differing = {key for key in held if held[key] != others[key]}
    assert differing == set(jobs.STATISTICS) | ({"linear.weight"} if drift else set())
    assert first["replicas"] == second["replicas"]
    assert {key: text for key, text in first["replicas"].items() if key in jobs.STATISTICS} == dict.fromkeys(
        jobs.STATISTICS, "differ; rank 0's values count"
    )
    assert first["replicas"]["sync._mean"] == first["replicas"]["sync._variance"] == "equal"
    assert ("differ by at most " in first["replicas"].get("linear.weight", "")) == drift
    assert f"replicas of {5 if drift else 4} tensors differ" in first["summary"]
    for ranks in (1, 2):
        for loaded in world(ranks).run(jobs.load, directory=str(tmp_path)):
            assert loaded == held
