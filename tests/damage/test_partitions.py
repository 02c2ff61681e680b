"""Random damage to the partitions of a manifest: each is found, named, and loads nothing."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native import partitions
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.damage.checkpoint import KINDS, WORLD, opposite
from tests.ramdisk import memory_directory
from tests.transfer.samples import cut, save, values_of

KEYS = {f"{key}.{number}": kind for key, kind in KINDS.items() if key not in ("matrix", "none") for number in range(4)}


def _piece(random, data: bytes) -> tuple[int, int]:
    begin = int(random.integers(len(data)))
    return begin, min(len(data), begin + int(np.exp(random.uniform(0, np.log(2000)))))


def _flip(random, data, others):
    at = int(random.integers(len(data)))
    return data[:at] + bytes([data[at] ^ 1 << int(random.integers(8))]) + data[at + 1 :]


def _overwrite(random, data, others):
    begin, end = _piece(random, data)
    return data[:begin] + random.bytes(end - begin) + data[end:]


def _zero(random, data, others):
    begin, end = _piece(random, data)
    return data[:begin] + bytes(end - begin) + data[end:]


def _held(state) -> dict[str, bytes]:
    return {key: getattr(shard, "local_tensor", shard).tobytes() for key, shard in state.items()}


def _shift(random, data, others):
    begin, end = _piece(random, data)
    return data[:begin] + data[end:] + data[begin:end]


CHANGES = {
    "bit": _flip,
    "bytes": _overwrite,
    "zeroed": _zero,
    "shifted": _shift,
    "truncated": lambda random, data, others: data[: int(random.integers(len(data)))],
    "extended": lambda random, data, others: data + random.bytes(int(random.integers(1, 2000))),
    "of another save": lambda random, data, others: others[int(random.integers(len(others)))],
    "missing": lambda random, data, others: None,
}


@pytest.fixture(scope="module")
def saves():
    with pytest.MonkeyPatch.context() as patch, memory_directory() as root:
        patch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 10)
        patch.setattr(partitions, "ROWS_PER_PARTITION", 12)
        values = values_of(KEYS)
        for name in ("main", "twin"):
            save(root / name, values, WORLD, unique_id=0)
        yield root, values


@pytest.mark.parametrize("change", CHANGES)
def test_damage_to_partitions_is_found_and_named_and_loads_nothing(saves, change, tmp_path):
    root, values = saves
    files = sorted((root / "main").glob("*.partition"))
    twins = [file.read_bytes() for file in sorted((root / "twin").glob("*.partition"))]
    assert len(files) > 3
    for seed in range(12):
        random = np.random.default_rng([seed, len(change)])
        path = tmp_path / str(seed)
        shutil.copytree(root / "main", path)
        damaged = set()
        for file in random.choice(files, int(random.integers(1, 4)), replace=False):
            was = file.read_bytes()
            after = CHANGES[change](random, was, twins)
            (path / file.name).unlink()
            if after is not None:
                (path / file.name).write_bytes(after)
            damaged |= {str(path / file.name)} if after != was else set()
        report = verify_checkpoint(path, 0)
        assert {problem.file for problem in report.problems} == damaged
        before = [cut({k: opposite(v) for k, v in values.items()}, rank, WORLD) for rank in range(WORLD)]
        targets = [cut({k: opposite(v) for k, v in values.items()}, rank, WORLD) for rank in range(WORLD)]
        outcomes = SimulatedWorld(WORLD).run_all(
            lambda comm, path=path, targets=targets: load_state_dict(targets[comm.position], path, comm)
        )
        if damaged:
            assert all(isinstance(outcome, CorruptCheckpointError) for outcome in outcomes)
            assert len({str(outcome) for outcome in outcomes}) == 1
            assert any(file in str(outcomes[0]) for file in damaged)
            assert [*map(_held, targets)] == [*map(_held, before)]
