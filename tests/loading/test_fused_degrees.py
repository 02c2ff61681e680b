"""Fused parameters under another tensor-parallel degree: put right by themselves, against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paddle_flexckpt as fc
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.sharded_weight import create_sharded_weight_with_new_local
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.property import examples
from tests.ramdisk import memory_directory

HEADS, GROUPS, HEAD = 8, 4, 2
HEADS_TEXT = f"num_heads={HEADS}, num_key_value_groups={GROUPS}"
# Name: (statement, extents of what is fused along the axis, axis, number of axes).
FUSED = {
    "mlp.gate_up.weight": ("fused_ffn", (16, 16), 1, 2),
    "mlp.gate_up.bias": ("fused_ffn", (16, 16), 0, 1),
    "mlp.rows.weight": ("fused_ffn, axis=0", (8, 8), 0, 2),
    "attn.qkv.weight": (f"fused_qkv_old, {HEADS_TEXT}", (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD), -1, 2),
    "attn.qkv.bias": (f"fused_qkv_old, {HEADS_TEXT}", (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD), 0, 1),
}
STATES = ("", ".w_0", ".moment1_0", ".moment2_0")
ROWS = 3
LOAD_COLLECTIVES, RESHARD_COLLECTIVES = 2, 4


def components(name: str, state: str) -> list[np.ndarray]:
    """What is fused, whole, every value of its own."""
    _, extents, axis, ndim = FUSED[name]
    first = 10000 * list(FUSED).index(name) + 1000 * STATES.index(state)
    made = []
    for extent in extents:
        shape = [extent] if ndim == 1 else [ROWS, extent] if axis % ndim else [extent, ROWS]
        made.append(first + np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
        first += 300
    return made


def part(name: str, state: str, degree: int, rank: int) -> np.ndarray:
    """The oracle: what a rank holds is its part of each component, side by side."""
    axis = FUSED[name][2]
    parts = [np.split(whole, degree, axis=axis)[rank] for whole in components(name, state)]
    return np.ascontiguousarray(np.concatenate(parts, axis=axis))


def shard(name: str, degree: int, rank: int, empty: bool) -> fc.ShardedWeight:
    statement, _, axis, ndim = FUSED[name]
    values = part(name, "", degree, rank)
    shape, offset = list(values.shape), [0] * ndim
    shape[axis] *= degree
    offset[axis] = values.shape[axis] * rank
    values = np.full_like(values, -1) if empty else values
    return fc.ShardedWeight(name, values, values.shape, shape, offset, fused=fc.FusedAxis(axis, statement))


def layout(degree: int, sharding: str, rank: int, empty: bool = False) -> dict[str, fc.ShardedWeight]:
    """A rank's shards; ranks of one tensor-parallel part are neighbours.

    Args:
        degree: Of tensor parallelism.
        sharding: Of the states over 2 ranks: ``""`` (no second rank), ``"v1"`` whole states, ``"v2"`` flat ranges,
            ``"dp"`` replicas.
        rank: The rank.
        empty: Whether to fill with -1.
    """
    tp, second = (rank, 0) if not sharding else divmod(rank, 2)
    shards = {}
    for number, name in enumerate(FUSED):
        parameter = shard(name, degree, tp, empty)
        shards[name] = parameter
        for state in STATES[1:]:
            key, values = name + state, part(name, state, degree, tp)
            values = np.full_like(values, -1) if empty else values
            made = create_sharded_weight_with_new_local(key, values, parameter)
            if sharding == "v1" and number % 2 != second:
                continue
            if sharding == "v2":
                cut = values.size // 2 + 1
                flat = slice(0, cut) if second == 0 else slice(cut, values.size)
                made = fc.ShardedWeight(
                    key,
                    values.reshape(-1)[flat].copy(),
                    values.shape,
                    parameter.global_shape,
                    parameter.global_offset,
                    True,
                    flat,
                    fused=parameter.fused,
                )
            shards[key] = made
        scalar = np.full(1, -1 if empty else 7, dtype=np.float32)
        shards[name + ".beta1_pow_acc_0"] = fc.ShardedWeight(name + ".beta1_pow_acc_0", scalar, (1,), (1,), (0,))
    return shards


def ranks_of(degree: int, sharding: str) -> int:
    return degree * (2 if sharding else 1)


def check(got: dict[str, fc.ShardedWeight], degree: int, sharding: str, rank: int) -> None:
    for key, wanted in layout(degree, sharding, rank).items():
        np.testing.assert_array_equal(got[key].local_tensor, wanted.local_tensor, err_msg=f"{key} on rank {rank}")


def move(source: tuple[int, str], target: tuple[int, str], path, **options) -> list[LoadReport]:
    SimulatedWorld(ranks_of(*source)).run(lambda comm: fc.save_state_dict(layout(*source, comm.rank), path, comm))

    def load(comm):
        shards = layout(*target, comm.rank, empty=True)
        before = comm.collectives
        report = fc.load_state_dict(shards, path, comm, strict=True, **options)
        assert comm.collectives - before == LOAD_COLLECTIVES
        check(shards, *target, comm.rank)
        return report

    return SimulatedWorld(ranks_of(*target)).run(load)


@pytest.mark.parametrize("target", [1, 2, 4])
@pytest.mark.parametrize("source", [1, 2, 4])
def test_load(tmp_path, source, target):
    for report in move((source, ""), (target, ""), tmp_path):
        moved = {name + state for name in FUSED for state in STATES}
        assert set(report.fused) == (set() if source == target else moved)
        if source != target:
            assert set(report.fused.values()) == {f"{source} parts -> {target} parts"}
            assert f"{len(moved)} fused under another degree" in report.summary()
        # The plan moves boxes: no byte more than the targets have is read.
        assert report.bytes_read == report.bytes_needed


@examples(25)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["", "v1", "v2", "dp"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["", "v1", "v2", "dp"]),
)
def test_load_between_layouts(source, source_sharding, target, target_sharding):
    with memory_directory() as path:
        move((source, source_sharding), (target, target_sharding), path)


@examples(15)
@given(st.sampled_from([1, 2, 4]), st.sampled_from(["", "v2", "dp"]), st.sampled_from([1, 2, 4]))
def test_reshard_in_memory(source, sharding, target):
    size = max(ranks_of(source, sharding), target)

    def job(comm):
        held = layout(source, sharding, comm.rank) if comm.rank < ranks_of(source, sharding) else {}
        wanted = layout(target, "", comm.rank, empty=True) if comm.rank < target else {}
        before = comm.collectives
        report = fc.reshard_sharded_state_dict(held, wanted, comm)
        collectives = comm.collectives - before
        if comm.rank < target:
            check(wanted, target, "", comm.rank)
            assert bool(report.fused) == (source != target)
        return collectives

    # Only where something has to be put right do the ranks meet twice more.
    counts = set(SimulatedWorld(size).run(job))
    assert len(counts) == 1
    same = {RESHARD_COLLECTIVES}
    assert counts == same if source == target else counts != same


def test_stages_of_a_pipeline_put_their_own_right(tmp_path):
    """Each rank has other parameters, and so other statements."""
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(layout(2, "", comm.rank), tmp_path, comm))
    names = list(FUSED)

    def load(comm):
        stage, tp = divmod(comm.rank, 4)
        mine = names[:2] if stage == 0 else names[2:]
        shards = {key: w for key, w in layout(4, "", tp, empty=True).items() if key.startswith(tuple(mine))}
        fc.load_state_dict(shards, tmp_path, comm, strict=True)
        for key, wanted in layout(4, "", tp).items():
            if key in shards:
                np.testing.assert_array_equal(shards[key].local_tensor, wanted.local_tensor)
        return len(shards)

    assert sum(SimulatedWorld(8).run(load)) == 4 * len(layout(4, "", 0))


@pytest.mark.parametrize("reverse", [False, True])
def test_what_the_users_statements_make_is_their_business_and_the_rest_is_completed(tmp_path, reverse):
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(layout(2, "", comm.rank), tmp_path, comm))
    user, other = "mlp.gate_up.weight", "attn.qkv.weight"
    config = {"aoa_statements": [f"{user} -> {user}, axis=1"], "aoa_config_reverse": reverse}

    def load(comm):
        shards = {key: w for key, w in layout(1, "", 0, empty=True).items() if key.startswith((user, other))}
        report = fc.load_state_dict(shards, tmp_path, comm, aoa_config=config)
        joined = np.concatenate([part(user, "", 2, 0), part(user, "", 2, 1)], axis=1)
        np.testing.assert_array_equal(shards[user].local_tensor, joined)  # as the statement says
        np.testing.assert_array_equal(shards[other + ".w_0"].local_tensor, part(other, ".w_0", 1, 0))
        assert set(report.fused) == {other + state for state in STATES}

    SimulatedWorld(1).run(load)


def test_states_alone_and_a_state_of_the_users(tmp_path):
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(layout(2, "", comm.rank), tmp_path, comm))
    name = "mlp.gate_up.weight"
    for wanted in ([".w_0"], [".moment1_0", ".moment2_0"], ["", ".moment1_0"]):
        shards = {name + state: layout(4, "", 3, empty=True)[name + state] for state in wanted}
        (comm,) = SimulatedWorld(1).run(lambda comm: comm)
        fc.load_state_dict(shards, tmp_path, comm, optimizer_states="ignore")
        for state in wanted:
            np.testing.assert_array_equal(shards[name + state].local_tensor, part(name, state, 4, 3))


def test_masters_start_from_fused_parameters_of_another_degree(tmp_path):
    name = "attn.qkv.weight"

    def half(comm):
        weight = shard(name, 2, comm.rank, False)
        weight.local_tensor = weight.local_tensor.astype(ml_dtypes.bfloat16)
        fc.save_state_dict({name: weight}, tmp_path, comm)

    SimulatedWorld(2).run(half)

    def load(comm):
        parameter = shard(name, 4, comm.rank, True)
        parameter.local_tensor = parameter.local_tensor.astype(ml_dtypes.bfloat16)
        master = create_sharded_weight_with_new_local(name + ".w_0", np.zeros_like(part(name, "", 4, 0)), parameter)
        report = fc.load_state_dict(
            {name: parameter, name + ".w_0": master}, tmp_path, comm, strict=True, master_weights="convert"
        )
        expected = part(name, "", 4, comm.rank).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(parameter.local_tensor, expected)
        np.testing.assert_array_equal(master.local_tensor, expected.astype(np.float32))
        assert report.masters == {name + ".w_0": name}
        assert set(report.fused) == {name, name + ".w_0"}

    SimulatedWorld(4).run(load)


def test_tied_names_are_found(tmp_path):
    name = "mlp.gate_up.weight"
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict({name: shard(name, 2, comm.rank, False)}, tmp_path, comm))

    def load(comm):
        weight = shard(name, 1, 0, True)
        weight.key, weight.aliases = "tied.weight", (name,)
        report = fc.load_state_dict({"tied.weight": weight}, tmp_path, comm, strict=True)
        np.testing.assert_array_equal(weight.local_tensor, part(name, "", 1, 0))
        assert (report.aliases, list(report.fused)) == ({"tied.weight": name}, ["tied.weight"])

    SimulatedWorld(1).run(load)


def test_another_dtype_is_still_an_error(tmp_path):
    name = "mlp.gate_up.weight"
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict({name: shard(name, 2, comm.rank, False)}, tmp_path, comm))

    def load(comm):
        weight = shard(name, 1, 0, True)
        weight.local_tensor = weight.local_tensor.astype(np.float64)
        fc.load_state_dict({name: weight}, tmp_path, comm)

    with pytest.raises(fc.ValidationError, match="dtypes differ"):
        SimulatedWorld(1).run(load)


def test_heads_that_cannot_be_spread_are_an_error_that_names_the_statement(tmp_path):
    name = "attn.qkv.weight"
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict({name: shard(name, 2, comm.rank, False)}, tmp_path, comm))
    whole = shard(name, 1, 0, False)
    eighth = whole.global_shape[1] // 8

    def load(comm):
        values = np.full((ROWS, eighth), -1, dtype=np.float32)
        offset = (0, eighth * comm.rank)
        target = fc.ShardedWeight(name, values, values.shape, whole.global_shape, offset, fused=whole.fused)
        try:
            fc.load_state_dict({name: target}, tmp_path, comm)
        finally:
            assert (values == -1).all()

    for outcome in SimulatedWorld(8).run_all(load):
        assert isinstance(outcome, fc.ValidationError)
        assert "cannot be cut into 8 equal tensor-parallel parts" in str(outcome)


def test_the_switch_has_to_be_known_and_the_same(tmp_path):
    fc.save_state_dict({"w": np.ones(2, np.float32)}, tmp_path, SimulatedWorld(1).run(lambda comm: comm)[0])

    def load(comm, fused):
        fc.load_state_dict({"w": np.zeros(2, np.float32)}, tmp_path, comm, fused=fused)

    with pytest.raises(fc.ValidationError, match="fused is 'convert' or 'exact'; got 'maybe'"):
        SimulatedWorld(1).run(lambda comm: load(comm, "maybe"))
    with pytest.raises(fc.ValidationError, match="ranks disagree"):
        SimulatedWorld(2).run(lambda comm: load(comm, ["exact", "convert"][comm.rank]))


@pytest.mark.parametrize("axis", [0, 1])
def test_replicas_of_a_large_shard_are_not_split_along_the_fused_axis(tmp_path, axis):
    """Else the pieces would look like parts of a higher degree."""
    rows = np.arange(4 << 18, dtype=np.float32).reshape((-1, 4) if axis == 0 else (4, -1))
    rule = fc.FusedAxis(axis, "fused_ffn" if axis else "fused_ffn, axis=0")

    def weight(values, offset=0):
        place = [0, 0]
        place[axis] = offset
        return {"w": fc.ShardedWeight("w", values, values.shape, rows.shape, place, fused=rule)}

    def save(comm):
        part = np.ascontiguousarray(np.split(rows, 2, axis=axis)[comm.rank // 2])
        return fc.save_state_dict(weight(part, part.shape[axis] * (comm.rank // 2)), tmp_path, comm).items

    items = SimulatedWorld(4).run(save)
    assert items == [2 if axis == 0 else 4] * 4

    def load(comm):
        target = weight(np.zeros_like(rows))
        report = fc.load_state_dict(target, tmp_path, comm)
        quarters = np.split(rows, 4, axis=axis)
        wanted = np.concatenate([quarters[0], quarters[2], quarters[1], quarters[3]], axis=axis)
        np.testing.assert_array_equal(target["w"].local_tensor, wanted)
        assert report.fused == {"w": "2 parts -> 1 parts"}

    SimulatedWorld(1).run(load)


def test_a_rule_without_a_statement_is_for_one_degree(tmp_path):
    """A layout of which no statement is known: it loads as it was saved, and is refused in other parts."""
    values = np.arange(24, dtype=np.float32).reshape(ROWS, 8)

    def weight(degree, rank, empty):
        part = np.ascontiguousarray(np.split(values, degree, axis=1)[rank])
        part = np.full_like(part, -1) if empty else part
        return {"w": fc.ShardedWeight("w", part, part.shape, (ROWS, 8), (0, 8 // degree * rank), fused=rule)}

    rule = fc.FusedAxis(1, None)
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(weight(2, comm.rank, False), tmp_path, comm))

    def same(comm):
        target = weight(2, comm.rank, True)
        fc.load_state_dict(target, tmp_path, comm)
        np.testing.assert_array_equal(target["w"].local_tensor, weight(2, comm.rank, False)["w"].local_tensor)

    SimulatedWorld(2).run(same)
    for outcome in SimulatedWorld(4).run_all(
        lambda comm: fc.load_state_dict(weight(4, comm.rank, True), tmp_path, comm)
    ):
        assert isinstance(outcome, fc.ValidationError)
        assert "no AOA statement is known for this parameter" in str(outcome)
