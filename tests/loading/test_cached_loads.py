"""Kept loads: a layout that is loaded again is not planned again, and every change is noticed on all ranks."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from dataclasses import asdict, fields

import numpy as np
import paddle
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.communication.group_communicators import plans_of
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.memory.live_targets import describe_targets
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer import transfer
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.plan_cache import PlanCache
from tests.ramdisk import memory_directory
from tests.saving.test_plan_cache import LAYOUTS, MOVED, VALUES, barrier, build, no_rule_of_a_state, sent_by

AOA = {"aoa_statements": ["w -> w, scale=2.0"]}
OPTIONS = [
    {"strict": True},
    {"strict": False},
    {"dtype": "cast"},
    {"tied_names": False},
    {"master_weights": "convert"},
    {"fused": "exact"},
    {"optimizer_states": "ignore"},
    {"mw_name_compatibility": False},
    {"verify": "full"},
    {"verify": "off"},
    {"verify": "nonsense"},
    {"use_replicas": False},
    {"coordinator_rank": -1},
    {"coordinator_rank": 17},
    {"comm_method": "direct"},
    {"comm_method": "cooperative"},
    {"storage": "per_node"},
    {"storage": "shared"},
    {"aoa_config": AOA},
    {"aoa_config": {"aoa_statements": ["w -> w, scale=3.0"]}},
    {"aoa_config": {"aoa_statements": ["w -> nowhere, nonsense"]}},
    {"unique_id": 0},
    {"unique_id": 1},
    {"unique_id": 5},
]

# How ranks come by the files: each reads what it needs; one rank for all, who send each other the rest, or, where each
# node has some of the files, those that see them.
WAYS = {
    "direct": {},
    "cooperative": {"comm_method": "cooperative"},
    "per node": {"storage": "per_node"},
    "per node, cooperative": {"storage": "per_node", "comm_method": "cooperative"},
}
DEFAULTS = {"comm_method": "auto", "storage": "shared", "verify": "read"}
# What a rank sends by a cached plan: that it has one, and, in an exchange, where it is.
BRIEF = 27


# Changes of targets that matter to loads alone.
def alias(state, rank, size):
    del state["v"]
    state["u"] = ShardedWeight("u", np.zeros((8, 6), np.float32), (8, 6), (8 * size, 6), (8 * rank, 0), aliases=("w",))


def other_alias(state, rank, size):
    state["w"].aliases = ("v",)


def raw_name(state, rank, size):
    state["q.moment1_0"].raw_names = ("linear_0.w_0_moment1_0",)


def tied(state, rank, size):
    state["v"].local_tensor = state["w"].local_tensor


def overlapping(state, rank, size):
    both = np.zeros((9, 6), np.float32)
    state["w"].local_tensor, state["v"].local_tensor = both[:8], both[1:]


def interleaved(state, rank, size):
    both = np.zeros((8, 12), np.float32)
    state["w"].local_tensor, state["v"].local_tensor = both[:, ::2], both[:, 1::2]


TARGETS = [alias, other_alias, raw_name, tied, overlapping, interleaved]
# What is of no consequence for a load: what a save asks of replicas, and the values.
SAME = {*VALUES, *[change for change in LAYOUTS if "replica" in change.__name__]}


def outcome_of(state, path, comm, **options) -> object:
    """What a load returns or raises, without times, and what the targets are then."""
    try:
        report = asdict(load_state_dict(state, path, comm, **options))
    except CheckpointError as error:
        return type(error), str(error)
    del report["seconds"]
    tensors = [getattr(value, "local_tensor", value) for value in state.values()]
    return report, [tensor.tobytes() for tensor in tensors]


def path_of(path, comm, options):
    """The directory that a rank sees: of the first half of the ranks, or of the others, where nodes have their own."""
    if options.get("storage") != "per_node":
        return path
    return path / "ab"[2 * comm.position // comm.size]


def save(path, size, seed=0, change=None, **options):
    def job(comm):
        state = build(comm.position, size, seed)
        if change is not None:
            change(state, comm.position, size)
        return save_state_dict(state, path_of(path, comm, options), comm, **options)

    SimulatedWorld(size).run(job)


@pytest.fixture
def resolved(monkeypatch) -> list[int]:
    """The ranks that resolve their targets, each as often as it does."""
    ranks, resolve = [], transfer.resolve

    def counted(targets, *arguments):
        ranks.append(int(targets.catalog.rank[0]))
        return resolve(targets, *arguments)

    monkeypatch.setattr(transfer, "resolve", counted)
    return ranks


# Each way, and whose change it is: once in CI, on few ranks, and all of them together when all tests run.
IN_CI = {("direct", 1, "all"), ("direct", 2, "one"), ("cooperative", 2, "all"), ("per node", 2, "one")}
CASES = [
    (way, size, who) for way in WAYS for size in (1, 2, 4) for who in ("all", "one") if way == "direct" or size > 1
]


@pytest.mark.parametrize(
    ("way", "size", "who"), [pytest.param(*each, marks=() if each in IN_CI else pytest.mark.slow) for each in CASES]
)
def test_every_change_is_noticed_and_the_outcome_is_that_of_a_first_load(resolved, way, size, who):
    """One thing after the other is changed, on all ranks or on the last; and then all is as it was before."""
    changes = [each for each in (*LAYOUTS, *VALUES, *TARGETS, *OPTIONS) if size > 1 or each not in MOVED]
    random.Random(f"{way} {size} {who}").shuffle(changes)
    base = WAYS[way]
    found = int("storage" in base)  # in one collective more, which files there are

    def job(comm, path):
        sizes, kept, reused = sent_by(comm), plans_of(comm), []
        changes_here = who == "all" or comm.position == size - 1

        def loaded(number, change, plans):
            """What comes of a load with the plans there are, its messages' sizes and how often it is resolved."""
            comm.plans, state, options = plans, build(comm.position, size, number), base
            if changes_here and callable(change):
                change(state, comm.position, size)
            elif changes_here:
                options = {
                    **base,
                    **(change if change.get("coordinator_rank") != -1 else {"coordinator_rank": size - 1}),
                }
            sizes.clear()
            count = resolved.count(comm.rank)
            outcome = outcome_of(state, path_of(path, comm, base), comm, **options)
            sent = [*sizes, resolved.count(comm.rank) - count]
            barrier(comm)
            return outcome, sent

        for number, change in enumerate(changes):
            loaded(number, lambda *_: None, kept)
            before = loaded(number, lambda *_: None, kept)
            assert before[1][found] <= 64
            assert len(before[1]) == 3 + found
            assert before[1][-1] == 0
            with_plans, twice = loaded(number, change, kept), loaded(number, change, kept)
            first = loaded(number, change, PlanCache())
            assert with_plans[0] == first[0] == twice[0], change
            if with_plans[1][-1] == 0 and isinstance(with_plans[0][0], dict):
                reused.append(change)
        return reused

    with memory_directory() as directory:
        save(directory, size, 1, unique_id=0, **{name: base[name] for name in base if name == "storage"})
        save(directory, size, 2, unique_id=1, **{name: base[name] for name in base if name == "storage"})
        reused = SimulatedWorld(size).run(lambda comm: job(comm, directory))[-1]
    # Another checkpoint of the same structure is no other plan; but all have to load it, whether it is named or found.
    alike = who == "all" or size == 1
    expected = [
        *SAME,
        *([no_rule_of_a_state] if size > 1 else []),
        {"unique_id": 1},
        *([{"unique_id": 0}] if alike else []),
        *[each for each in OPTIONS if each.items() <= {**DEFAULTS, **base}.items()],
    ]
    assert sorted(map(repr, reused)) == sorted(map(repr, [each for each in expected if each in changes]))


@pytest.mark.parametrize("options", [{}, {"aoa_config": AOA, "strict": False}, {"verify": "full", "dtype": "cast"}])
def test_one_short_message_takes_the_place_of_gathering_and_planning(resolved, options):
    def job(comm, path):
        sizes, found = sent_by(comm), []
        for seed in range(3):
            sizes.clear()
            state = build(comm.position, comm.size, 9 + seed)
            outcome = outcome_of(state, path, comm, unique_id=seed, **options)
            found.append(([*sizes], outcome))
            barrier(comm)
            kept, comm.plans = plans_of(comm), PlanCache()
            again = build(comm.position, comm.size, 19 + seed)
            assert outcome_of(again, path, comm, unique_id=seed, **options) == outcome
            comm.plans = kept
        return found

    for size in (1, 2, 4):
        resolved.clear()
        with memory_directory() as directory:
            for seed in range(3):
                save(directory, size, seed, unique_id=seed)
            for (first, _), *later in SimulatedWorld(size).run(lambda comm: job(comm, directory)):
                assert len(first) == (3 if "aoa_config" in options else 2)
                for sizes, _ in later:
                    assert len(sizes) == 2
                    assert sizes[0] <= 27
                    assert sizes[1] == first[-1]  # "all have read", with their bytes
                assert len({str(outcome[1]) for _, outcome in later}) == len(later)
        assert sorted(resolved) == sorted([*range(size)] * 4)  # one by a plan that was made, and three first loads


@pytest.mark.parametrize(("way", "size"), [("cooperative", 2), ("cooperative", 4), ("per node", 2), ("per node", 4)])
def test_ranks_that_read_for_each_other_tell_where_they_are_and_move_data(resolved, way, size):
    """What a first load gathers is in no message of a later one, whose address is another each time."""
    options = WAYS[way]
    found = int("storage" in options)

    def job(comm, path):
        sizes, counts, moved = sent_by(comm), [], []
        for seed in range(3):
            sizes.clear()
            state = build(comm.position, size, 9 + seed)
            report = load_state_dict(state, path_of(path, comm, options), comm, **options)
            counts.append([*sizes])
            moved.append((report.bytes_read, report.bytes_received, report.bytes_sent, report.comm_method))
            kept, comm.plans = plans_of(comm), PlanCache()
            again = build(comm.position, size, 19 + seed)
            assert outcome_of(again, path_of(path, comm, options), comm, **options)[1] == [
                getattr(value, "local_tensor", value).tobytes() for value in state.values()
            ]
            comm.plans = kept
        assert len({*moved}) == 1
        return counts, moved[0]

    with memory_directory() as directory:
        save(directory, size, 1, **{name: options[name] for name in options if name == "storage"})
        of_rank = SimulatedWorld(size).run(lambda comm: job(comm, directory))
    assert sum(moved[1] for _, moved in of_rank) == sum(moved[2] for _, moved in of_rank) > 0
    for (first, *later), _ in of_rank:
        assert [len(first), *map(len, later)] == [3 + found, 2 + found, 2 + found]
        # Here an address is a number. With nodes there are two, and their lengths.
        assert all(each[found] <= BRIEF + (2, 2 + 2 * 9)[found] for each in later)
    assert sorted(resolved) == sorted([*range(size)] * 4)


def test_another_sight_of_the_files_is_another_plan(resolved):
    """Nodes that change places, and a file that is removed: who sees what is part of a plan."""

    def job(comm, path):
        def load(place):
            state, before = build(comm.position, 2, 9), resolved.count(comm.rank)
            report = load_state_dict(state, path / place, comm, storage="per_node")
            for key, value in build(comm.position, 2, 1).items():
                assert (getattr(state[key], "local_tensor", state[key]) == getattr(value, "local_tensor", value)).all()
            barrier(comm)
            return resolved.count(comm.rank) - before, report.bytes_received

        own, other = "ab" if comm.rank == 0 else "ba"
        found = [load(own), load(own), load(other), load(own), load(other)]
        if comm.rank == 0:
            next((path / "a").glob("1_0-*.safetensors")).unlink()
        barrier(comm)
        return [*found, load(own), load(own)]

    with memory_directory() as directory:
        save(directory, 2, 1, storage="per_node", node_copies=2)
        next((directory / "b").glob("0_0-*.safetensors")).unlink()
        of_rank = SimulatedWorld(2).run(lambda comm: job(comm, directory))
    for loads in of_rank:
        assert [planned for planned, _ in loads] == [1, 0, 1, 0, 0, 1, 0]
    received = list(zip(*([got for _, got in loads] for loads in of_rank)))
    assert received[0] == received[1] == received[3] != received[2] == received[4]
    assert received[5] == received[6] != received[0]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_takes_one_collective_more(resolved, changed):
    def job(comm, path):
        sizes, state = sent_by(comm), build(comm.position, 2)
        load_state_dict(state, path, comm)
        if comm.rank == changed:
            state["v"].aliases = ("another",)
        sizes.clear()
        load_state_dict(state, path, comm)
        return [*sizes]

    with memory_directory() as directory:
        save(directory, 2)
        of_rank = SimulatedWorld(2).run(lambda comm: job(comm, directory))
    assert [len(sizes) for sizes in of_rank] == [3, 3]
    assert of_rank[1 - changed][0] <= 27
    assert min(of_rank[1 - changed][1], of_rank[changed][0]) > 200
    assert of_rank[changed][1] == 1
    assert sorted(resolved) == [0, 0, 1, 1]


@pytest.mark.parametrize("warm_saves", [0, 2])
@pytest.mark.parametrize("other", ["save_state_dict", "reshard_sharded_state_dict"])
def test_a_call_of_another_kind_is_told_as_ever(tmp_path, other, warm_saves):
    def job(comm, warm):
        state, target = build(comm.position, 2), build(comm.position, 2, 3)
        for _ in range(warm_saves):
            save_state_dict(state, tmp_path / f"{warm} {warm_saves}", comm)
        for _ in range(warm):
            load_state_dict(target, tmp_path / "0", comm)
        with pytest.raises(ValidationError) as caught:
            if comm.rank == 0:
                load_state_dict(target, tmp_path / "0", comm)
            elif other == "save_state_dict":
                save_state_dict(state, tmp_path / "other", comm)
            else:
                reshard_sharded_state_dict(state, target, comm)
        return str(caught.value)

    save(tmp_path / "0", 2)
    first, kept = (SimulatedWorld(2).run(lambda comm, warm=warm: job(comm, warm)) for warm in (0, 2))
    said = "ranks do not make the same call: rank 0: load_state_dict; rank 1: " + other
    assert all(said in text for text in (*first, *kept))


def more_keys(state, rank, size):
    state["z"] = np.arange(4.0)


def other_cut(state, rank, size):
    """The same tensors, of which ranks have saved other parts."""
    if size > 1:
        begin, end = 8 * rank + (rank > 0), 8 * (rank + 1) + (rank < size - 1)
        values = np.random.default_rng(rank).random((end - begin, 6), dtype=np.float32)
        state["w"] = ShardedWeight("w", values, values.shape, (8 * size, 6), (begin, 0))


def other_type(state, rank, size):
    state["w"].local_tensor = state["w"].local_tensor.astype(np.float64)


@pytest.mark.parametrize("options", [{}, {"dtype": "cast", "strict": True}])
@pytest.mark.parametrize("change", [more_keys, other_cut, other_type])
def test_a_checkpoint_of_another_structure_is_planned_anew(resolved, change, options):
    def job(comm, path):
        outcomes = []
        for unique_id in (0, 0, 1, 0, 1, 2):
            before = resolved.count(comm.rank)
            outcome = outcome_of(build(comm.position, 2, 9), path, comm, unique_id=unique_id, **options)
            count = resolved.count(comm.rank) - before
            kept, comm.plans = plans_of(comm), PlanCache()
            first = outcome_of(build(comm.position, 2, 9), path, comm, unique_id=unique_id, **options)
            assert outcome == first
            comm.plans = kept
            outcomes.append((outcome[0] if isinstance(outcome[0], type) else None, count))
            barrier(comm)
        return outcomes

    with memory_directory() as directory:
        save(directory, 2, 0, unique_id=0)
        save(directory, 2, 1, change, unique_id=1)
        save(directory, 2, 2, unique_id=2)
        of_rank = SimulatedWorld(2).run(lambda comm: job(comm, directory))
    fails = (change is more_keys and "strict" in options) or (change is other_type and "dtype" not in options)
    # What fails is not kept.
    other = (ValidationError, 1) if fails else (None, 1)
    again = other if fails else (None, 0)
    assert of_rank == [[(None, 1), (None, 0), other, (None, 0), again, (None, 0)]] * 2


def test_a_damaged_file_is_told_as_in_a_first_load():
    """Its size before a target is touched, and its bytes while they are read."""

    def job(comm, path, cut):
        state = build(comm.position, 2, 9)
        load_state_dict(state, path, comm)
        (file,) = [each for each in path.iterdir() if each.name.startswith("0_") or "_0_" in each.name][:1]
        barrier(comm)
        if comm.rank == 0:
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data[: len(data) - cut])
        barrier(comm)
        before = [getattr(value, "local_tensor", value).tobytes() for value in state.values()]
        outcomes = []
        for plans in (plans_of(comm), PlanCache()):
            comm.plans = plans
            with pytest.raises(CorruptCheckpointError) as caught:
                load_state_dict(state, path, comm)
            outcomes.append(str(caught.value))
            if cut:
                assert before == [getattr(value, "local_tensor", value).tobytes() for value in state.values()]
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    for cut in (0, 5):
        with memory_directory() as directory:
            save(directory, 2)
            assert len({*SimulatedWorld(2).run(lambda comm, cut=cut: job(comm, directory, cut))}) == 1


def test_names_of_tensors_and_gaps_are_known(tmp_path, resolved):
    """Whose states there are is in a fingerprint; the strides of shared memory are, too."""
    comm = SoloCommunicator()
    layer = paddle.nn.Linear(2, 3)
    raw = {f"{parameter.name}_moment1_0": paddle.ones(parameter.shape) for parameter in layer.parameters()}
    save_state_dict({**layer.state_dict(), **raw}, tmp_path / "raw", comm)
    both = np.zeros((4, 6), np.float32)
    apart = {"a": both[:, ::2], "b": both[:, 1::2]}
    save_state_dict(apart, tmp_path / "apart", comm)
    for state, path, count in (({**layer.state_dict(), **raw}, "raw", 1), (apart, "apart", 1)):
        resolved.clear()
        for _ in range(3):
            load_state_dict(state, tmp_path / path, comm)
        assert resolved == [0] * count
    with pytest.raises(ValidationError, match="overwrite"):
        load_state_dict({"a": both[:, ::2], "b": both[:, 2:5]}, tmp_path / "apart", comm)


def test_every_option_is_part_of_what_is_compared():
    """But the id, as the checkpoint that it stands for is, who is told of progress, and what is refused."""
    own = {each.name for each in fields(LoadOptions)} - {*LoadOptions.compared()}
    assert own == {"unique_id", "progress", "load_transform"}


def test_what_is_refused_is_refused_by_a_kept_plan_too(tmp_path):
    comm, state = SoloCommunicator(), {"w": np.arange(4.0)}
    save_state_dict(state, tmp_path, comm)
    for _ in range(2):
        load_state_dict(state, tmp_path, comm)
    with pytest.raises(ValidationError, match="load_transform has to have the methods"):
        load_state_dict(state, tmp_path, comm, load_transform=print)


def test_a_report_is_its_caller_s(tmp_path):
    comm = SoloCommunicator()
    save_state_dict({"a": np.ones(2), "b": np.ones(2)}, tmp_path, comm)
    for _ in range(3):
        report = load_state_dict({"a": np.zeros(2)}, tmp_path, comm)
        assert report.unexpected == ["b"]
        report.unexpected.clear()


def test_tensors_are_not_kept_alive(tmp_path):
    comm, state = SoloCommunicator(), build(0, 1)
    save_state_dict(state, tmp_path, comm)
    seen = [weakref.ref(getattr(value, "local_tensor", value)) for value in state.values()]
    for _ in range(2):
        load_state_dict(state, tmp_path, comm)
    del state
    gc.collect()
    assert [reference() for reference in seen] == [None] * len(seen)


def test_the_bytes_of_a_kept_load_are_those_of_its_columns(tmp_path, monkeypatch):
    comm, kept = SoloCommunicator(), []
    state = {f"layer.{number}": np.zeros(2) for number in range(1000)}
    save_state_dict(state, tmp_path, comm)
    monkeypatch.setattr(plans_of(comm), "put", lambda *arguments: kept.append(arguments))
    for options in ({}, {"aoa_config": {"aoa_statements": [f"layer.{i} -> layer.{i}, scale=2.0" for i in range(9)]}}):
        load_state_dict(state, tmp_path, comm, **options)
    sizes = [plan.nbytes for _, plan in kept]
    assert 300 * len(state) < sizes[0] < sizes[1] < 2000 * len(state)


def test_a_tensor_more_costs_a_few_calls(tmp_path):
    """Of a load by a cached plan, until data moves."""

    def calls(count: int) -> int:
        comm, seen = SoloCommunicator(), 0
        state = {f"layer.{number}": np.full(3, number) for number in range(count)}
        save_state_dict(state, tmp_path / f"{count}", comm)
        load_state_dict(state, tmp_path / f"{count}", comm)
        files = Files(tmp_path / f"{count}", LoadOptions())
        load = transfer.Transfer(
            comm,
            files,
            lambda: describe_targets(state, 0),
            LoadOptions(),
            "load_state_dict",
            "",
            None,
            plans_of(comm),
        )

        def profile(frame, event, argument):
            nonlocal seen
            seen += event == "call"

        with files.closing:
            sys.setprofile(profile)
            try:
                load.prepare()
            finally:
                sys.setprofile(None)
        return seen

    assert (calls(600) - calls(200)) / 400 <= 0.1
