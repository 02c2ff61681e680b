"""Computed values: what is moved for them, how much is held, and that every piece has the bits of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import Node, Region, TensorInfo
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.memory import live_targets
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer import plan
from tests.property.mappings import Move, Program, Weighted, random_values, run_whole, statements_of
from tests.ramdisk import memory_directory


@dataclass(frozen=True)
class LoraMerge:
    """``W + A @ B``, from left to right."""

    rank: int

    def operand_boxes(self, box):
        (i, j), (n, m) = box.offset, box.shape
        return box, Box((i, 0), (n, self.rank)), Box((0, j), (self.rank, m))

    def run(self, box, operands):
        w, a, b = operands
        result = w.copy()
        for k in range(self.rank):
            result = result + a[:, k : k + 1] * b[k : k + 1]
        return result


@dataclass(frozen=True)
class Blocks:
    """``W[i, j] * S[i // b, j // b]``."""

    block: int

    def operand_boxes(self, box):
        first = tuple(o // self.block for o in box.offset)
        stop = tuple(-(-o // self.block) for o in box.stop)
        return box, Box(first, tuple(b - a for a, b in zip(first, stop)))

    def run(self, box, operands):
        w, s = operands
        rows, columns = (np.arange(o, o + n) // self.block - o // self.block for o, n in zip(box.offset, box.shape))
        return w.astype(np.float32) * s[rows][:, columns]


def program(target, step, operands, dtype="float32", node_dtype="float32"):
    """``target = step(operands)``: name and shape of the target, and of operands, each moved from a source."""
    made = Program()
    for name, (operand_dtype, shape) in operands.items():
        made.sources[name] = (operand_dtype, shape)
        zeros = (0,) * len(shape)
        made.tensors[f"#{name}"] = TensorInfo(shape, operand_dtype)
        made.moves[f"#{name}"] = [Move(zeros, shape, name, zeros, tuple(range(len(shape))))]
    shape = next(iter(operands.values()))[1]
    made.nodes.append(Node(step, TensorInfo(shape, node_dtype), tuple(made.tensors)))
    made.tensors[target] = TensorInfo(shape, dtype)
    made.regions[target] = [Region((0,) * len(shape), shape, 0, (0,) * len(shape), tuple(range(len(shape))))]
    return made


def values_of(made):
    return {key: random_values(dtype, shape, i) for i, (key, (dtype, shape)) in enumerate(made.sources.items())}


def load(made, targets, values=None, **options):
    values = values_of(made) if values is None else values
    with memory_directory() as path, statements_of(made.mapping()) as config:
        SimulatedWorld(1).run(lambda comm: save_state_dict(values, path, comm))
        return SimulatedWorld(1).run(lambda comm: load_state_dict(targets, path, comm, aoa_config=config, **options))[0]


def reshard(made, targets, values=None, **options):
    values = values_of(made) if values is None else values
    with statements_of(made.mapping()) as config:
        return SimulatedWorld(1).run(
            lambda comm: reshard_sharded_state_dict(values, targets, comm, aoa_config=config, **options)
        )[0]


both = pytest.mark.parametrize("move", [load, reshard])


@both
@pytest.mark.parametrize("tile", [7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("step", "operands"),
    [
        (LoraMerge(3), {"w": ("float32", (40, 24)), "a": ("float32", (40, 3)), "b": ("float32", (3, 24))}),
        (Blocks(8), {"w": ("float8_e4m3fn", (40, 24)), "s": ("float32", (5, 3))}),
    ],
    ids=["lora", "blocks"],
)
def test_every_piece_has_the_bits_of_the_whole(monkeypatch, move, tile, step, operands):
    monkeypatch.setattr(plan, "TILE_ELEMENTS", tile)
    made = program("t", step, operands)
    values = values_of(made)
    whole = made.value("t", values)
    targets = {
        "box": ((5, 3), (17, 14), None),
        "range": ((0, 0), (40, 24), slice(101, 555)),
        "cell": ((39, 23), (1, 1), None),
    }
    for offset, shape, flat in targets.values():
        expected = whole[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]]
        expected = expected if flat is None else expected.reshape(-1)[flat]
        memory = np.zeros(expected.shape, dtype=np.float32)
        move(made, {"t": ShardedWeight("t", memory, shape, (40, 24), offset, flat is not None, flat)}, values)
        assert memory.tobytes() == expected.tobytes()


@both
def test_a_factor_that_all_tiles_need_is_moved_once(monkeypatch, move):
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 100)
    made = program(
        "t", LoraMerge(3), {"w": ("float32", (64, 16)), "a": ("float32", (64, 3)), "b": ("float32", (3, 16))}
    )
    report = move(made, {"t": np.zeros((64, 16), dtype=np.float32)})
    assert report.bytes_needed == 4 * (64 * 16 + 64 * 3 + 3 * 16)
    assert report.computed == ["t"]


def test_an_operand_that_is_there_twice_is_moved_once():
    made = program("t", Weighted((1.0, 2.0)), {"w": ("float32", (8,))})
    made.nodes[0] = Node(made.nodes[0].step, made.nodes[0].info, ("#w", "#w"))
    report = load(made, {"t": np.zeros(8, dtype=np.float32)})
    assert report.bytes_read == 32


def nested(rows):
    """``t = 0.5 + 2 * (0.5 + 3 * w)``."""
    made = program("u", Weighted((3.0,)), {"w": ("float32", (rows, 16))})
    made.nodes.append(Node(Weighted((2.0,)), TensorInfo((rows, 16), "float32"), ("u",)))
    made.tensors["t"] = TensorInfo((rows, 16), "float32")
    made.regions["t"] = [Region((0, 0), (rows, 16), 1, (0, 0), (0, 1))]
    return made


@pytest.mark.parametrize("rows", [16, 256])
def test_a_load_holds_a_few_tiles_whatever_the_size(monkeypatch, rows):
    tile = 128
    monkeypatch.setattr(plan, "TILE_ELEMENTS", tile)
    made = nested(rows)
    made.sources["v"] = ("float32", (rows, 16))
    values = values_of(made)
    targets = {"t": np.zeros((rows, 16), dtype=np.float32), "v": np.zeros((rows, 16), dtype=np.float32)}
    report = load(made, targets, values)
    assert targets["t"].tobytes() == made.value("t", values).tobytes()
    assert targets["v"].tobytes() == values["v"].tobytes()
    # The tile's operand, and the operand of that.
    assert report.peak_scratch_bytes == 2 * tile * 4
    assert report.bytes_read == 2 * rows * 16 * 4
    assert report.computed == ["t"]


def test_an_exchange_holds_the_operands_that_it_brings():
    made = nested(16)
    report = reshard(made, {"t": np.zeros((16, 16), dtype=np.float32)})
    assert report.peak_scratch_bytes == 2 * 16 * 16 * 4
    assert report.bytes_needed == 16 * 16 * 4


@both
def test_a_strided_target_is_stored_when_its_last_tile_is_done(monkeypatch, move):
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 16)
    made = nested(8)
    made.regions["t"] = [Region((0, 0), (4, 16), 1, (0, 0), (0, 1)), Region((4, 0), (4, 16))]
    base = np.full((10, 18), -1, dtype=np.float32)
    move(made, {"t": base[1:-1, 1:-1]})
    expected = np.full((10, 18), -1, dtype=np.float32)
    expected[1:5, 1:-1] = made.value("t", values_of(made), np.zeros((8, 16)))[:4]
    assert base.tobytes() == expected.tobytes()


def test_staged_targets_are_open_one_after_the_other(monkeypatch):
    events = []

    class Logged(live_targets.HostTensor):
        def __init__(self, tensor, fresh):
            super().__init__(tensor, fresh=fresh)
            events.append("open")

        def store(self):
            super().store()
            events.append("store")

    monkeypatch.setattr(live_targets, "HostTensor", Logged)
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 16)
    made = nested(8)
    made.tensors["s"], made.regions["s"] = made.tensors["t"], made.regions["t"]
    load(made, {name: np.zeros((8, 18), dtype=np.float32)[:, 1:-1] for name in "ts"})
    assert events == ["open", "store"] * 2


@both
def test_what_is_moved_or_computed_is_cast_once_to_the_dtype_of_the_target(move):
    """What AOA says the dtype is has no part in it: its casts are in the mapping already."""
    made = program("computed", Weighted((3.0,)), {"w": ("float64", (40,))}, dtype="bfloat16")
    made.tensors["moved"] = TensorInfo((80,), "bfloat16")
    # The other half is kept.
    made.moves["moved"] = [Move((0,), (40,), "w", (0,), (0,))]
    made.regions["moved"] = [Region((40,), (40,))]
    values = values_of(made)
    targets = {"computed": np.zeros(40, dtype=np.float16), "moved": np.full(80, np.float32(np.pi))}
    report = move(made, targets, values, dtype="cast")
    assert targets["moved"][:40].tobytes() == values["w"].astype(np.float32).tobytes()
    assert (targets["moved"][40:] == np.float32(np.pi)).all()
    exact = run_whole(made.nodes[0], [values["w"]])
    assert exact.dtype == np.float32
    assert targets["computed"].tobytes() == exact.astype(np.float16).tobytes()
    assert report.cast == {"computed": "bfloat16 -> float16", "moved": "bfloat16 -> float32"}
    assert (report.computed, report.kept) == (["computed"], ["moved"])


@both
def test_a_result_of_another_dtype_is_not_cast_in_passing(move):
    made = program("t", Weighted((3.0,)), {"w": ("float32", (40,))}, node_dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"key 't' are float32 \[40\]; expected bfloat16 \[40\].*Weighted"):
        move(made, {"t": np.zeros(40, dtype=np.float32)})


@both
def test_a_value_cannot_be_computed_from_what_a_target_has(move):
    made = program("t", Weighted((3.0,)), {"w": ("float32", (4,))})
    made.moves["#w"], made.regions["#w"] = [], [Region((0,), (4,))]
    target = np.full(4, 7, dtype=np.float32)
    with pytest.raises(ValidationError, match=r"computed from what a target has.*'#w'.*Remedy.*fill=0"):
        move(made, {"t": target})
    assert (target == 7).all()


@dataclass(frozen=True)
class Wrong(Weighted):
    def run(self, box, operands):
        return super().run(box, operands)[:1]


@both
def test_a_result_of_another_shape_is_not_broadcast(move):
    made = program("t", Wrong((3.0,)), {"w": ("float32", (4,))})
    with pytest.raises(CheckpointError, match=r"key 't' are float32 \[1\]; expected float32 \[4\].*Wrong"):
        move(made, {"t": np.zeros(4, dtype=np.float32)})


@both
def test_an_operand_that_the_source_does_not_hold_is_an_error(move):
    made = program("t", Weighted((3.0,)), {"w": ("float32", (4,))})
    made.moves["#w"] = [Move((0,), (3,), "w", (0,), (0,))]
    with pytest.raises(ValidationError, match=r"does not hold all.*'#w'.*expected 4 elements.*got 3 elements"):
        move(made, {"t": np.zeros(4, dtype=np.float32)})
