"""Bytes between nodes: what several ranks of a node want from other nodes crosses once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.peers import Peers
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.native.samples import flip

ROWS, COLUMNS, LAYERS = 16, 24, 3
KEYS = [f"{name}{layer}" for layer in range(LAYERS) for name in ("w", "m", "g")]


def state(rank, size, tp, filled=True):
    """Matrices cut in columns, their moments besides by data parallelism, and replicated vectors."""
    degree, column, share = size // tp, rank % tp, rank // tp
    found = {}
    for layer in range(LAYERS):
        whole = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * layer
        width = COLUMNS // tp
        part, offset = whole[:, column * width : (column + 1) * width].copy(), (0, column * width)
        step = -(-part.size // degree)
        begin, end = min(share * step, part.size), min((share + 1) * step, part.size)
        moment, vector = part.reshape(-1)[begin:end] + 0.5, np.arange(ROWS, dtype=np.float32) + layer
        flat = {"is_flattened": True, "flattened_range": slice(begin, end)}
        for key, values, shape, of, at, more in (
            ("w", part, part.shape, whole.shape, offset, {}),
            ("m", moment, part.shape, whole.shape, offset, flat),
            ("g", vector, vector.shape, vector.shape, (0,), {}),
        ):
            name = f"{key}{layer}"
            found[name] = ShardedWeight(name, values if filled else np.zeros_like(values), shape, of, at, **more)
    return found


def elements(states):
    """The elements that some ranks want: pairs of key and number."""
    found = set()
    for each in states:
        for key, shard in each.items():
            numbers = np.arange(np.prod(shard.global_shape)).reshape(shard.global_shape)
            ends = zip(shard.global_offset, shard.local_shape)
            box = numbers[tuple(slice(start, start + extent) for start, extent in ends)].reshape(-1)
            found |= {(key, number) for number in box[shard.flattened_range or slice(None)].tolist()}
    return found


def stored(path):
    """The elements in the data files of one node."""
    catalog, found = CheckpointDirectory(path).read_manifest(0).catalog, set()
    for row in np.flatnonzero([catalog.files[file] in os.listdir(path) for file in catalog.file]).tolist():
        shape, offset = (catalog.unpadded(row, each) for each in (catalog.shape, catalog.offset))
        of = catalog.unpadded(row, catalog.global_shape)
        box = np.arange(np.prod(of)).reshape(of)[tuple(map(slice, offset, np.add(offset, shape)))].reshape(-1)
        flat = slice(catalog.flat_start[row], catalog.flat_stop[row]) if catalog.flat_start[row] >= 0 else slice(None)
        found |= {(catalog.key_name(row), number) for number in box[flat].tolist()}
    return found


@pytest.mark.parametrize(
    ("size", "tp", "loading"),
    [
        (8, 2, (8, 2)),
        (8, 2, (6, 2)),
        (8, 2, (8, 4)),
        (8, 2, (8, 1)),  # each rank of a node wants all matrices
        (8, 1, (6, 1)),
        (8, 4, (16, 2)),
    ],
)
def test_each_byte_crosses_to_a_node_once(tmp_path, monkeypatch, size, tp, loading):
    paths = [str(tmp_path / str(number)) for number in range(9)]
    SimulatedWorld(size).run(
        lambda comm: save_state_dict(
            state(comm.rank, size, tp), paths[comm.rank // 2], comm, storage="per_node", node_copies=2
        )
    )
    shutil.rmtree(paths.pop(1))
    ranks, degree = loading
    crossed = []
    move = Peers.move

    def counting(self, task):
        moved, plan = move(self, task), self._plan
        here, nbytes = self._comm.rank // 2, self.rows.itemsize
        for sender, pieces in plan.incoming.items():
            if sender // 2 != here:
                crossed.append(int((pieces.size * nbytes[pieces.source]).sum()))
        assert all(sender // 2 == here for sender in plan.relayed)
        return moved

    monkeypatch.setattr(Peers, "move", counting)

    def job(comm):
        wanted = state(comm.rank, ranks, degree, filled=False)
        load_state_dict(wanted, paths[comm.rank // 2], comm, storage="per_node")
        right = state(comm.rank, ranks, degree)
        return all(np.array_equal(wanted[key].local_tensor, right[key].local_tensor) for key in KEYS)

    assert all(SimulatedWorld(ranks).run(job))
    least = 0
    for node in range(ranks // 2):
        wanted = elements(state(rank, ranks, degree) for rank in (2 * node, 2 * node + 1))
        least += 4 * len(wanted - (stored(paths[node]) if os.path.isdir(paths[node]) else set()))
    assert sum(crossed) == least


def test_a_rank_that_fails_keeps_none_waiting_for_what_it_would_forward(tmp_path):
    """All files of a node are damaged: its ranks fail before they forward. The next try reads other nodes' copies."""
    paths = [str(tmp_path / str(number)) for number in range(4)]
    SimulatedWorld(8).run(
        lambda comm: save_state_dict(
            state(comm.rank, 8, 2), paths[comm.rank // 2], comm, storage="per_node", node_copies=2
        )
    )
    for path in Path(paths[1]).glob("*.safetensors"):
        flip(path, path.stat().st_size - 1)

    def job(comm):
        wanted, right = (state(comm.rank, 8, 1, filled) for filled in (False, True))
        load_state_dict(wanted, paths[comm.rank // 2], comm, storage="per_node", verify="full")
        return all(np.array_equal(wanted[key].local_tensor, right[key].local_tensor) for key in KEYS)

    assert all(SimulatedWorld(8).run(job))
