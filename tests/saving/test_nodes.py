"""Saves to the directories of nodes that share no storage, and loads where each rank sees some of the files."""

from __future__ import annotations

import inspect
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, LostRankError, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.loading import node_files
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native.directory import CheckpointDirectory, list_checkpoints
from paddle_flexckpt.native.node_commit import NodeCommit, NodeLayout
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld, _QueueTransport
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.background.helpers import shards
from tests.loading.test_fused_degrees import layout
from tests.memory.test_orders import KEYS, natural, targets
from tests.native.samples import flip, items_of, whole
from tests.remedies.following import advised, provoked
from tests.saved import data_file, named, short, short_names

ROWS = 16
# w is 16 x 5 float32, b 7 int64.
UNIQUE = ROWS * 5 * 4 + 7 * 8


def save(paths, version, **options):
    """Each rank's report, or its error; ``paths`` says which directory each rank sees."""
    return SimulatedWorld(len(paths)).run_all(
        lambda comm: save_state_dict(
            shards(comm.position, len(paths), version, ROWS // len(paths)),
            paths[comm.position],
            comm,
            **{"storage": "per_node", **options},
        )
    )


def test_a_checkpoint_that_any_node_has_is_reported_as_replaced(tmp_path):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for number, (paths, replaced) in enumerate([((one, two), False), ((other, two), True), ((other, one), True)]):
        reports = save(paths, number, unique_id=0)
        assert [each.replaced for each in reports] == [replaced] * 2


def load(paths, ids=None, **options):
    """Reports of the ranks and the version that all of them were given, or errors; ``ids``: what each asks for."""
    size = len(paths)

    def job(comm):
        found = shards(comm.position, size, -77, ROWS // size)
        chosen = {} if ids is None else {"unique_id": ids[comm.position]}
        report = load_state_dict(found, paths[comm.position], comm, **{"storage": "per_node", **chosen, **options})
        version = int(found["b"].local_tensor[0])
        for key, shard in shards(comm.position, size, version, ROWS // size).items():
            assert (found[key].local_tensor == shard.local_tensor).all()
        return report, version

    outcomes = SimulatedWorld(size).run_all(job)
    if isinstance(outcomes[0], BaseException):
        return outcomes
    reports, versions = zip(*outcomes)
    assert len(set(versions)) == 1
    return reports, versions[0]


def one_error(outcomes, kind=CheckpointError):
    """The text of the error that all ranks have."""
    assert {type(outcome) for outcome in outcomes} == {kind}, outcomes
    (text,) = {str(outcome) for outcome in outcomes}
    return text


@pytest.fixture
def nodes(tmp_path):
    """The directories of two nodes, and one where nothing is."""
    return str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "empty")


@pytest.fixture
def saved(nodes):
    """The same, with version 1 as id 0 of two ranks on each node."""
    a, b, _ = nodes
    assert [report.unique_id for report in save([a, a, b, b], 1)] == [0] * 4
    return nodes


def test_ranks_that_share_no_directory_are_refused_before_data_is_written(nodes, monkeypatch):
    a, b, _ = nodes
    monkeypatch.setattr(NodeDirectory, "write_data", lambda *args, **kwargs: pytest.fail("data was written"))
    text = one_error(save([a, a, b, b], 1, storage="shared"), ValidationError)
    assert f"[ranks 2-3] {b}/0-1.saving is not there" in short(text)
    assert "storage='per_node'" in text
    assert os.listdir(a) == []
    assert not os.path.exists(b)


def test_each_node_has_its_part_and_a_manifest_of_all(saved):
    a, b, _ = saved
    assert short_names(a) == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors", PADDLE_METADATA]
    assert short_names(b) == ["0.manifest", "2_0-1.safetensors", "3_0-1.safetensors", PADDLE_METADATA]
    for path in (a, b):
        with open(os.path.join(path, PADDLE_METADATA), "rb") as file:
            assert b"Paddle cannot, because its files are on several nodes" in file.read()
    first, second = (open_to_save(path).read_manifest() for path in (a, b))
    assert (first.save_token, first.nodes, len(first.catalog)) == (second.save_token, second.nodes, len(second.catalog))
    assert list(first.nodes.values()) == [
        (data_file(a), data_file(a, 1)),
        (data_file(a, 2), data_file(a, 3)),
    ]


@pytest.mark.parametrize("placement", ["aabb", "ab", "baba", "abee", "aaab", "ba"])
def test_what_a_rank_does_not_see_it_receives(saved, placement):
    paths = [saved["abe".index(letter)] for letter in placement]
    reports, version = load(paths)
    assert version == 1
    # What arrives was sent by others, and comes out of their files.
    assert sum(report.bytes_received for report in reports) == sum(report.bytes_sent for report in reports) > 0
    assert all(report.bytes_copied + report.bytes_received == report.bytes_needed for report in reports)
    # What a rank needs itself, and sends to several others, it reads once.
    assert all(report.bytes_read <= report.bytes_copied + report.bytes_sent for report in reports)
    assert UNIQUE <= sum(report.bytes_read for report in reports) <= sum(report.bytes_needed for report in reports)
    together, again = load(paths, comm_method="cooperative")
    assert again == 1
    assert sum(report.bytes_read for report in together) == UNIQUE
    assert {report.comm_method for report in reports} == {"direct"}
    assert {report.comm_method for report in together} == {"cooperative"}
    for letter, report in zip(placement, reports):
        if letter == "e":
            assert report.bytes_read == 0


def test_a_directory_with_all_parts_is_loaded_as_shared(saved, tmp_path):
    a, b, _ = saved
    whole = str(tmp_path / "whole")
    shutil.copytree(a, whole)
    shutil.copytree(b, whole, dirs_exist_ok=True)
    reports, version = load([whole] * 2)
    assert version == 1
    assert [report.bytes_received for report in reports] == [0, 0]
    assert load([whole], storage="shared")[1] == 1


def test_the_directory_of_one_node_alone_says_what_is_missing_and_where_it_is(saved):
    a, b, _ = saved
    texts = [one_error(load([a], storage="shared"), CorruptCheckpointError)]
    with pytest.raises(CorruptCheckpointError) as merged:
        load_merged_state_dict(a)
    (info,) = list_checkpoints(a)
    assert not info.complete
    for text in (*texts, str(merged.value), info.problem):
        assert f"{a}/{data_file(a, 2)} is missing" in text
        assert f":{b})" in text
        assert "storage='per_node'" in text


def test_a_lost_node_is_an_error_that_names_it_or_survived_by_copies(saved):
    a, b, empty = saved
    shutil.rmtree(b)
    text = one_error(load([a, a, empty, empty]), CorruptCheckpointError)
    assert f"'{data_file(a, 2)}' of id 0 with shards of 'w'" in text
    assert f":{b})" in text
    assert "node_copies=2" in text
    save([a, a, b, b], 2, node_copies=2)
    for lost, left in ((a, b), (b, a)):
        kept = f"{lost}.kept"
        os.rename(lost, kept)
        reports, version = load([left, left, empty, empty])
        assert version == 2
        assert reports[0].unique_id == 1
        assert load([left], storage="shared")[1] == 2
        os.rename(kept, lost)


def test_copies_of_uneven_nodes(nodes):
    a, b, c = nodes
    assert not any(isinstance(each, Exception) for each in save([a, b, b, c], 1, node_copies=2))
    held = {path: {name for name in short_names(path) if name.endswith("safetensors")} for path in nodes}
    assert held[a] == {"0_0-1.safetensors", "3_0-1.safetensors"}
    assert held[b] == {"0_0-1.safetensors", "1_0-1.safetensors", "2_0-1.safetensors"}
    assert held[c] == {"1_0-1.safetensors", "2_0-1.safetensors", "3_0-1.safetensors"}


def test_a_file_that_is_not_as_it_was_is_read_on_another_node(nodes):
    a, b, _ = nodes
    save([a, b], 1, node_copies=2)
    os.truncate(f"{a}/{data_file(a)}", 100)
    reports, version = load([a, b])
    assert version == 1
    assert reports[0].bytes_received > 0
    os.truncate(f"{b}/{data_file(b)}", 90)
    text = one_error(load([a, b]), CorruptCheckpointError)
    assert any(f"{data_file(a)} has {size} bytes" in text for size in (90, 100))
    os.truncate(f"{b}/0.manifest", 50)
    save([a, b], 2, node_copies=2)
    assert load([a, b])[1] == 2


def hurt(directory: str, name: str, byte: int = -1) -> None:
    path = Path(directory) / name
    flip(path, path.stat().st_size + byte)


# What the ranks see, and the copies of which a byte is flipped: by node, the rank that has written the file.
DAMAGED_COPIES = [
    ("ab", [("a", 0)]),
    ("ab", [("b", 0)]),
    ("ab", [("a", 0), ("b", 1)]),
    ("abc", [("a", 0)]),
    ("abc", [("a", 0), ("b", 1), ("c", 2)]),
    ("aabb", [("a", 0), ("a", 1)]),
]


@pytest.mark.parametrize("options", [{}, {"verify": "full"}, {"comm_method": "cooperative"}])
@pytest.mark.parametrize(("ranks", "damage"), DAMAGED_COPIES)
def test_a_damaged_copy_is_read_on_another_node(nodes, ranks, damage, options):
    """Twice: a plan that was kept for whole copies does not serve damaged ones, and the other way round."""
    path_of = dict(zip("abc", nodes))
    paths = [path_of[each] for each in ranks]
    assert not isinstance(save(paths, 1, node_copies=2)[0], Exception)
    assert load(paths, **options)[1] == 1
    for node, rank in damage:
        hurt(path_of[node], data_file(path_of[node], rank))
    for _ in range(2):
        reports, version = load(paths, **options)
        assert version == 1
    told = {
        (node, text)
        for node, report in zip(ranks, reports)
        for text in report.replicas_used.values()
        if "is damaged in this rank's directory; read from another node's copy" in text
    }
    assert {(node, int(text[0])) for node, text in told} <= {*damage}
    for node, rank in damage:
        hurt(path_of[node], data_file(path_of[node], rank))
    reports, version = load(paths, **options)
    assert (version, [report.replicas_used for report in reports]) == (1, [{}] * len(paths))


def test_one_more_try_goes_around_all_that_is_damaged_in_a_file(nodes, monkeypatch):
    a, b, _ = nodes
    state = {f"k{i}": np.full(3, i, "f4") for i in range(40)}
    SimulatedWorld(2).run(
        lambda comm: save_state_dict(state, [a, b][comm.rank], comm, storage="per_node", node_copies=2)
    )
    manifest = CheckpointDirectory(a).read_manifest()
    for row in range(len(manifest.catalog)):
        hurt(
            a,
            manifest.catalog.file_name(row),
            int(manifest.catalog.byte_offset[row]) - Path(a, manifest.catalog.file_name(row)).stat().st_size,
        )
    tries = []
    find_nodes = node_files.find_nodes
    monkeypatch.setattr(node_files, "find_nodes", lambda *given: tries.append(given) or find_nodes(*given))

    def job(comm):
        target = {key: np.zeros(3, "f4") for key in state}
        report = load_state_dict(target, [a, b][comm.rank], comm, storage="per_node")
        return [int(target[key][0]) for key in state], report

    (values, report), (other, whole_report) = SimulatedWorld(2).run(job)
    assert values == other == [*range(40)]
    assert (len(report.replicas_used), whole_report.replicas_used) == (40, {})
    assert 2 < len(tries) <= 2 * (1 + len(manifest.catalog.files)), "at most a try for each damaged file"


def test_what_is_damaged_in_all_copies_is_an_error(nodes):
    a, b, c = nodes
    save([a, b, c], 1, node_copies=2)
    hurt(a, data_file(a))
    hurt(b, data_file(b))
    text = one_error(load([a, b, c]), CorruptCheckpointError)
    assert f"no rank can read '{data_file(b)}' of id 0 with shards of 'w'" in text
    assert "the copies that ranks see are damaged" in text


def test_without_replicas_the_other_copy_is_not_asked_for(nodes):
    a, b, _ = nodes
    save([a, b], 1, node_copies=2)
    hurt(a, data_file(a))
    text = one_error(load([a, b], use_replicas=False), CorruptCheckpointError)
    assert "are damaged: expected xxh3" in text


@pytest.mark.parametrize("way", ["put", "load"])
def test_those_who_see_one_node_are_told_of_the_copies(nodes, way):
    """They read one directory: a verification, a merged load. Both ways out that the error names lead out."""
    a, b, _ = nodes
    save([a, b], 1, node_copies=2)
    name = data_file(a)
    hurt(a, name)
    with provoked("native/replica_items.py", "in place of the damaged one, or load with storage='per_node'"):
        load_merged_state_dict(a, verify="full")
    (problem,), held = verify_checkpoint(a).problems, CheckpointDirectory(a).read_manifest().nodes
    with pytest.raises(CorruptCheckpointError) as loaded:
        load_state_dict(shards(0, 1, -1, ROWS), a, SoloCommunicator())
    for text in (str(problem), str(loaded.value)):
        assert f"put a whole copy of {name}, of which the nodes {' and '.join(held)} have one each" in text
        assert f":{b})" in text
    if way == "put":
        shutil.copy(f"{b}/{name}", f"{a}/{name}")
        assert verify_checkpoint(a).ok
        assert load([a, b])[1] == load([a], storage="shared")[1] == 1
    else:
        assert load([a, b])[1] == 1


def test_the_highest_id_of_all_nodes_is_the_next_and_is_loaded(nodes):
    a, b, empty = nodes
    save([b, b], 1, unique_id=6)
    assert save([a, a, b, b], 2)[0].unique_id == 7
    assert load([a, b])[0][0].unique_id == 7
    assert load([empty, b], unique_id=6)[1] == 1
    text = one_error(load([a, b], unique_id=5), ValidationError)
    assert "has no checkpoint with id 5" in text


@pytest.mark.parametrize("storage", ["per_node", "shared"])
def test_ranks_agree_about_the_id_that_is_meant_not_about_how_it_is_said(nodes, storage):
    a, _, _ = nodes
    for version in (1, 2):
        save([a, a], version, storage=storage)
    for ids in ((None, 1), (1, None), (1, 1)):
        assert load([a, a], ids, storage=storage)[1] == 2
    for ids in ((None, 0), (1, 0), (0, None)):
        text = one_error(load([a, a], ids, storage=storage), ValidationError)
        assert "ranks disagree: " in text
        assert '"checkpoint": "id 0' in text and '"checkpoint": "id 1' in text


def test_an_id_is_replaced_on_all_nodes(saved):
    a, b, _ = saved
    save([a, b, b, a], 2, unique_id=0)
    assert short_names(a) == ["0.manifest", "0_0-2.safetensors", "3_0-2.safetensors", PADDLE_METADATA]
    assert short_names(b) == ["0.manifest", "1_0-2.safetensors", "2_0-2.safetensors", PADDLE_METADATA]
    assert load([a, b])[1] == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"node_copies": 3}, "node_copies has to be 1 to 2"),
        ({"node_copies": True}, "node_copies has to be an integer"),
        ({"storage": "nodes"}, "'shared' or 'per_node'"),
        ({"storage": "shared", "node_copies": 2}, "node_copies=2 needs storage='per_node'"),
        ({"unique_id": -1}, "unique_id has to be"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(nodes, options, text):
    a, b, _ = nodes
    assert text in str(save([a, b], 1, **options)[1])
    assert not any(name for path in (a, b) if os.path.exists(path) for name in os.listdir(path))


def test_ranks_have_to_agree_about_storage(nodes):
    a, _, _ = nodes
    save([a], 1)

    def job(comm):
        storage = "per_node" if comm.position else "shared"
        return save_state_dict(shards(comm.position, 2, 2), a, comm, storage=storage)

    for outcome in SimulatedWorld(2).run_all(job):
        assert '"storage": "per_node"' in str(outcome)
        assert '"storage": "shared"' in str(outcome)

    def loading(comm):
        storage = "per_node" if comm.position else "shared"
        return load_state_dict(shards(comm.position, 2, 2, ROWS // 2), a, comm, storage=storage)

    assert all('"storage": "per_node"' in str(outcome) for outcome in SimulatedWorld(2).run_all(loading))


def test_nothing_is_there(nodes):
    assert "does not exist" in one_error(load([nodes[2]] * 2), ValidationError)


# What a save to two nodes in place of another one has prepared on the second.
PREPARED = {"2_0-2.safetensors", "3_0-2.safetensors", "2_0-2.prepared", "0-2.saving"}


def stop_publishing(monkeypatch, *paths):
    """Saves that cannot put the manifest in place in some directories."""
    publish = NodeDirectory.publish_save

    def refuse(self, ticket, rank):
        if self.path in paths:
            raise OSError(28, "No space left on device")
        return publish(self, ticket, rank)

    monkeypatch.setattr(NodeDirectory, "publish_save", refuse)


def test_a_save_that_one_node_has_published_is_the_new_one_and_is_finished_by_the_next(saved, monkeypatch, caplog):
    a, b, empty = saved
    with monkeypatch.context() as context:
        stop_publishing(context, b)
        text = one_error(save([a, a, b, b], 2, unique_id=0))
    assert "some nodes may have published the checkpoint, others could not" in text
    assert load([a, a, b, b])[1] == 2
    # Without the other node nobody knows: the old and the new stay.
    before = set(os.listdir(b))
    assert save([b], 3)[0].unique_id == 1
    assert before < set(os.listdir(b))
    assert "stay until all of the nodes that took part save here again" in caplog.text
    assert load([a, a, b, b], unique_id=0)[1] == 2
    save([a, a, b, b], 4)
    assert open_to_save(a).tokens()[0] == open_to_save(b).tokens()[0]
    kinds = {name.rpartition(".")[2] for path in (a, b) for name in os.listdir(path)}
    assert kinds == {"manifest", "safetensors", "metadata"}
    assert not {"2_0-1.safetensors", "3_0-1.safetensors"} & {*short_names(b)}
    assert [load([empty, b, a, a], unique_id=unique_id)[1] for unique_id in (0, 1, 2)] == [2, 3, 4]


def test_a_save_that_no_node_has_published_is_removed_by_a_save_of_all_its_nodes(saved, monkeypatch):
    a, b, _ = saved
    with monkeypatch.context() as context:
        stop_publishing(context, a, b)
        one_error(save([a, a, b, b], 2, unique_id=0))
    assert load([a, a, b, b])[1] == 1
    prepared = {name for name in os.listdir(b) if "0-2." in short(name)}
    assert short_names(prepared) == sorted(PREPARED)
    save([b], 3)
    assert prepared < set(os.listdir(b))
    save([a, b], 4)
    assert not prepared & set(os.listdir(b))
    assert not [name for path in (a, b) for name in short_names(path) if "0-2." in name]
    assert [load([a, b], unique_id=unique_id)[1] for unique_id in (0, 2)] == [1, 4]


@pytest.mark.parametrize("published", [False, True])
def test_what_a_save_prepared_goes_when_the_other_node_is_back_with_an_empty_disk(saved, monkeypatch, published):
    """Its marker is lost, so it cannot say that it took part; its path says so. What it alone had published is lost."""
    a, b, other = saved
    with monkeypatch.context() as context:
        stop_publishing(context, *([b] if published else [a, b]))
        one_error(save([a, a, b, b], 2, unique_id=0))
    save([b, other], 3)
    assert PREPARED < {*short_names(b)}, "a is away"
    shutil.rmtree(a)
    save([a, b], 4)
    assert not [name for path in (a, b) for name in short_names(path) if "0-2." in name]
    assert load([a, b])[1] == 4


def refuse_after_clean_up(monkeypatch):
    """Saves that clean up after others, and then cannot prepare anything."""

    def refuse(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NodeDirectory, "prepare_save", refuse)


def test_a_node_does_not_publish_what_it_has_replaced_itself(saved, monkeypatch):
    """It died while it removed what it had prepared; the older of two saves is published on another node."""
    a, b, other = saved
    with monkeypatch.context() as context:
        stop_publishing(context, b)
        one_error(save([a, a, b, b], 2, unique_id=0))
    with monkeypatch.context() as context:
        context.setattr(NodeDirectory, "finish", lambda self, *args, **keywords: None)
        save([b, other], 3, unique_id=0, node_copies=2)
    os.unlink(os.path.join(b, named(b, "0_0-3.prepared")))
    assert load([a, b])[1] == 3
    with monkeypatch.context() as context:
        refuse_after_clean_up(context)
        one_error(save([a, b], 4, unique_id=0))
    assert load([a, b])[1] == 3, "b has published version 2 in place of version 3"
    save([a, b, other], 5, unique_id=0)
    assert load([other, b, a])[1] == 5
    kinds = {name.rpartition(".")[2] for path in (a, b, other) for name in os.listdir(path)}
    assert kinds == {"manifest", "safetensors", "metadata"}


def test_a_node_does_not_publish_what_others_have_replaced(nodes, monkeypatch):
    """It was away meanwhile, and what it has prepared names files that the others need not keep."""
    a, b, c = nodes
    save([a, b, c, c], 1)
    with monkeypatch.context() as context:
        stop_publishing(context, a, b)
        one_error(save([a, b, c, c], 2, unique_id=0))
    with monkeypatch.context() as context:
        stop_publishing(context, b)
        one_error(save([b, c], 3, unique_id=0))
    first, second, third = (open_to_save(path).tokens()[0] for path in (a, b, c))
    assert len({first, second, third}) == 3, "b has published version 2, as c had; c version 3"
    with monkeypatch.context() as context:
        refuse_after_clean_up(context)
        one_error(save([a, b, c, c], 4, unique_id=0))
    assert [open_to_save(path).tokens()[0] for path in (a, b, c)] == [first, third, third]
    assert load([a, b, c, c])[1] == 3
    save([a, b, c, c], 5, unique_id=0)
    assert load([c, c, b, a])[1] == 5
    kinds = {name.rpartition(".")[2] for path in nodes for name in os.listdir(path)}
    assert kinds == {"manifest", "safetensors", "metadata"}


@pytest.fixture
def acknowledged(nodes):
    """Version 1 is on a and c; c is away; version 2, acknowledged, is whole on a and on b; b is away and c is back."""
    a, b, _ = nodes
    c = f"{a}c"
    save([a, c], 1, unique_id=0, node_copies=2)
    assert not isinstance(save([a, b], 2, unique_id=0, node_copies=2)[0], Exception)
    assert load([a, c])[1] == 2, "all of version 2 is on a"
    return a, c


@pytest.mark.parametrize("suffix", ["0.manifest", ".safetensors"])
def test_an_older_save_is_not_loaded_because_of_one_io_error(acknowledged, monkeypatch, suffix):
    a, c = acknowledged
    original, left = LocalBackend.open, [1 if suffix == "0.manifest" else 2]

    def trouble(self, name):
        if self.path == a and name.endswith(suffix) and left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return original(self, name)

    with monkeypatch.context() as context:
        context.setattr(LocalBackend, "open", trouble)
        outcome = load([a, c])
    assert not left[0]
    # The job goes on from what it was given, and storage is well again.
    if not isinstance(outcome[0], Exception):
        given = outcome[1]
        save([a, c], 100 + given, unique_id=0, node_copies=2)
        assert given == 2, "version 2 was acknowledged, and is there, whole"


def test_an_older_save_is_not_loaded_because_of_a_damaged_manifest(acknowledged):
    a, c = acknowledged
    with open(f"{a}/0.manifest", "rb") as file:
        whole = file.read()
    os.truncate(f"{a}/0.manifest", 50)
    outcome = load([a, c])
    assert isinstance(outcome[0], Exception), f"version {outcome[1]}, and one warning of rank 0"
    advised(
        "loading/node_files.py",
        "look into the storage of that node, and load again; without that node an",
        str(outcome[0]),
    )
    assert load([c, c])[1] == 1
    with open(f"{a}/0.manifest", "wb") as file:
        file.write(whole)
    assert load([a, c])[1] == 2


def test_an_older_save_is_not_loaded_because_of_data_that_cannot_be_read(acknowledged, monkeypatch, caplog):
    a, c = acknowledged
    original = LocalBackend.open

    def trouble(self, name):
        if self.path == a and name.endswith(".safetensors"):
            raise OSError(5, "Input/output error")
        return original(self, name)

    with monkeypatch.context() as context:
        context.setattr(LocalBackend, "open", trouble)
        outcome = load([a, c])
    assert isinstance(outcome[0], Exception), f"version {outcome[1]}; said: {caplog.text!r}"


def test_what_is_prepared_and_damaged_does_not_replace_a_good_manifest(nodes, monkeypatch):
    a, b, empty = nodes
    save([a, b], 1, node_copies=2)
    with monkeypatch.context() as context:
        stop_publishing(context, b)
        one_error(save([a, b], 2, unique_id=0, node_copies=2))
    path = os.path.join(b, named(b, "1_0-2.prepared"))
    with open(path, "r+b") as file:
        file.seek(-9, 2)
        byte = file.read(1)
        file.seek(-9, 2)
        file.write(bytes([byte[0] ^ 1]))
    assert load([b, b])[1] == 1
    with monkeypatch.context() as context:
        refuse_after_clean_up(context)
        one_error(save([a, b], 3, unique_id=0, node_copies=2))
    shutil.rmtree(a)
    outcome = load([empty, b])
    assert not isinstance(outcome[0], Exception), outcome[0]
    assert outcome[1] in (1, 2)


def test_a_node_that_has_a_manifest_and_no_data_knows_its_number(nodes):
    a, b, _ = nodes

    def tiny(paths, version, **options):
        def job(comm):
            return save_state_dict(
                {"t": np.full(3, version)}, paths[comm.position], comm, storage="per_node", unique_id=0
            )

        return SimulatedWorld(len(paths)).run_all(job)

    def has_data(path):
        return any(name.endswith(".safetensors") for name in os.listdir(path))

    version = 0
    while version < 4 or has_data(b):
        version += 1
        assert not isinstance(tiny([a, b], version)[0], Exception)
    tiny([b], version + 1)

    def job(comm):
        found = {"t": np.full(3, -1)}
        load_state_dict(found, [a, b][comm.position], comm, storage="per_node")
        return int(found["t"][0])

    assert SimulatedWorld(2).run(job) == [version + 1] * 2


def test_what_is_prepared_and_cannot_be_read_stays(saved, monkeypatch):
    a, b, _ = saved
    with monkeypatch.context() as context:
        stop_publishing(context, a, b)
        one_error(save([a, a, b, b], 2, unique_id=0))
    prepared = os.path.join(b, named(b, "2_0-2.prepared"))
    with open(prepared, "r+b") as file:
        file.truncate(10)
    shutil.rmtree(a)
    save([a, b], 3)
    assert os.path.exists(prepared)


def test_a_node_that_cannot_prepare_leaves_all_as_it_was(saved, monkeypatch):
    a, b, _ = saved
    before = sorted(os.listdir(a)), sorted(os.listdir(b))

    def refuse(self, *args):
        raise OSError(28, "No space left on device")

    prepare = NodeDirectory.prepare_save
    monkeypatch.setattr(
        NodeDirectory, "prepare_save", lambda self, *args: (refuse if self.path == b else prepare)(self, *args)
    )
    assert "[rank 2]" in one_error(save([a, a, b, b], 2, unique_id=0, node_copies=2))
    assert (sorted(os.listdir(a)), sorted(os.listdir(b))) == before


def test_what_a_rank_prepared_stays_if_another_is_lost_meanwhile(saved, monkeypatch):
    """The others may not have noticed, and publish."""
    a, b, _ = saved

    def lost(self, *args):
        raise LostRankError("rank 3 has gone")

    monkeypatch.setattr(NodeDirectory, "publish_save", lost)
    save([a, b], 2, unique_id=0)
    assert {"0-2.saving", "0_0-2.prepared", "0_0-2.safetensors"} < {*short_names(a)}


def test_a_copy_that_fails_is_given_up_at_once(nodes, monkeypatch):
    """Not when the error has been forgotten: whoever comes next may have a file of that name."""
    streams = []

    def break_off(self, addresses, peers, outgoing, incoming):
        next(incoming)
        streams.append(incoming)
        raise CheckpointError("the network is down")

    monkeypatch.setattr(_QueueTransport, "exchange_rounds", break_off)
    a, b, _ = nodes
    assert "the network is down" in one_error(save([a, b], 1, node_copies=2))
    assert [inspect.getgeneratorstate(stream) for stream in streams] == [inspect.GEN_CLOSED] * 2


def test_verify_names_the_node_of_a_missing_file(saved):
    a, b, _ = saved
    report = verify_checkpoint(a)
    assert any(data_file(a, 2) in str(problem) and f":{b})" in str(problem) for problem in report.problems)


def test_recorded_orders_of_fused_parameters_count_here_too(nodes):
    def saving(comm):
        state = {key: weight for key, weight in layout(2, "", comm.rank).items() if key in KEYS}
        save_state_dict(state, nodes[comm.rank], comm, storage="per_node")

    SimulatedWorld(2).run(saving)

    def job(comm):
        found = targets(1, 0, dist=True)
        report = load_state_dict(found, nodes[comm.rank], comm, storage="per_node")
        assert report.bytes_received
        return all(np.array_equal(found[key].local_tensor, natural(key)) for key in found)

    assert SimulatedWorld(2).run(job) == [True, True]


def test_a_late_rank_of_a_node_leaves_nothing_for_good(tmp_path):
    """It was stopped until the next start of the job had cleaned up, and then learns that ranks are lost."""
    late = open_to_save(tmp_path)
    names = late.open_save(0, 2)
    ranks = SimpleNamespace(position=1, rank=1, ranks=(0, 1), size=2)
    save = NodeCommit(ranks, late, names, NodeLayout(((0,), (1,)), ("0 (a:/x)", "1 (b:/y)"), copies=2))
    with late.lock():
        open_to_save(tmp_path).cleaner.remove_dead_saves()
    for rank in (0, 1):  # its own, and the copy of another's
        items = items_of([whole("w", "uint8", (4,), rank)], names.data_file(rank))
        late.write_data(names, items, [np.zeros(4, np.uint8)], world_size=2)
    save.lose_rank()
    report = save_state_dict({"w": np.ones(4)}, tmp_path, SoloCommunicator())
    assert report.unique_id == 0 and sorted(os.listdir(tmp_path)) == sorted(
        [PADDLE_METADATA, "0.manifest", data_file(tmp_path)]
    )
