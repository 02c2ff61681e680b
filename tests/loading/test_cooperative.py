"""Loads in which storage is read once for all ranks: the same bits as a direct load, at the price of each byte once."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, UnreadableCheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.planning import readers
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.loading.test_fused_degrees import layout
from tests.memory.test_orders import KEYS, natural, targets
from tests.native.samples import flip
from tests.ramdisk import memory_directory
from tests.saved import data_file, short

BLOCK = 1 << 20
# 16 blocks; three blocks and a bit; less than one.
SHAPES = {"large": (2048, 2048), "middle": (100, 8000), "small": (8, 12)}
WHOLE = {key: np.random.default_rng(len(key)).standard_normal(shape, dtype=np.float32) for key, shape in SHAPES.items()}
UNIQUE = sum(array.nbytes for array in WHOLE.values())


def shards(kind, rank, size, blank=False, keys=SHAPES):
    """A rank's part of all tensors: replicated, cut by rows, by columns, or in flat ranges."""
    made = {}
    for key in keys:
        whole = WHOLE[key]
        values, offset, flat = whole, (0, 0), None
        if kind in ("rows", "columns"):
            axis = ("rows", "columns").index(kind)
            values = np.split(whole, size, axis=axis)[rank]
            offset = tuple(rank * values.shape[a] if a == axis else 0 for a in (0, 1))
        elif kind == "flat":
            edges = [whole.size * r // size + (3 if 0 < r < size else 0) for r in range(size + 1)]
            flat = slice(edges[rank], edges[rank + 1])
            values = whole.reshape(-1)[flat]
        values = np.full_like(values, -7) if blank else values.copy()
        shape = whole.shape if flat else values.shape
        made[key] = ShardedWeight(key, values, shape, whole.shape, offset, flat is not None, flat)
    return made


def load(path, kind, size, method="cooperative", keys=SHAPES, **options):
    """Each rank's report, or its error; what was filled is compared with what was saved."""

    def job(comm):
        found = shards(kind, comm.position, size, True, keys)
        report = load_state_dict(found, path, comm, comm_method=method, **options)
        for key, shard in shards(kind, comm.position, size, False, keys).items():
            assert found[key].local_tensor.tobytes() == shard.local_tensor.tobytes(), key
        return report

    return SimulatedWorld(size).run_all(job)


def total(reports, name):
    return sum(getattr(report, name) for report in reports)


def save(path, kind, size, **options):
    SimulatedWorld(size).run(lambda comm: save_state_dict(shards(kind, comm.position, size), path, comm, **options))
    return path


@pytest.fixture(scope="module")
def saved():
    """By layout of the save, on two ranks."""
    with memory_directory() as path:
        yield {kind: save(path / kind, kind, 2) for kind in ("replicated", "rows", "flat")}


@pytest.mark.parametrize("verify", ["read", "full", "off"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("source", "target"),
    [("rows", "rows"), ("replicated", "replicated"), ("rows", "columns"), ("flat", "replicated"), ("rows", "flat")],
)
def test_storage_is_read_once_and_evenly_whatever_the_layouts(saved, source, target, size, verify):
    reports = load(saved[source], target, size, verify=verify)
    assert {(report.comm_method, report.comm_reason) for report in reports} == {("cooperative", "asked for")}
    assert total(reports, "bytes_read") == UNIQUE
    # Each block by the rank that reads it, and by nobody else.
    assert total(reports, "bytes_verified") == (0 if verify == "off" else UNIQUE)
    assert total(reports, "bytes_extra") == 0
    assert total(reports, "bytes_sent") == total(reports, "bytes_received")
    assert all(report.bytes_copied + report.bytes_received == report.bytes_needed for report in reports)
    # A block more or less is all that can be between them.
    read = [report.bytes_read for report in reports]
    assert max(read) - min(read) <= BLOCK
    assert "read once for all ranks (asked for)" in reports[0].summary()


def test_a_rank_reads_what_it_alone_wants_itself(saved):
    reports = load(saved["rows"], "rows", 2)
    # The cuts between blocks are not those between ranks.
    assert total(reports, "bytes_sent") <= BLOCK


def test_what_nobody_wants_is_not_read(saved):
    reports = load(saved["rows"], "replicated", 2, keys=["middle"])
    assert total(reports, "bytes_read") == WHOLE["middle"].nbytes

    def columns(comm):
        first = ShardedWeight("large", np.zeros((2048, 8), np.float32), (2048, 8), (2048, 2048), (0, 512 * comm.rank))
        report = load_state_dict({"large": first}, saved["rows"], comm, comm_method="cooperative")
        assert (first.local_tensor == WHOLE["large"][:, 512 * comm.rank :][:, :8]).all()
        return report

    assert total(SimulatedWorld(2).run(columns), "bytes_read") == 2 * 2048 * 8 * 4


def test_names_of_paddle_mean_cooperative_and_others_are_refused(saved):
    for name in ("send_recv", "broadcast", "multi_group_broadcast", "grouped_send_recv", "parallel_broadcast"):
        assert load(saved["rows"], "replicated", 2, name, ["small"])[0].comm_method == "cooperative"
    errors = load(saved["rows"], "replicated", 2, "read", ["small"])
    assert {type(error) for error in errors} == {ValidationError}
    assert "comm_method is 'auto', 'direct', 'cooperative', 'send_recv'" in str(errors[0])
    assert "got 'read'" in str(errors[1])


def test_ranks_that_ask_for_different_methods_have_one_error(saved):
    def job(comm):
        found = shards("replicated", comm.position, 2, True)
        try:
            load_state_dict(found, saved["rows"], comm, comm_method=("direct", "cooperative")[comm.position])
        finally:
            assert all((shard.local_tensor == -7).all() for shard in found.values())

    first, second = SimulatedWorld(2).run_all(job)
    assert isinstance(first, ValidationError) and str(first) == str(second)
    assert '"comm_method": "cooperative"' in str(first)


def test_statements_move_and_compute_as_in_a_direct_load(saved):
    def job(method):
        def on_rank(comm):
            turned = np.zeros((1024, 2048), np.float32)
            found = {
                "turned": ShardedWeight("turned", turned, (1024, 2048), (2048, 2048), (1024 * comm.rank, 0)),
                "middle": np.zeros(SHAPES["middle"], np.float32),
            }
            report = load_state_dict(
                found, saved["rows"], comm, comm_method=method, aoa_config={"aoa_statements": ["large^T -> turned"]}
            )
            assert report.comm_method == method
            assert (turned == WHOLE["large"].T[1024 * comm.rank :][:1024]).all()
            assert (found["middle"] == WHOLE["middle"]).all()
            return report

        return SimulatedWorld(2).run(on_rank)

    assert total(job("cooperative"), "bytes_read") == WHOLE["large"].nbytes + WHOLE["middle"].nbytes
    assert total(job("direct"), "bytes_read") == WHOLE["large"].nbytes + 2 * WHOLE["middle"].nbytes


def test_fused_parameters_are_put_right(tmp_path):
    def saving(comm):
        state = {key: weight for key, weight in layout(2, "", comm.rank).items() if key in KEYS}
        save_state_dict(state, tmp_path, comm)

    SimulatedWorld(2).run(saving)

    def job(comm):
        found = targets(1, 0, dist=True)
        report = load_state_dict(found, tmp_path, comm, comm_method="cooperative")
        return report.comm_method, all(np.array_equal(found[key].local_tensor, natural(key)) for key in found)

    assert SimulatedWorld(2).run(job) == [("cooperative", True)] * 2


def damage(path, copies):
    """Flips a bit in the middle of the first copies of the large tensor."""
    manifest = CheckpointDirectory(str(path)).read_manifest()
    catalog = manifest.catalog
    rows = [row for row in range(len(catalog)) if catalog.key_name(row) == "large"]
    for row in rows[:copies]:
        flip(path / catalog.file_name(row), int(catalog.byte_offset[row]) + 5 * BLOCK + 17)


@pytest.mark.parametrize("verify", ["read", "full"])
def test_a_damaged_block_is_read_from_a_replica_or_is_every_ranks_error(tmp_path, verify):
    save(tmp_path / "c", "replicated", 2, save_replicas=True)
    damage(tmp_path / "c", 1)
    reports = load(tmp_path / "c", "columns", 4, verify=verify)
    used = [report for report in reports if report.replicas_used]
    assert len(used) == 1
    assert "damaged" in used[0].replicas_used["large"]
    # The damaged block was read too.
    assert total(reports, "bytes_read") == UNIQUE + BLOCK
    assert total(reports, "bytes_extra") == BLOCK
    damage(tmp_path / "c", 2)  # which repairs the first
    damage(tmp_path / "c", 1)
    errors = load(tmp_path / "c", "columns", 4, verify=verify)
    assert {type(error) for error in errors} == {CorruptCheckpointError}, errors
    (text,) = {str(error) for error in errors}
    assert "nor can its replica be read" in text


def test_a_missing_file_is_every_ranks_error_before_a_target_is_touched(saved, tmp_path):
    shutil.copytree(saved["rows"], tmp_path / "c")
    (tmp_path / "c" / data_file(tmp_path / "c", 1)).unlink()

    def job(comm):
        found = shards("replicated", comm.position, 2, True)
        try:
            load_state_dict(found, tmp_path / "c", comm, comm_method="cooperative")
        finally:
            assert all((shard.local_tensor == -7).all() for shard in found.values())

    errors = SimulatedWorld(2).run_all(job)
    assert {type(error) for error in errors} == {CorruptCheckpointError}
    (text,) = {str(error) for error in errors}
    assert "1_0-1.safetensors is missing" in short(text)


def test_storage_that_fails_in_mid_exchange_is_every_ranks_error_of_its_kind(saved, monkeypatch):
    read = FileReader.read
    with monkeypatch.context() as patch:

        def failing(self, item, copy, target):
            if copy.size * 4 == BLOCK and copy.source_base > 0:
                raise OSError(5, "Input/output error")
            read(self, item, copy, target)

        patch.setattr(FileReader, "read", failing)
        errors = load(saved["rows"], "columns", 4)
    assert {type(error) for error in errors} == {UnreadableCheckpointError}, errors
    (text,) = {str(error) for error in errors}
    assert "Input/output error" in text
    assert total(load(saved["rows"], "columns", 4), "bytes_read") == UNIQUE


# -- what "auto" chooses ----------------------------------------------------------------------------------------------


@pytest.fixture
def remote(saved):
    """The same checkpoint on an object store."""
    pytest.importorskip("fsspec")
    store = open_storage("memory://cooperative/c")
    for file in sorted(saved["rows"].iterdir()):
        with store.create(file.name) as stream:
            stream.write(file.read_bytes())
    yield store
    import fsspec

    fsspec.filesystem("memory").rm("/cooperative", recursive=True)


def test_auto_reads_directly_from_file_systems_of_the_host_without_a_further_collective(saved):
    def job(comm):
        report = load_state_dict(shards("replicated", comm.position, 2, True), saved["rows"], comm)
        return report, comm.collectives

    for report, collectives in SimulatedWorld(2).run(job):
        assert (report.comm_method, collectives) == ("direct", 2)
        assert report.comm_reason.startswith("auto: the host keeps what one rank has read")
    (alone,) = load(saved["rows"], "replicated", 1)
    assert (alone.comm_method, alone.comm_reason) == ("direct", "there is one rank")


def test_auto_on_an_object_store_goes_by_the_bytes_that_ranks_would_fetch(remote):
    reports = load(remote, "replicated", 4, "auto")
    assert {report.comm_method for report in reports} == {"cooperative"}
    assert reports[0].comm_reason == f"auto: alone, ranks would fetch {4 * UNIQUE} bytes of {UNIQUE}"
    assert total(reports, "bytes_read") == UNIQUE
    # Nothing is wanted twice.
    assert {report.comm_method for report in load(remote, "rows", 4, "auto")} == {"direct"}
    # Each would fetch all blocks for its columns.
    assert {report.comm_method for report in load(remote, "columns", 4, "auto")} == {"cooperative"}


def test_what_is_read_of_an_object_store_is_announced_before(remote, monkeypatch):
    announced, read_ahead = [], FileReader.read_ahead

    def counting(self, items, begin, end):
        announced.append(int((end - begin).sum()))
        read_ahead(self, items, begin, end)

    monkeypatch.setattr(remote, "at_once", 4)
    monkeypatch.setattr(FileReader, "read_ahead", counting)
    reports = load(remote, "columns", 4)
    assert sorted(announced) == sorted(report.bytes_read for report in reports)
    assert sum(announced) == UNIQUE


def test_auto_reads_directly_where_values_are_computed(remote):
    config = {"aoa_statements": ["large -> large, dtype='int32'"]}

    def job(comm):
        found = {"large": np.zeros(SHAPES["large"], np.int32)}
        return load_state_dict(found, remote, comm, aoa_config=config, strict=False)

    reports = SimulatedWorld(4).run(job)
    assert reports[0].computed == ["large"]
    assert {report.comm_method for report in reports} == {"direct"}
    assert "values are computed" in reports[0].comm_reason


def test_ranks_whose_auto_sees_different_media_have_one_error(saved, remote):
    def job(comm):
        return load_state_dict(shards("replicated", comm.position, 2, True), (saved["rows"], remote)[comm.rank], comm)

    first, second = SimulatedWorld(2).run_all(job)
    assert isinstance(first, ValidationError) and str(first) == str(second)
    assert '"reads": "together"' in str(first)


def test_a_row_that_is_wanted_in_scattered_parts_is_read_in_these():
    """What is read of a row: all of its reach, or, where that would be more than is wanted, each part once."""

    def pieces(*rows):
        source, base, extents, strides = zip(*rows)
        columns = np.asarray(extents), np.asarray(base), np.asarray(strides)
        zero = np.zeros(len(rows), dtype=np.int64)
        return Pieces(np.asarray(source), zero, columns[0], columns[1], columns[2], zero, columns[2])

    reads = readers.reads_of_rows(
        [
            pieces((1, 0, (4, 2), (8, 1)), (0, 0, (4, 4), (8, 1))),
            pieces((0, 4, (4, 4), (8, 1)), (1, 0, (4, 2), (8, 1)), (1, 4, (4, 2), (8, 1))),
        ]
    )
    assert reads.source.tolist() == reads.target.tolist() == [0, 1, 1]
    assert reads.source_base.tolist() == reads.target_base.tolist() == [0, 0, 4]
    assert reads.extents.tolist() == [[1, 32], [4, 2], [4, 2]]
