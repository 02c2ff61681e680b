"""Fixtures that move a state through files or through memory; ``tests/conftest.py`` offers them to all tests."""

from __future__ import annotations

import pytest

from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.ramdisk import memory_directory


@pytest.fixture(params=["files", "memory"])
def move(request):
    """``move(source, target, **options)`` on one rank, through files or through memory; returns the report."""

    from paddle_flexckpt.loading.loader import load_state_dict
    from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
    from paddle_flexckpt.saving.saver import save_state_dict

    def through(source, target, **options):
        def job(comm):
            if request.param == "memory":
                return reshard_sharded_state_dict(source, target, comm, **options)
            with memory_directory() as path:
                save_state_dict(source, path, comm)
                return load_state_dict(target, path, comm, **options)

        (report,) = SimulatedWorld(1).run(job)
        return report

    return through


@pytest.fixture(params=["files", "memory"])
def move_between(request):
    """``move_between(size, source, target)``: the targets of each rank, filled; both take ``(rank, filled)``."""

    from paddle_flexckpt.loading.loader import load_state_dict
    from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
    from paddle_flexckpt.saving.saver import save_state_dict

    def through(size, source, target):
        def job(comm):
            wanted = target(comm.rank, False)
            if request.param == "memory":
                reshard_sharded_state_dict(source(comm.rank, True), wanted, comm)
            else:
                save_state_dict(source(comm.rank, True), path, comm)
                load_state_dict(wanted, path, comm)
            return wanted

        with memory_directory() as path:
            return SimulatedWorld(size).run(job)

    return through
