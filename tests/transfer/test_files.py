"""Files as a source: exactly what is needed is read, in which order rows are filled, and what each option does."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.catalog import CorruptCheckpointError, UnreadableCheckpointError, ValidationError
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.planning.matching import ShardMatcher
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.transfer import plan as plan_module
from paddle_flexckpt.transfer.agreement import Solo
from paddle_flexckpt.transfer.files import Files, plan_reads, read_pieces, reads_of
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.plan import plan_fill
from paddle_flexckpt.transfer.transfer import Transfer
from tests.native.samples import flip, whole
from tests.property.layouts import Shard, catalog_of
from tests.transfer.held import targets_of
from tests.transfer.samples import save

KINDS = {"w": ("float32", (6, 4)), "v": ("int64", (8,)), "u": ("float32", (6, 4))}


def values_of(start=0):
    return {key: np.arange(start, start + np.prod(shape)).astype(dtype).reshape(shape) for key, (dtype, shape)
            in KINDS.items()}  # fmt: skip


def load(path, targets, manifest=None, **options):
    asked = LoadOptions(**options)
    source = Files(str(path), asked, manifest)
    return Transfer(SoloCommunicator(), source, lambda: targets, asked, "load_state_dict", "cannot load").run()


def zeros(*keys, staged=()):
    return targets_of({key: np.zeros(KINDS[key][1], KINDS[key][0]) for key in keys}, staged=staged)


def data_file(path, key):
    """The first file that has a tensor's bytes, and where these begin."""
    catalog = CheckpointDirectory(str(path)).read_manifest().catalog
    row = int(np.argmax(catalog.key == catalog.keys.index(key)))
    return path / catalog.file_name(row), int(catalog.byte_offset[row])


def test_exactly_what_is_needed_is_read(tmp_path):
    values = values_of()
    save(tmp_path, values, unique_id=4)
    targets = zeros("v", "w", staged=[0, 1])
    report = load(tmp_path, targets)
    assert [array.tolist() for array in targets.memory.arrays] == [values[key].tolist() for key in "vw"]
    assert (report.source, report.unique_id, report.unexpected) == (str(tmp_path), 4, ["u"])
    assert report.bytes_needed == report.bytes_read == report.total_bytes == 8 * 8 + 24 * 4
    assert report.bytes_verified == report.bytes_read
    assert (report.bytes_extra, report.replicas_used, report.peak_scratch_bytes) == (0, {}, 0)
    assert report.reads > 0
    # Devices have done what was begun before anything is touched; each copy goes back before the next is made.
    assert targets.memory.events == [
        "wait", ("open", 0, True), ("store", 0), ("open", 1, True), ("store", 1), ("finish", []),
    ]  # fmt: skip


def test_a_part_is_read_alone_and_verified_with_its_block(tmp_path):
    values = values_of()
    save(tmp_path, values, world=1)
    for verify, extra, verified in (("read", 0, 24 * 4), ("full", 24 * 4 - 48, 24 * 4), ("off", 0, 0)):
        target = np.zeros((3, 4), np.float32)
        report = load(tmp_path, targets_of({"w": target}, parts={"w": ((6, 4), (2, 0))}), verify=verify)
        assert target.tolist() == values["w"][2:5].tolist()
        assert (report.bytes_needed, report.bytes_read, report.bytes_extra) == (48, 48 + extra, extra)
        assert report.bytes_verified == verified


def test_ranks_compare_which_checkpoint_they_read(tmp_path):
    save(tmp_path, values_of())
    source = Files(str(tmp_path), LoadOptions())
    with source.closing:
        said = source.open()
    token = CheckpointDirectory(str(tmp_path)).read_manifest().save_token
    assert said == {"checkpoint": f"id 0 ({token})", "reads": "directly"}
    assert (source.between_ranks, source.path) == (False, str(tmp_path))


def test_the_id_that_is_asked_for_is_read(tmp_path):
    for unique_id in (0, 1):
        save(tmp_path, values_of(100 * unique_id), unique_id=unique_id)
    for unique_id, first in ((None, 100), (1, 100), (0, 0)):
        targets = zeros("v")
        assert load(tmp_path, targets, unique_id=unique_id).unique_id == (1 if unique_id is None else unique_id)
        assert targets.memory.arrays[0][0] == first


def test_the_checkpoint_is_held_until_the_load_ends(tmp_path):
    save(tmp_path, values_of())
    locks, held, before = open_backend(tmp_path).locks, [], os.listdir("/proc/self/fd")

    def is_free():
        claim = locks.claim("0.manifest")
        held.append(claim is None)
        if claim is not None:
            claim.release()

    targets = zeros("v")
    targets.memory.wait = is_free
    load(tmp_path, targets)
    is_free()
    assert held == [True, False]
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("options", [{"verify": "often"}, {"verify": None}])
def test_an_option_that_cannot_be_is_refused_before_anything_is_opened(tmp_path, options):
    with pytest.raises(ValidationError, match="verify"):
        Files(str(tmp_path / "nowhere"), LoadOptions(**options)).open()


def test_a_manifest_that_the_caller_keeps_is_not_read_again(tmp_path):
    save(tmp_path, values_of())
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    (tmp_path / "0.manifest").unlink()
    targets, options = zeros("v"), LoadOptions()
    source = Files(str(tmp_path), options, manifest)
    report = Transfer(SoloCommunicator(), source, lambda: targets, options, "load_state_dict", "cannot load").run()
    assert targets.memory.arrays[0].tolist() == values_of()["v"].tolist()
    assert (report.unique_id, report.source, source.catalog) == (0, str(tmp_path), manifest.catalog)


@pytest.mark.parametrize("given", [{}, {"reason": "there is one rank"}])
def test_the_report_says_how_files_are_read_and_why(tmp_path, given):
    save(tmp_path, values_of())
    source, options = Files(str(tmp_path), LoadOptions(), **given), LoadOptions()
    report = Transfer(SoloCommunicator(), source, lambda: zeros("v"), options).run()
    assert (report.comm_method, report.comm_reason) == ("direct", given.get("reason", ""))
    assert (source.directory.path, source.manifest.unique_id) == (str(tmp_path), 0)


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged(path, replicas):
    save(path, values_of(), world=1, replicas=replicas, save_replicas=replicas > 1)
    file, begin = data_file(path, "v")
    flip(file, begin)
    return file


def test_damage_is_an_error_unless_nothing_is_compared(tmp_path):
    file = damaged(tmp_path, 1)
    with pytest.raises(CorruptCheckpointError, match="'v'") as caught:
        load(tmp_path, zeros("v"))
    assert str(file) in str(caught.value)
    targets = zeros("v")
    report = load(tmp_path, targets, verify="off")
    assert (report.bytes_verified, targets.memory.arrays[0][0]) == (0, 1)


def test_a_replica_serves_where_it_may(tmp_path):
    damaged(tmp_path, 2)
    targets = zeros("v")
    report = load(tmp_path, targets)
    assert targets.memory.arrays[0].tolist() == values_of()["v"].tolist()
    assert list(report.replicas_used) == ["v"]
    assert report.bytes_read == 2 * report.bytes_needed == 128
    assert report.bytes_extra == 64
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path, zeros("v"), use_replicas=False)


def test_a_file_that_is_not_as_it_was_is_found_before_a_target_is_touched(tmp_path):
    save(tmp_path, values_of(), world=1)
    file, _ = data_file(tmp_path, "w")
    os.truncate(file, file.stat().st_size - 1)
    targets = zeros("w")
    with pytest.raises(CorruptCheckpointError, match=file.name):
        load(tmp_path, targets)
    assert targets.memory.events == []


def loop(path):
    """A link that leads to itself."""
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("what", ["manifest", "file", "bytes"])
def test_what_the_medium_refuses_is_told_with_the_path(tmp_path, monkeypatch, what):
    save(tmp_path, values_of(), world=1)
    if what == "manifest":
        loop(tmp_path / "0.manifest")
    elif what == "file":
        loop(data_file(tmp_path, "w")[0])
    else:
        preadv = os.preadv

        def failing(descriptor, buffers, offset):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors") and touched():
                raise OSError(5, "Input/output error")
            return preadv(descriptor, buffers, offset)

        def touched():
            return bool(targets.memory.events)

        monkeypatch.setattr(os, "preadv", failing)
    targets = zeros("w")
    with pytest.raises(UnreadableCheckpointError) as caught:
        load(tmp_path, targets)
    assert str(caught.value).startswith(f"cannot load: [rank 0] {tmp_path} cannot be read: OSError: ")
    assert targets.memory.events == ([] if what != "bytes" else ["wait", ("open", 0, True)])


def test_of_a_checkpoint_that_the_caller_keeps_nothing_is_looked_up(tmp_path):
    save(tmp_path, values_of())
    manifest = CheckpointDirectory(str(tmp_path)).read_manifest()
    (tmp_path / "0.manifest").unlink()
    targets = zeros("v")
    report = load(tmp_path, targets, manifest=manifest)
    assert (report.unique_id, targets.memory.arrays[0].tolist()) == (0, values_of()["v"].tolist())


def test_options_are_checked_before_anything_is_looked_for(tmp_path):
    with pytest.raises(ValidationError, match="verify"):
        load(tmp_path / "nowhere", zeros("v"), verify="never")


@pytest.mark.parametrize("what", ["manifest", "file"])
def test_what_the_medium_refuses_stays_what_it_is_where_that_is_asked_for(tmp_path, what):
    save(tmp_path, values_of(), world=1)
    loop(tmp_path / "0.manifest" if what == "manifest" else data_file(tmp_path, "w")[0])
    source, options = Files(str(tmp_path), LoadOptions(), plain_errors=True), LoadOptions()
    with pytest.raises(OSError) as caught:
        Transfer(Solo(), source, lambda: zeros("w"), options, "load_state_dict", "cannot load").run()
    assert type(caught.value) is OSError


# -- one target after the other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("statements", [None, {"aoa_statements": ["w, u -> t, sum"]}])
def test_each_target_is_whole_before_the_next_is_begun(tmp_path, monkeypatch, statements):
    """What a target is computed from is read after it is begun, and gone before the next."""
    monkeypatch.setattr(plan_module, "TILE_ELEMENTS", 8)
    values = values_of()
    save(tmp_path, values, world=3)
    targets = targets_of({
        **({"t": np.zeros((6, 4), np.float32)} if statements else {"w": np.zeros((6, 4), np.float32)}),
        "v": np.zeros(8, np.int64), "none": np.zeros(0, np.float32),
    })  # fmt: skip
    memory, expected = targets.memory, [values["w"] + values["u"] if statements else values["w"], values["v"]]
    memory.one_at_a_time = True
    found = []
    memory.filled = lambda row: found.append((row, [array.tolist() for array in memory.arrays[:2]]))
    report = load(tmp_path, targets, aoa_config=statements, strict=False)
    first, second = (array.tolist() for array in expected)
    assert found == [(0, [first, [0] * 8]), (1, [first, second])]
    assert memory.events == ["wait", ("open", 0, True), ("store", 0), ("open", 1, True), ("store", 1),
                             ("finish", ["none"])]  # fmt: skip
    assert report.bytes_needed == report.bytes_read == (2 if statements else 1) * 96 + 64
    assert report.peak_scratch_bytes == (2 * 8 * 4 if statements else 0)


def test_who_fills_takes_each_target_when_it_is_whole(tmp_path):
    values = values_of()
    save(tmp_path, values)
    targets, options = zeros("v", "w", "u"), LoadOptions()
    targets.memory.one_at_a_time = True
    source = Files(str(tmp_path), options)
    with source.closing:
        task = Transfer(SoloCommunicator(), source, lambda: targets, options, "load_state_dict", "cannot").prepare()
        assert targets.memory.events == []
        rows = source.fill(task)
        assert next(rows) == 0
        # As many bytes have been read as it has.
        assert source.reader.count.bytes_read == 64
        assert [array.any() for array in targets.memory.arrays] == [True, False, False]
        assert next(rows) == 1
        assert [array.any() for array in targets.memory.arrays] == [True, True, False]
        assert list(rows) == [2]
    assert [array.tolist() for array in targets.memory.arrays] == [values[key].tolist() for key in "vwu"]


def test_targets_that_are_filled_together_are_not_told_one_by_one(tmp_path):
    save(tmp_path, values_of())
    targets, told = zeros("v", "w"), []
    targets.memory.filled = told.append
    load(tmp_path, targets)
    assert told == []


def test_a_target_without_elements_is_filled_in_its_turn(tmp_path):
    save(tmp_path, {"a": np.ones(2, np.float32), "b": np.ones((0, 3), np.float32), "c": np.ones(1, np.float32)})
    targets = targets_of({key: np.zeros(shape, np.float32) for key, shape in (("b", (0, 3)), ("c", 1), ("a", 2))})
    targets.memory.one_at_a_time, found = True, []
    targets.memory.filled = lambda row: found.append((row, targets.memory.arrays[row].tolist()))
    load(tmp_path, targets)
    assert found == [(0, []), (1, [1]), (2, [1, 1])]


# -- computed values ---------------------------------------------------------------------------------------------------


def test_what_is_made_of_nothing_is_made(tmp_path):
    save(tmp_path, values_of())
    targets = targets_of({"c": np.zeros(5, np.float32)})
    report = load(tmp_path, targets, aoa_config={"aoa_statements": ["_ -> c, fill=2"]})
    assert (targets.memory.arrays[0].tolist(), report.bytes_read, report.computed) == ([2] * 5, 0, ["c"])


def test_tiles_are_computed_while_the_rest_is_read(tmp_path, monkeypatch):
    """A tile of six rows takes two, and its two operands are gone before the next tile's are read."""
    monkeypatch.setattr(plan_module, "TILE_ELEMENTS", 8)
    values = values_of()
    save(tmp_path, values)
    targets = targets_of({"t": np.zeros((6, 4), np.float32)})
    statements = {"aoa_statements": ["w, u -> t, sum"]}
    report = load(tmp_path, targets, aoa_config=statements)
    assert targets.memory.arrays[0].tolist() == (values["w"] + values["u"]).tolist()
    assert report.peak_scratch_bytes == 2 * 8 * 4
    assert (report.bytes_needed, report.computed) == (192, ["t"])


# -- plans of reads ----------------------------------------------------------------------------------------------------


def test_reads_are_in_the_order_in_which_rows_are_filled():
    source = catalog_of([whole("a", "int8", (4,)), Shard("b", "int8", (4,), (0,), (1,), None, 0),
                         Shard("b", "int8", (4,), (1,), (3,), None, 0)])  # fmt: skip
    target = catalog_of([whole("a", "int8", (4,)), whole("c", "int8", (4,)), whole("b", "int8", (4,))])
    plan = plan_fill(target, np.asarray([2, 0]), None)
    reads = plan_reads(ShardMatcher(source), plan, None)
    assert reads.pieces.target.tolist() == [2, 2, 0]
    assert reads.pieces.source.tolist() == [1, 2, 0]
    assert reads.needed_bytes == 8


def test_what_would_not_be_filled_is_listed():
    source = catalog_of([Shard("a", "int8", (4,), (0,), (3,), None, 0), Shard("b", "int8", (4,), (2,), (2,), None, 0)])
    plan = plan_fill(catalog_of([whole(key, "int8", (4,)) for key in "ab"]), np.asarray([1, 0]), None)
    with pytest.raises(ValidationError, match="2 problems") as caught:
        plan_reads(ShardMatcher(source), plan, None)
    assert [problem.key for problem in caught.value.problems] == ["b", "a"]


def test_what_statements_move_or_compute_is_filled():
    source = catalog_of([whole("a", "float32", (4,))])
    target = catalog_of([whole("t", "float32", (6,)), whole("a2", "float32", (4,))])
    statements = {"aoa_statements": ['a -> t, resize="auto", fill="keep"', "a -> a2, scale=2.0"]}
    mapping = compile_program(statements, source, target)
    plan = plan_fill(target, np.arange(2), mapping)
    reads = plan_reads(ShardMatcher(source), plan, mapping)
    assert reads.pieces.target.tolist() == [0, 2]
    assert reads.needed_bytes == 32


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader:
    def __init__(self, log, catalog):
        self.log, self.catalog = log, catalog

    def read(self, item, copy, target):
        self.log.append(("read", item, copy.size, target))

    def read_stretches(self, stretches):
        self.log.append(("columns", stretches.item.tolist(), stretches.address.tolist()))


class Rows:
    """Each has to be opened unless its address is given, and tiles are due before each, or before ``edges``."""

    def __init__(self, log, catalog, addresses, edges):
        self.log, self.catalog, self.addresses, self.edges = log, catalog, addresses, edges
        self.on_device = np.zeros(len(addresses), dtype=bool)

    def portions(self, rows):
        edges = range(len(rows) + 1) if self.edges is None else self.edges
        return list(zip(edges[:-1], edges[1:]))

    def host_storage(self, row):
        return f"memory of {row}"

    def advance(self, row):
        self.log.append(("advance", row))

    def piece_done(self, row):
        self.log.append(("done", row))

    def pieces_done(self, rows):
        if len(rows):
            self.log.append(("all done", rows.tolist()))


def read(computes, addresses=(-1, -1, -1), edges=None):
    source = catalog_of([whole(key, "int8", (count,)) for key, count in (("a", 1), ("b", 2), ("c", 3))])
    plan = plan_fill(source, np.asarray([1, 2, 0]), None)
    log = []
    pieces = plan_reads(ShardMatcher(source), plan, None).pieces
    read_pieces(Reader(log, source), pieces, Rows(log, source, np.asarray(addresses), edges), computes)
    return log


A, B, C = (("read", row, row + 1, f"memory of {row}") for row in range(3))


def test_a_piece_is_done_when_it_is_read():
    assert read(False) == [B, ("done", 1), C, ("done", 2), A, ("done", 0)]


def test_what_is_computed_from_is_read_before():
    assert read(True) == [
        ("advance", 1), B, ("done", 1), ("advance", 2), C, ("done", 2), ("advance", 0), A, ("done", 0),
    ]  # fmt: skip


def test_targets_that_stand_still_are_read_in_columns():
    """The pieces are of rows 1, 2 and 0; tiles may be due before the last."""
    done = {row: ("done", row) for row in range(3)}
    for computes, before in ((False, [[], []]), (True, [[("advance", 1)], [("advance", 0)]])):
        first, second = before
        assert read(computes, [500, 600, 700], [0, 2, 3]) == [
            *first, ("columns", [1, 2], [600, 700]), ("all done", [1, 2]),
            *second, ("columns", [0], [500]), ("all done", [0]),
        ]  # fmt: skip
        assert read(computes, [-1, -1, 700], [0, 2, 3]) == [
            *first, ("columns", [2], [700]), ("all done", [2]), B, done[1], *second, A, done[0],
        ]  # fmt: skip


def test_where_nothing_is_read_no_tile_is_due():
    source = catalog_of([whole("a", "int8", (1,))])
    log, plan = [], plan_fill(source, np.zeros(0, np.int64), None)
    pieces = plan_reads(ShardMatcher(source), plan, None).pieces
    read_pieces(Reader(log, source), pieces, Rows(log, source, np.asarray([-1]), [0, 0]), True)
    assert log == []


@pytest.mark.parametrize("verify", ["read", "full", "off"])
def test_what_stands_still_is_not_opened(tmp_path, verify):
    values = {**values_of(), "whole": np.arange(6, dtype=np.float32)}
    save(tmp_path, values)
    targets = targets_of({"w": np.zeros((3, 4), np.float32), "v": np.zeros(8, np.int64), "whole": np.zeros(6)},
                         parts={"w": ((6, 4), (1, 0))}, staged=[1])  # fmt: skip
    memory = targets.memory
    starts = targets.spans[:, 0]
    memory.known = np.where([True, False, True], starts, -1)
    report = load(tmp_path, targets, verify=verify, dtype="cast")
    expected = [values["w"][1:4], values["v"], values["whole"]]
    assert [array.tolist() for array in memory.arrays] == [array.tolist() for array in expected]
    # One is a copy.
    assert [event for event in memory.events if event[0] in ("open", "store")] == [("open", 1, True), ("store", 1)]
    assert report.bytes_needed == 48 + 64 + 24 == report.bytes_read - report.bytes_extra


def test_the_report_has_what_the_reader_counts():
    counts = SimpleNamespace(bytes_read=1, bytes_verified=2, bytes_extra=3, reads=4)
    assert reads_of(SimpleNamespace(count=counts, replicas_used={"a": "b"})) == {
        "bytes_read": 1, "bytes_verified": 2, "bytes_extra": 3, "replicas_used": {"a": "b"},
    }  # fmt: skip
