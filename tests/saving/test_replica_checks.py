"""Replicas have to be equal, or the caller has to say that any of them will do."""

from __future__ import annotations

import contextlib
import re
import threading
import types
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import paddle_flexckpt as fc
import paddle_flexckpt.memory.replica_digests as digests_module
import paddle_flexckpt.saving.replica_checks as replicas_module
from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.native.checksums import HashThread, hash_block
from paddle_flexckpt.planning.replica_comparison import SAMPLE_BYTES
from paddle_flexckpt.run_state import collect_extra_state
from paddle_flexckpt.saving import background_saves
from paddle_flexckpt.sharded_weight import shard_weight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.remedies.following import provoked


def replicated(values):
    return {"experts.0.w": fc.ShardedWeight("experts.0.w", values, values.shape, values.shape, (0,) * values.ndim)}


def held_by(comm, odd):
    values = np.arange(600_000, dtype=np.float32)
    if comm.rank == odd:
        values[123_456] += 1
    return values


@pytest.mark.parametrize(
    "options", [{"check_replicas": "all"}, {"check_replicas": {"experts.*": "all"}}, {"save_replicas": True}]
)
def test_one_element_that_differs_on_one_of_four_ranks_stops_the_save(tmp_path, options):
    def save(comm):
        return fc.save_state_dict(replicated(held_by(comm, odd=2)), tmp_path, comm, **options)

    outcomes = SimulatedWorld(4).run_all(save)
    assert all(isinstance(outcome, fc.ValidationError) for outcome in outcomes)
    (text,) = {str(outcome) for outcome in outcomes}
    for part in ("replicas of one shard differ", "key 'experts.0.w'", "rank 2", "on rank 0", "Remedy"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


SIZES = {"bias": 7, "w": 600_000, "x": 3_000, "z": 123}


def state_of_sizes(dtype=np.float32):
    return {key: np.arange(size, dtype=dtype) for key, size in SIZES.items()}


#: Eight ranks show what four do.
WORLDS = [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_what_a_rank_writes_is_never_others_values_without_a_word(tmp_path, world, background):
    """One rank deviates in one element: either that is found, or what is saved is what all the others have.

    Of what the rank itself writes it is always found.
    """
    random = np.random.default_rng(world)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(fc.BackgroundWriter()) for _ in range(world)] if background else []
        for turn in range(4 if background else 10):
            odd, key = int(random.integers(world)), str(random.choice(["w", "w", "x", "z"]))
            element = int(random.integers(SIZES[key]))
            if turn % 2:
                key, element = "w", int((odd + 0.5) * SIZES["w"] / world)

            def save(comm, turn=turn, odd=odd, key=key, element=element):
                state = state_of_sizes()
                if comm.rank == odd:
                    state[key][element] += 1
                done = fc.save_state_dict(
                    state, tmp_path / str(turn), comm, async_save=writers[comm.rank] if background else False
                )
                return done.result() if background else done

            outcomes = SimulatedWorld(world).run_all(save)
            if isinstance(outcomes[0], fc.ValidationError):
                (text,) = {str(outcome) for outcome in outcomes}
                assert f"key '{key}'" in text and "replicas of one shard differ" in text
                assert f"rank {odd}" in text and "on rank " in text and "got others" in text
            else:
                saved = load(tmp_path / str(turn), {name: (size,) for name, size in SIZES.items()})
                assert all(np.array_equal(saved[name], values) for name, values in state_of_sizes().items())
                assert world > 2 and not turn % 2


@pytest.mark.parametrize("size", [1, 7, 100, 600_000])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_drift_apart_in_groups_are_found_in_every_save(tmp_path, world, size):
    """Ranks out of step, or two experts under one name: whichever ranks hold the one, and whichever the other."""
    random = np.random.default_rng(size)
    for turn in range(6):
        apart = np.append(0, np.append(1, random.integers(0, 2, world - 2)))

        random.shuffle(apart)

        def save(comm, turn=turn, apart=apart):
            return fc.save_state_dict({"w": np.full(size, apart[comm.rank])}, tmp_path / str(turn), comm)

        for outcome in SimulatedWorld(world).run_all(save):
            assert isinstance(outcome, fc.ValidationError) and "replicas of one shard differ" in str(outcome)


def count_hashed(monkeypatch):
    """Bytes that each rank has hashed to compare replicas, by what for; ranks are threads."""
    counts = Counter()

    def add(what, blocks):
        counts[what, threading.get_ident()] += sum(block.nbytes for block in blocks)

    class Counting(HashThread):
        def hash(self, blocks):
            add("read", blocks)
            return super().hash(blocks)

    def one(block):
        add("copied", [block])
        return hash_block(block)

    monkeypatch.setattr(digests_module, "HashThread", Counting)
    monkeypatch.setattr(background_saves, "hash_block", one)
    return counts


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_rank_hashes_what_it_writes_and_what_its_neighbour_writes(tmp_path, world, monkeypatch):
    def save(check_replicas, background):
        counts = count_hashed(monkeypatch)
        state = {f"w{number}": np.arange(1 << 18, dtype=np.float32) for number in range(4)}
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(fc.BackgroundWriter()) for _ in range(world if background else 0)]

            def one(comm):
                path, options = tmp_path / f"{check_replicas} {background}", {"check_replicas": check_replicas}
                if background:
                    fc.save_state_dict(state, path, comm, async_save=writers[comm.rank], **options).result()
                else:
                    fc.save_state_dict(state, path, comm, **options)

            SimulatedWorld(world).run(one)
        return [[count for (what, _), count in counts.items() if what == kind] for kind in ("read", "copied")]

    unique, samples = 4 << 20, 4 * SAMPLE_BYTES if world > 2 else 0
    # The checksums of the file serve for what a rank writes.
    assert save(True, False) == [[unique // world + samples] * world, []]
    assert save(True, True) == [[unique // world + samples] * world, [unique // world] * world]
    assert save(False, True) == [[], []]
    whole = save("all", False)
    assert len(whole[0]) == world and min(whole[0]) >= unique - unique // world


def load(path, shapes):
    """What one process loads, by key."""
    targets = {key: np.zeros(shape, dtype=np.float32) for key, shape in shapes.items()}
    fc.load_state_dict(targets, path, SimulatedWorld(1).run(lambda comm: comm)[0])
    return targets


LAYER = {"bn._mean": (300,), "bn._variance": (7,), "bn.weight": (2, 700_000), "bn.weight.moment1_0": (2, 700_000)}


def of_rank(comm, **policies):
    """A layer whose every value is the rank's number, and what it says of its replicas, by name."""
    state = {
        key: fc.ShardedWeight(key, np.full(shape, comm.rank, np.float32), shape, shape, (0,) * len(shape))
        for key, shape in LAYER.items()
    }
    for key, policy in policies.items():
        state[f"bn.{key}"].replicas = policy
    return state


@pytest.mark.parametrize("save_replicas", [False, True])
@pytest.mark.parametrize("check_replicas", [False, "first", {"bn.*": "first"}])
def test_of_a_whole_layer_the_values_of_one_rank_are_saved(tmp_path, check_replicas, save_replicas):
    def save(comm):
        options = {"check_replicas": check_replicas, "save_replicas": save_replicas}
        return fc.save_state_dict(of_rank(comm), tmp_path, comm, **options)

    reports = SimulatedWorld(3).run(save)
    assert all((array == 0).all() for array in load(tmp_path, LAYER).values())
    for report in reports:
        assert report.replicas == reports[0].replicas
        if check_replicas is False and not save_replicas:
            assert report.replicas == {}
        else:
            assert sorted(report.replicas) == sorted(LAYER)
            assert set(report.replicas.values()) == {"differ; rank 0's values count"}
            assert "replicas of 4 tensors differ, such as 'bn._mean'" in report.summary()


def test_a_layer_that_no_rank_holds_alone_is_saved_by_as_few_as_can_be(tmp_path):
    """Tensor-parallel parts of a layer that two replicas hold: both parts, and what is whole, come from one replica."""

    def save(comm):
        part = comm.rank % 2
        values = np.full((2, 4), comm.rank, np.float32)
        whole = np.full(3, comm.rank, np.float32)
        state = {
            "fc.w": fc.ShardedWeight("fc.w", values, (2, 4), (4, 4), (2 * part, 0)),
            "fc.w.moment1_0": fc.ShardedWeight("fc.w.moment1_0", values, (2, 4), (4, 4), (2 * part, 0)),
        }
        if comm.rank != 0:
            state["fc.b"] = fc.ShardedWeight("fc.b", whole, (3,), (3,), (0,))
        fc.save_state_dict(state, tmp_path, comm, check_replicas="first")

    SimulatedWorld(4).run(save)
    found = load(tmp_path, {"fc.w": (4, 4), "fc.w.moment1_0": (4, 4), "fc.b": (3,)})
    # Rank 1 holds the most; of what it does not hold, the lowest rank's values count.
    assert found["fc.w"][:, 0].tolist() == found["fc.w.moment1_0"][:, 0].tolist() == [0, 0, 1, 1]
    assert set(found["fc.b"].tolist()) == {1}


def test_what_a_layer_says_counts_unless_a_pattern_does(tmp_path):
    def save(comm):
        state = of_rank(comm, _mean="first", _variance="first")
        for key in ("bn.weight", "bn.weight.moment1_0"):
            state[key].local_tensor[...] = 5
        if comm.rank == 2:
            state["bn._variance"].local_tensor[...] = 0
        before = comm.collectives
        report = fc.save_state_dict(state, tmp_path, comm)
        assert comm.collectives - before == 3
        with pytest.raises(fc.ValidationError, match=r"key 'bn\._mean'.*'first'"):
            fc.save_state_dict(state, tmp_path, comm, check_replicas={re.compile(r".*\._mean"): "equal"})
        return report

    reports = SimulatedWorld(3).run(save)
    differ = "differ; rank 0's values count"
    assert reports[0].replicas == {"bn._mean": differ, "bn._variance": differ}
    found = load(tmp_path, LAYER)
    assert (found["bn._mean"] == 0).all()
    assert (found["bn._variance"] == 0).all()
    # What has to be equal is still shared among the ranks.
    assert all(report.bytes_written > 2_700_000 for report in reports)
    assert reports[0].imbalance < 1.6  # four rows of 2.8 MB for three ranks


def test_one_ulp_is_measured_and_said_once(tmp_path, caplog):
    def save(comm):
        values = np.ones(600_000, np.float32)
        if comm.rank == 1:
            values[1234] = np.nextafter(np.float32(1), np.float32(2))
        state = {**replicated(np.arange(5, dtype=np.float32)), "ulp.w": values}
        options = {"check_replicas": {"ulp.*": "close"}}
        first, second = (fc.save_state_dict(state, tmp_path, comm, **options) for _ in range(2))
        return first.replicas, second.replicas

    with caplog.at_level("WARNING", logger="paddle_flexckpt"):
        outcomes = SimulatedWorld(2).run(save)
    assert outcomes == [({"ulp.w": "differ by at most 1.19e-07; rank 0's values count"},) * 2] * 2
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "'ulp.w': differ by at most 1.19e-07" in warning
    assert (load(tmp_path, {"ulp.w": (600_000,)})["ulp.w"] == 1).all()


def test_close_replicas_that_are_equal_cost_one_collective_and_are_shared(tmp_path):
    def save(comm):
        report = fc.save_state_dict(replicated(held_by(comm, odd=None)), tmp_path, comm, check_replicas="close")
        return comm.collectives, report.replicas, report.bytes_written

    assert SimulatedWorld(2).run(save) == [(4, {}, 1_200_000)] * 2


@pytest.mark.parametrize(
    ("values", "others", "size"),
    [
        ([1.0, np.nan], [1.0, np.nan], None),
        ([4.0, np.nan], [4.25, np.nan], "0.25"),
        ([1.0, np.nan], [1.0, 2.0], "no: nan of it"),
        ([1.0, np.nan], [1.0, np.inf], "no: nan of it"),
        ([1.0, np.inf], [1.0, 3.0], "no: inf of it"),
        ([np.inf, 16.0], [np.inf, 17.0], "1"),
        ([0.0, 0.0], [-0.0, 0.0], "0"),
    ],
)
def test_numbers_that_are_none_are_no_small_difference(tmp_path, values, others, size):
    def save(comm):
        state = {"w": np.asarray(others if comm.rank else values, np.float32)}
        return fc.save_state_dict(state, tmp_path, comm, check_replicas="close").replicas

    outcomes = SimulatedWorld(2).run_all(save)
    if size is not None and size.startswith("no"):
        assert all(f"got {size[4:]}" in str(outcome) for outcome in outcomes)
        return
    expected = {} if size is None else {"w": f"differ by at most {size}; rank 0's values count"}
    assert outcomes == [expected] * 2


def drifted(seed: int, order: tuple[int, ...]) -> dict[str, np.ndarray]:
    """What steps of Adam make of a matrix whose gradients are summed in an order, and rounded to bfloat16."""
    noise, weight = np.random.default_rng(0), np.random.default_rng(seed).normal(0, 0.1, (32, 32)).astype(np.float32)
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    half = ml_dtypes.bfloat16
    for step in range(1, 301):
        inputs = noise.normal(size=(4, 16, 32)).astype(np.float32)
        used = weight.astype(half).astype(np.float32)
        parts = [part.T @ (np.tanh(part @ used) - part[:, ::-1]) for part in inputs]
        gradient = np.zeros_like(weight)
        for each in order:
            gradient += parts[each]
        gradient = gradient.astype(half).astype(np.float32)
        first = np.float32(0.9) * first + np.float32(0.1) * gradient
        second = np.float32(0.999) * second + np.float32(0.001) * gradient**2
        root = np.sqrt(second / np.float32(1 - 0.999**step)) + np.float32(1e-8)
        weight = weight - np.float32(1e-3) * first / np.float32(1 - 0.9**step) / root
    return {"e.w": weight.astype(half), "e.w.w_0": weight, "e.w.moment1_0": first, "e.w.moment2_0": second}


@pytest.mark.parametrize("what", ["drifted", "another expert"])
def test_ranks_that_drift_are_close_and_other_tensors_are_not(tmp_path, what):
    mine = drifted(1, (0, 1, 2, 3))
    other = drifted(1, (3, 1, 0, 2)) if what == "drifted" else drifted(2, (0, 1, 2, 3))
    distances = [replicas_module._difference(mine[key].ravel(), other[key].ravel())[1] for key in mine]

    def save(comm):
        fc.save_state_dict(other if comm.rank else mine, tmp_path, comm, check_replicas="close")
        return True

    if what == "drifted":
        assert 0 < max(distances) < replicas_module.CLOSE_PART / 4
        assert SimulatedWorld(2).run(save) == [True] * 2
        return
    first, second = SimulatedWorld(2).run_all(save)
    assert isinstance(first, fc.ValidationError)
    assert str(first) == str(second)
    assert "replicas of one shard are not close, and those of its states (key 'e.w')" in str(first)
    assert not list(tmp_path.glob("*.manifest")) and not list(tmp_path.glob("*.distcp"))


@pytest.mark.parametrize(
    ("kind", "apart", "is_close"),
    [
        ("int64", 1, False),
        ("bool", 1, False),
        ("float64", 0.05, True),
        ("complex64", 0.05j, True),
        ("complex64", 0.5j, False),
        ("float32", 0.0625, True),
        ("float32", 0.0626, False),
        ("float8_e4m3fn", 0.125, True),
        ("bfloat16", 0.25, False),
    ],
)
@pytest.mark.parametrize("call", ["save", "reshard"])
def test_how_far_apart_is_close_follows_from_the_dtype(tmp_path, kind, apart, is_close, call):
    def run(comm):
        values = np.zeros(5, dtype_of(kind).numpy)
        values[4] = 1
        values[1] = comm.rank * apart
        if call == "save":
            fc.save_state_dict({"w": values}, tmp_path, comm, check_replicas="close")
        else:
            fc.reshard_sharded_state_dict({"w": values}, {"w": np.empty_like(values)}, comm, check_replicas="close")
        return True

    outcomes = SimulatedWorld(2).run_all(run)
    assert outcomes == [True] * 2 or not is_close
    assert all("differences of at most" in str(outcome) for outcome in outcomes) or is_close


def test_no_tensor_is_left_unmeasured_beside_large_ones(tmp_path, monkeypatch):
    """However little is measured of each: another expert shows."""
    monkeypatch.setattr(replicas_module, "MEASURED_BYTES", 400)

    def save(comm):
        state = {f"{i}": np.ones((50, 7), np.float32) * (-1 if i == 29 and comm.rank else 1) for i in range(30)}
        for i in range(29):
            state[f"{i}"][0, 0] += comm.rank / 100
        fc.save_state_dict(state, tmp_path, comm, check_replicas="close")

    for outcome in SimulatedWorld(2).run_all(save):
        assert "not close (key '29'" in str(outcome)


def test_what_is_not_close_may_be_one_ranks_if_it_is_said(tmp_path):
    def save(comm):
        state = {"a": np.full(4, comm.rank, np.float32), "b": np.ones(3, np.float32)}
        with provoked("saving/replica_checks.py", "only if they are one tensor and one rank's values will do, pass"):
            fc.save_state_dict(state, tmp_path, comm, check_replicas="close")
        fc.save_state_dict(state, tmp_path, comm, check_replicas={"a": "first"})
        del state["a"]
        state[f"a.{comm.rank}"] = np.full(4, comm.rank, np.float32)  # a name of its own: it is a tensor of its own
        fc.save_state_dict(state, tmp_path / "own", comm, check_replicas="close")

    SimulatedWorld(2).run(save)
    assert load(tmp_path, {"a": (4,)})["a"].tolist() == [0] * 4
    assert {key: value.tolist() for key, value in load(tmp_path / "own", {"a.0": (4,), "a.1": (4,)}).items()} == {
        "a.0": [0] * 4,
        "a.1": [1] * 4,
    }


def test_more_than_is_measured_is_said_to_be_more(tmp_path, monkeypatch):
    monkeypatch.setattr(replicas_module, "MEASURED_BYTES", 400)

    def save(comm):
        state = {"small": np.full(10, 32 + comm.rank, np.float32), "w": np.arange(1000, dtype=np.float32)}
        state["w"] *= 1 + comm.rank / 32
        return fc.save_state_dict(state, tmp_path, comm, check_replicas="close").replicas

    whose = "rank 0's values count"
    expected = {"small": f"differ by at most 1; {whose}", "w": f"differ by at least 2.78; {whose}"}
    assert SimulatedWorld(2).run(save) == [expected] * 2


@pytest.mark.parametrize("bad", ["mean", 3, ["equal"], {"w": "any"}, {3: "equal"}, None])
def test_what_is_no_policy_is_said(tmp_path, bad):
    def save(comm):
        fc.save_state_dict({"w": np.zeros(3, np.float32)}, tmp_path, comm, check_replicas=bad)

    for outcome in SimulatedWorld(2).run_all(save):
        assert isinstance(outcome, fc.ValidationError)
        assert "check_replicas has " in str(outcome)
        assert "Remedy (FC101): give 'equal', 'all', 'close' or 'first'" in str(outcome)


def test_extra_state_is_never_only_close(tmp_path):
    def save(comm):
        state = {"w": np.zeros(3, np.float32), "extra_state.common": np.full(4, comm.rank, np.uint8)}
        with pytest.raises(fc.ValidationError, match="ranks differ in the run's extra state .key 'extra_state.common"):
            fc.save_state_dict(state, tmp_path, comm, check_replicas="close")

    SimulatedWorld(2).run(save)


def test_a_reshard_from_replicas_that_differ_changes_nothing():
    def move(comm):
        target = np.full(600_000, -1, dtype=np.float32)
        source = replicated(held_by(comm, odd=3))
        with pytest.raises(fc.ValidationError, match="replicas of one shard differ"):
            fc.reshard_sharded_state_dict(source, replicated(target), comm)
        assert (target == -1).all()
        for policy in (False, "first", "close"):
            target[...] = -1
            report = fc.reshard_sharded_state_dict(source, replicated(target), comm, check_replicas=policy)
            assert np.array_equal(target, held_by(comm, odd=None))
            assert [text[:9] for text in report.replicas.values()] == (
                [] if policy is False else ["differ by" if policy == "close" else "differ; r"]
            )
        return True

    assert SimulatedWorld(4).run(move) == [True] * 4


def test_the_check_costs_no_collective_of_its_own(tmp_path):
    def count(comm):
        fc.save_state_dict(replicated(held_by(comm, odd=None)), tmp_path, comm)
        saved = comm.collectives
        fc.reshard_sharded_state_dict(
            replicated(held_by(comm, odd=None)), replicated(np.zeros(600_000, np.float32)), comm
        )
        return saved, comm.collectives - saved

    assert SimulatedWorld(3).run(count) == [(3, 4)] * 3


def test_ranks_that_disagree_about_the_check_are_told_so(tmp_path):
    def save(comm):
        fc.save_state_dict(replicated(held_by(comm, odd=None)), tmp_path, comm, check_replicas=comm.rank == 0)

    for outcome in SimulatedWorld(2).run_all(save):
        assert isinstance(outcome, fc.ValidationError)
        assert "ranks disagree" in str(outcome)


def test_a_reshard_gives_one_ranks_statistics_to_all():
    def move(comm):
        source, target = of_rank(comm, _mean="first", _variance="first"), of_rank(comm)
        for key in ("bn.weight", "bn.weight.moment1_0"):
            source[key].local_tensor[...] = 5
        report = fc.reshard_sharded_state_dict(source, target, comm)
        assert report.replicas == dict.fromkeys(("bn._mean", "bn._variance"), "differ; rank 0's values count")
        return [sorted(set(weight.local_tensor.reshape(-1).tolist())) for weight in target.values()]

    assert SimulatedWorld(3).run(move) == [[[0], [0], [5], [5]]] * 3


@pytest.mark.parametrize("step", [4, 9])
def test_extra_state_that_differs_is_told_as_such(tmp_path, step):
    """Also where its text has another length."""

    def save(comm):
        with provoked("catalog/table.py", "give the same step, schedule, scaler and values of your own") as caught:
            fc.save_state_dict(collect_extra_state(step=step + comm.rank, rng=False), tmp_path, comm)
        assert "ranks differ in the run's extra state (key 'extra_state.common'" in str(caught.value)
        assert "(FC108)" in str(caught.value) and "shard" not in str(caught.value)
        fc.save_state_dict(collect_extra_state(step=step, rng=False), tmp_path, comm)

    SimulatedWorld(2).run(save)


def test_optimizer_states_that_differ_are_told_as_such(tmp_path):
    def save(comm):
        state = {"w": np.ones(3, np.float32), "w.moment1_0": np.full(3, comm.rank, np.float32)}
        with provoked("saving/replica_checks.py", "to go on from one rank's states, pass check_replicas=") as caught:
            fc.save_state_dict(state, tmp_path, comm)
        text = str(caught.value)
        assert "ranks differ in the optimizer's states (key 'w.moment1_0', rank " in text
        assert "average the gradients over all ranks that hold the parameter" in text and "shard_weight" not in text
        fc.save_state_dict(state, tmp_path, comm, check_replicas={"w.moment1_0": "first"})

    SimulatedWorld(2).run(save)
    assert not load(tmp_path, {"w.moment1_0": (3,)})["w.moment1_0"].any()


@pytest.mark.parametrize("stepped", [False, True])
def test_many_keys_with_one_cause_are_one_problem(tmp_path, stepped):
    """Parameters come first, with their states; the seed of first weights is the first cause while states agree."""
    names = [f"{layer}.w" for layer in range(60)]

    def save(comm, **options):
        state = {f"{name}.moment1_0": np.full(3, comm.rank * stepped, np.float32) for name in names}
        state |= {name: np.full(3, comm.rank, np.float32) for name in names}
        state["alone.moment1_0"] = np.full(3, comm.rank, np.float32)
        return fc.save_state_dict({**state, "alone": np.ones(3, np.float32)}, tmp_path, comm, **options)

    def refused(comm):
        with pytest.raises(fc.ValidationError) as caught:
            save(comm)
        lines = str(caught.value).splitlines()
        assert len(lines) == 3 and "2 problems" in lines[0]
        assert f"replicas of one shard differ{', and those of its states' * stepped} (key '0.w', rank" in lines[1]
        assert "others, and the like for 59 more keys: '1.w', '2.w', " in lines[1] and lines[1].count("seed") == 1
        assert f"'first'{', ' * stepped}" in lines[1] and ("'0.w.*': 'first'" in lines[1]) == stepped
        assert "likewise for the other keys" in lines[1]
        assert "ranks differ in the optimizer's states (key 'alone.moment1_0'" in lines[2]
        save(comm, check_replicas={"*.w": "first", "*.moment1_0": "first"})

    SimulatedWorld(2).run(refused)


@pytest.mark.parametrize("stepped", [False, True])
def test_the_likeliest_cause_comes_first(tmp_path, stepped):
    def save(comm):
        state = {"w": np.full(3, comm.rank), "w.moment1_0": np.full(3, comm.rank * stepped)}
        with pytest.raises(fc.ValidationError, match=r"Remedy \(FC106\): if ") as caught:
            fc.save_state_dict(state, tmp_path, comm)
        assert ("(FC106): if they differ before the first step, call paddle.seed()" in str(caught.value)) != stepped

    SimulatedWorld(2).run(save)


def test_replicas_that_are_parts_are_described_as_parts(tmp_path):
    """One rank's half would be saved as the whole, if one rank's values counted."""
    group = [types.SimpleNamespace(rank=rank, nranks=2) for rank in range(2)]

    def save(comm):
        half = np.full((2, 3), comm.rank, np.float32)
        with provoked("saving/replica_checks.py", "or 'close' to be told how far apart they are") as caught:
            fc.save_state_dict({"w": half}, tmp_path, comm)
        assert "describe it by shard_weight(key, tensor, axis, group)" in str(caught.value)
        assert "call paddle.seed() with one number on every rank before the model is made" in str(caught.value)
        assert "; if they have drifted apart, make them equal again; only if" in str(caught.value)
        fc.save_state_dict({"w": shard_weight("w", half, 0, group[comm.rank])}, tmp_path, comm)
        own = {f"w.{comm.rank}": half}
        fc.save_state_dict(own, tmp_path / "own", comm)
        fc.save_state_dict({"w": half * 0}, tmp_path / "in step", comm)
        fc.save_state_dict({"w": half}, tmp_path / "first", comm, check_replicas={"w": "first"})

    SimulatedWorld(2).run(save)
    assert load(tmp_path, {"w": (4, 3)})["w"][:, 0].tolist() == [0, 0, 1, 1]
    assert load(tmp_path / "own", {"w.0": (2, 3), "w.1": (2, 3)})["w.1"].ravel().tolist() == [1] * 6
    for name in ("in step", "first"):
        assert load(tmp_path / name, {"w": (2, 3)})["w"].ravel().tolist() == [0] * 6
