"""Loads from manifests in partitions: what each rank reads and holds of them, and that nothing else is different."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.loading.direct_files import DirectFiles
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import partitions
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.partitions import partition_of
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.ramdisk import memory_directory
from tests.transfer.samples import cut, save, values_of

KINDS = {
    **{f"layers.{i}.weight": ("float32", (6, 4 + i % 3)) for i in range(24)},
    **{f"layers.{i}.weight.moment1_0": ("float32", (6, 4 + i % 3)) for i in range(24)},
    **{f"layers.{i}.bias": ("bfloat16", (5,)) for i in range(24)},
    "名前": ("int32", (2, 3, 4)),
    "extra_state.common": ("uint8", (9,)),
}
MODEL = {key: kind for key, kind in KINDS.items() if not key.startswith("extra_state")}
WORLD = 3


@pytest.fixture(scope="module")
def saves():
    """The same values, saved by three ranks with all rows in one file, and in partitions."""
    values = values_of(KINDS)
    with pytest.MonkeyPatch.context() as patch, memory_directory() as root:
        save(root / "one", values, WORLD)
        patch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 0)
        patch.setattr(partitions, "ROWS_PER_PARTITION", 5)
        save(root / "parted", values, WORLD)
        yield root, values


def stage(values, position, size):
    """A rank's tensors: those of its pipeline stage, each cut along its last axis by a neighbour in it."""
    stages = max(1, size // 2)
    mine = [key for i, key in enumerate(MODEL) if i % stages == position % stages]
    return cut({key: np.zeros_like(values[key]) for key in mine}, position // stages, size // stages)


def held(state) -> dict[str, bytes]:
    return {key: getattr(each, "local_tensor", each).tobytes() for key, each in state.items()}


def run(size, path, build, change=None, **options):
    """What each rank's load returns or raises, without times, and what its targets are then."""

    def job(comm):
        state = build(comm.position)
        if change is not None:
            change(comm.position, state)
        try:
            report = asdict(load_state_dict(state, path, comm, **options))
        except CheckpointError as error:
            return f"{type(error).__name__}: {str(error).replace(str(path), 'PATH')}", held(state)
        del report["seconds"], report["source"]
        return report, held(state)

    return SimulatedWorld(size).run(job)


@pytest.fixture
def seen(monkeypatch):
    """By rank: the names of files that are read whole, and the source of each load."""
    reads, sources, rank_of = {}, {}, {}
    read, opened, prepared = LocalBackend.read, DirectFiles.open, DirectFiles.prepare

    def open_(self):
        rank_of[threading.get_ident()] = self._comm.position
        return opened(self)

    def prepare(self, task):
        sources[self._comm.position] = self
        return prepared(self, task)

    def note(self, name, *arguments):
        reads.setdefault(rank_of.get(threading.get_ident()), []).append(name)
        return read(self, name, *arguments)

    monkeypatch.setattr(DirectFiles, "open", open_)
    monkeypatch.setattr(DirectFiles, "prepare", prepare)
    monkeypatch.setattr(LocalBackend, "read", note)
    return reads, sources


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_rank_reads_the_partitions_of_its_keys_and_holds_their_rows(saves, seen, size):
    """Besides these, a share of all partitions, of which it holds names alone."""
    root, values = saves
    reads, sources = seen
    manifest = CheckpointDirectory(root / "parted").read_manifest()
    count = len(manifest.partitions)
    reads.clear()
    outcomes = run(size, root / "parted", lambda position: stage(values, position, size))
    everything = Counter()
    for position, (report, after) in enumerate(outcomes):
        assert report["unexpected"] == report["missing"] == []
        stages = max(1, size // 2)
        mine = [key for i, key in enumerate(MODEL) if i % stages == position % stages]
        whole = cut({key: values[key] for key in mine}, position // stages, size // stages)
        assert after == held(whole)
        numbers = {*partition_of(mine, count).tolist(), *range(position, count, size)}
        expected = Counter({"0.manifest": 1, **{manifest.partitions[number].file: 1 for number in numbers}})
        assert Counter(reads[position]) == expected
        everything += expected
        catalog = sources[position].catalog
        rows = [row for row in range(len(manifest.catalog)) if manifest.catalog.key_name(row) in mine]
        assert sorted(catalog.keys) == sorted(mine)
        assert len(catalog) == len(rows) and (size < 4 or 2 * len(rows) < 3 * len(manifest.catalog) / 2)
        held_names = [name for names in sources[position]._names.values() for name in names]
        assert len(held_names) == sum(manifest.partitions[number].keys for number in range(position, count, size))
    assert {each.file for each in manifest.partitions} < {*everything}
    assert len({*everything}) == count + 1 and count > 12


@pytest.mark.parametrize("size", [4, 8])
def test_a_rank_of_few_keys_reads_few_partitions_whatever_the_checkpoint_has(tmp_path, monkeypatch, seen, size):
    """Twice as many keys, for twice as many ranks: each reads as much as before, but for chance."""
    reads, _ = seen
    monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 0)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 8)
    values = {f"k{i}": np.full(3, i, np.float32) for i in range(32 * size)}
    save(tmp_path, values, 1)
    reads.clear()
    few = {position: [f"k{i}" for i in range(position, len(values), size)][:6] for position in range(size)}
    build = lambda position: {key: np.zeros(3, np.float32) for key in few[position]}  # noqa: E731
    for position, (report, after) in enumerate(run(size, tmp_path, build, strict="missing")):
        assert after == {key: values[key].tobytes() for key in few[position]}
        assert report["unexpected"] == sorted({*values} - {key for keys in few.values() for key in keys})
        # Six of its keys, and as many partitions as each answers for.
        assert len(reads[position]) <= 1 + 6 + 4


def missing(position, state):
    state["nowhere.weight"] = np.zeros(3, np.float32)


def missing_on_the_last(position, state):
    if position == 1:
        missing(position, state)


def of_another_shape(position, state):
    key = next(iter(state))
    state[key] = np.zeros((4, 99), np.float32)


def of_another_dtype(position, state):
    state["名前"] = np.zeros((2, 3, 4), np.int16)


def alias(position, state):
    state["tied"] = ShardedWeight("tied", np.zeros(5), (5,), (5,), (0,), aliases=("layers.0.bias",))
    state["tied"].local_tensor = state["tied"].local_tensor.astype(state["layers.0.bias"].dtype)
    del state["layers.0.bias"]


def prefixed(position, state):
    state["model.layers.1.bias"] = state.pop("layers.1.bias")


def weights_alone(position, state):
    for key in [key for key in state if "moment" in key]:
        del state[key]


def nothing_on_the_last(position, state):
    if position == 1:
        state.clear()


def with_extra_state(position, state):
    state["extra_state.common"] = np.zeros(9, np.uint8)


AOA = {"aoa_statements": ["layers.$LAYER_ID.weight -> layers.$LAYER_ID.weight, scale=2.0"]}
CASES = [
    (None, {}),
    (None, {"strict": True}),
    (missing, {}),
    (missing, {"strict": False}),
    (missing_on_the_last, {}),
    (missing_on_the_last, {"strict": False}),
    (of_another_shape, {}),
    (of_another_dtype, {}),
    (of_another_dtype, {"dtype": "cast"}),
    (alias, {}),
    (alias, {"tied_names": False}),
    (prefixed, {}),
    (prefixed, {"mw_name_compatibility": False}),
    (weights_alone, {}),
    (weights_alone, {"optimizer_states": "ignore"}),
    (weights_alone, {"optimizer_states": "ignore", "strict": True}),
    (weights_alone, {"optimizer_states": "ignore", "strict": "unexpected"}),
    (nothing_on_the_last, {"optimizer_states": "ignore"}),
    (with_extra_state, {"strict": True}),
    (None, {"master_weights": "convert"}),
    (None, {"aoa_config": AOA}),
    (weights_alone, {"aoa_config": AOA, "optimizer_states": "ignore"}),
    (None, {"comm_method": "cooperative"}),
    (None, {"storage": "per_node"}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_outcomes_are_those_of_a_manifest_in_one_file(saves, number):
    """Bits, reports and texts, on one rank and on two."""
    root, values = saves
    change, options = CASES[number]
    for size in (1, 2):
        build = lambda position, size=size: cut(  # noqa: E731
            {key: np.zeros_like(values[key]) for key in MODEL}, position, size
        )
        one, parted = (run(size, root / kind, build, change, **options) for kind in ("one", "parted"))
        for (said, after), (expected, bits) in zip(parted, one):
            assert after == bits
            if isinstance(expected, str):
                # Names of files have the token of the save.
                assert re.sub("[0-9a-f]{32}", "", said) == re.sub("[0-9a-f]{32}", "", expected)
            else:
                # Rows stand in another order: neighbours are not always read at once.
                assert {**said, "reads": 0} == {**expected, "reads": 0}
        assert len({said for said, _ in parted if isinstance(said, str)}) <= 1


@pytest.mark.parametrize("where", ["rows of both", "rows of one", "extra state"])
@pytest.mark.parametrize("kind", ["flipped", "missing"])
def test_damage_to_a_partition_is_the_same_error_on_every_rank(saves, tmp_path, kind, where):
    root, values = saves
    path = copied(root / "parted", tmp_path)
    manifest = CheckpointDirectory(path).read_manifest()
    of_last = {"名前": values["名前"]}
    of_all = {key: values[key] for key in list(MODEL)[:4]}
    key = {"rows of both": next(iter(of_all)), "rows of one": "名前", "extra state": "extra_state.common"}[where]
    number = int(partition_of([key], len(manifest.partitions))[0])
    file = path / manifest.partitions[number].file
    if kind == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)

    def build(position):
        kept = of_all if position < 3 else {**of_all, **of_last}
        return {key: np.zeros_like(value) for key, value in kept.items()}

    outcomes = run(4, path, build, strict="missing")
    assert len({said for said, _ in outcomes}) == 1
    said = outcomes[0][0]
    assert said.startswith(CorruptCheckpointError.__name__) and file.name in said
    assert ("is missing" in said) == (kind == "missing")
    for position, (_, after) in enumerate(outcomes):
        assert after == held(build(position))


def copied(source: Path, target: Path) -> Path:
    for each in source.iterdir():
        (target / each.name).write_bytes(each.read_bytes())
    return target


def test_ranks_that_load_different_checkpoints_are_told(saves):
    """One of them has partitions and the other has none."""
    root, values = saves

    def job(comm):
        state = cut({key: np.zeros_like(values[key]) for key in MODEL}, comm.position, 2)
        with pytest.raises(ValidationError, match="ranks disagree") as caught:
            load_state_dict(state, root / ("one" if comm.position else "parted"), comm)
        return str(caught.value), held(state)

    first, second = SimulatedWorld(2).run(job)
    assert first[0] == second[0]
    assert not any(map(any, [*first[1].values(), *second[1].values()]))


def test_a_model_that_is_cut_otherwise_is_put_right(tmp_path, monkeypatch):
    """Statements for a fused parameter are made of all names."""

    def build(position, size, fill):
        part = np.zeros((4, 16 // size), np.float32)
        if fill:
            part[...] = np.arange(16 // size) + 100 * position
        weight = ShardedWeight("w", part, part.shape, (4, 16), (0, 16 // size * position))
        weight.fused = FusedAxis(1, "fused_ffn")
        return {"w": weight, **{f"b{i}": np.full(3, i if fill else 0, np.float32) for i in range(9)}}

    def job(comm, path):
        found = []
        for _ in range(2):
            state, before = build(comm.position, 4, False), comm.collectives
            report = load_state_dict(state, path, comm)
            assert report.fused == {"w": "2 parts -> 4 parts"}
            found.append((comm.collectives - before, held(state)))
        return found

    found = {}
    for most, kind in ((10**6, "one"), (0, "parted")):
        monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", most)
        monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 2)
        path = tmp_path / kind
        SimulatedWorld(2).run(lambda comm, path=path: save_state_dict(build(comm.position, 2, True), path, comm))
        found[kind] = SimulatedWorld(4).run(lambda comm, path=path: job(comm, path))
    assert all([count for count, _ in each] == [2, 2] for each in found["one"])
    assert all([count for count, _ in each] == [4, 4] for each in found["parted"])
    for one, parted in zip(found["one"], found["parted"]):
        assert len({str(after) for _, after in (*one, *parted)}) == 1 and any(one[0][1]["w"])


@pytest.mark.parametrize("rows", [5, 10**6])
def test_more_ranks_than_partitions(tmp_path, monkeypatch, rows):
    """Some answer for none; and where all is in one partition, one rank answers for all."""
    monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 0)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", rows)
    values = {f"k{i}": np.full(3, i + 1, np.float32) for i in range(8)}
    save(tmp_path, values, 1)
    assert len(CheckpointDirectory(tmp_path).read_manifest().partitions) == (2 if rows == 5 else 1)
    for left in ([], ["k2", "k5"]):
        build = lambda position, left=left: {  # noqa: E731
            key: np.zeros(3, np.float32) for i, key in enumerate(values) if i % 4 == position and key not in left
        }
        for position, (report, after) in enumerate(run(4, tmp_path, build, strict="missing")):
            assert report["unexpected"] == left
            assert after == {key: values[key].tobytes() for key in build(position)}
