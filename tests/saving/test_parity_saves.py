"""Saves to nodes with parity: what is written and sent, and loads after the loss of a node."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import local
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import partitions
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.saving import node_saves
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing import simulated
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.background.helpers import shards
from tests.native.samples import flip
from tests.remedies.following import advised
from tests.saved import data_file, short_names
from tests.saving.test_nodes import load, one_error, save


@pytest.fixture
def nodes(tmp_path):
    """The directories of four nodes."""
    return [str(tmp_path / name) for name in "abcd"]


def parity_of(path, rank):
    return data_file(path, rank).replace(".safetensors", ".parity")


def bytes_of(path, ending):
    return sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name.endswith(ending))


def done(outcomes):
    assert not any(isinstance(each, BaseException) for each in outcomes), outcomes
    return outcomes


@pytest.fixture
def saved(nodes):
    """The same, with version 1 as id 0 of two ranks on each, in one group."""
    done(save([path for path in nodes for _ in range(2)], 1, parity=4))
    return nodes


def lose(*paths):
    for path in paths:
        shutil.rmtree(path)
        os.mkdir(path)


@pytest.mark.parametrize("parity", [2, 3, 4])
def test_each_byte_is_sent_once_and_stored_once_more_or_less(nodes, monkeypatch, parity):
    sent = []
    send = simulated._QueueTransport._send
    monkeypatch.setattr(
        simulated._QueueTransport,
        "_send",
        lambda self, stream, chunks: send(self, stream, (sent.append(each.nbytes) or each for each in chunks)),
    )
    done(save([path for path in nodes for _ in range(2)], 1, parity=parity))
    data = sum(bytes_of(path, ".safetensors") for path in nodes)
    assert sum(sent) == data
    group = 2 if parity == 2 else 4
    header = 400 * len(nodes) * 2
    assert data / (group - 1) <= sum(bytes_of(path, ".parity") for path in nodes) <= data / (group - 1) + header
    manifest = CheckpointDirectory(nodes[0]).read_manifest()
    for path, files in zip(nodes, manifest.nodes.values()):
        assert {*files} == {name for name in os.listdir(path) if name.endswith((".safetensors", ".parity"))}


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize(("parity", "seers"), [(2, "abcd"), (4, "abcd"), (4, "ddaabbcc"), (3, "dcba"), (4, "dcab")])
def test_the_data_of_a_lost_node_is_rebuilt_under_any_layout(nodes, lost, parity, seers):
    done(save([path for path in nodes for _ in range(2)], 1, parity=parity))
    wanted = {}
    for name in os.listdir(nodes[lost]):
        wanted[name] = Path(nodes[lost], name).read_bytes()
    lose(nodes[lost])
    _, version = load([nodes["abcd".index(each)] for each in seers])
    assert version == 1
    found = {name: path for path in nodes for name in os.listdir(path) if name in wanted and name.endswith("tensors")}
    assert {*found} == {name for name in wanted if name.endswith("tensors")}
    for name, path in found.items():
        assert path != nodes[lost] and Path(path, name).read_bytes() == wanted[name]
    if parity == 4:
        assert len({*found.values()}) == 2, "each on another node"
    # It is a checkpoint like others from then on.
    assert load([nodes["abcd".index(each)] for each in seers])[1] == 1
    done(save([path for path in nodes for _ in range(2)], 2, unique_id=0, parity=parity))
    assert load(nodes)[1] == 2
    for path in nodes:
        names = short_names(path)
        assert [name for name in names if "-2" not in name] == ["0.manifest", names[-1]]


def test_a_smaller_job_rebuilds_what_it_does_not_see(saved):
    a, b, c, d = saved
    lose(c)
    _, version = load([a, b, d, d])
    assert version == 1
    lose(a)
    assert "parity cannot rebuild it without" in one_error(load([b, d]), CorruptCheckpointError)


def test_the_newer_save_is_rebuilt_though_a_node_that_was_away_has_an_older_one(saved, tmp_path):
    a, b, c, d = saved
    shutil.copytree(d, tmp_path / "old")
    done(save([path for path in saved for _ in range(2)], 2, unique_id=0, parity=4))
    shutil.rmtree(d)
    os.rename(tmp_path / "old", d)
    before = {name: Path(d, name).read_bytes() for name in os.listdir(d)}
    assert load([a, b, c, d])[1] == 2
    assert {name: Path(d, name).read_bytes() for name in os.listdir(d)} == before


def test_nothing_is_rebuilt_where_nothing_is_lost(saved, monkeypatch):
    monkeypatch.setattr(LocalBackend, "create", lambda *args: pytest.fail("a file is written"))
    assert load(saved)[1] == 1


def test_two_lost_nodes_of_a_group_are_named_with_what_would_help(saved):
    a, b, c, d = saved
    lose(b, c)
    text = one_error(load([a, b, c, d]), CorruptCheckpointError)
    assert f"no rank can read '{data_file(a, 2)}' of id 0 with shards of 'w'" in text
    assert "no rank sees it; parity cannot rebuild it without" in text
    assert f"{parity_of(a, 4)}" in text
    assert f":{b})" in text and f":{c})" in text
    assert "Remedy (FC504): let a rank see these directories" in text
    assert not any(name.endswith("tmp") for path in saved for name in os.listdir(path))


def test_lost_nodes_of_different_groups_are_rebuilt(nodes):
    """Of two groups of two, a and c, b and d."""
    a, b, c, d = nodes
    done(save(nodes, 1, parity=2))
    lose(a, b)
    assert load([c, d])[1] == 1
    done(save(nodes, 2, parity=2, unique_id=0))
    lose(a, c)
    assert "no parity file of its group can be read" in one_error(load(nodes), CorruptCheckpointError)


@pytest.mark.parametrize("kind", ["data", "parity"])
def test_what_is_rebuilt_from_damaged_files_is_refused(saved, kind):
    a, b, c, d = saved
    lose(d)
    name = data_file(a, 2) if kind == "data" else parity_of(a, 2)
    flip(Path(b, name), Path(b, name).stat().st_size * 4 // 5)
    text = one_error(load([a, b, c, d]), CorruptCheckpointError)
    assert f"{data_file(a, 6)}, rebuilt by parity, is not what was saved" in text
    advised("native/parity.py", "of each node's directory finds; load another checkpoint", text)
    assert any(f"{b}/{name}" == each.file for each in verify_checkpoint(b).problems)
    assert not any(data_file(a, 6) in name for path in saved for name in os.listdir(path))


def test_a_parity_file_that_is_cut_off_is_not_used_and_named(saved):
    a, b, c, d = saved
    lose(d)
    os.truncate(os.path.join(b, parity_of(a, 2)), 500)
    text = one_error(load([a, b, c, d]), CorruptCheckpointError)
    assert f"{b}/{parity_of(a, 2)} has 500 bytes; expected" in text


def test_a_parity_file_that_one_rank_sees_cut_off_is_read_by_another(saved, tmp_path):
    a, b, c, d = saved
    lose(d)
    copy = str(tmp_path / "copy of b")
    shutil.copytree(b, copy)
    os.truncate(os.path.join(copy, parity_of(a, 2)), 500)
    assert load([copy, a, b, c])[1] == 1


def test_parity_of_another_save_is_not_used(saved):
    """Its name is right, its token is not: somebody has renamed it."""
    a, b, c, d = saved
    old = {path: Path(path, parity_of(a, rank)).read_bytes() for path, rank in ((a, 0), (b, 2), (c, 4), (d, 6))}
    done(save([path for path in saved for _ in range(2)], 2, unique_id=0, parity=4))
    name = parity_of(a, 2)
    Path(b, name).write_bytes(old[b])
    lose(d)
    text = one_error(load([a, b, c, d]), CorruptCheckpointError)
    assert f"{b}/{name} is damaged, or not of this checkpoint" in text


def test_damage_in_a_file_is_mended_from_parity_elsewhere(saved):
    a, b, c, d = saved
    flip(Path(b, data_file(a, 2)), Path(b, data_file(a, 2)).stat().st_size - 1)
    _, version = load([a, b, c, d])
    assert version == 1
    assert [path for path in saved if data_file(a, 2) in os.listdir(path)] != [b]


def test_a_directory_that_cannot_be_written_to_says_so(saved, monkeypatch):
    a, b, c, d = saved
    lose(d)

    def refuse(self, name, *args):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(LocalBackend, "create", refuse)
    text = one_error(load([a, b, c, d]))
    assert f"/{data_file(a, 6)} is lost, and cannot be rebuilt there: Permission denied" in text
    advised("native/parity.py", "make the directory writable, or rebuild it by `flexckpt repair --nodes", text)
    monkeypatch.undo()
    assert load([a, b, c, d])[1] == 1


def test_a_disk_without_room_for_what_is_rebuilt_says_so(saved, monkeypatch):
    a, b, c, d = saved
    lose(d)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "write_all", refuse)
    text = one_error(load([a, b, c, d]))
    assert f"/{data_file(a, 6)} is lost, and cannot be rebuilt there: No space left on device" in text
    advised("media/full_disks.py", "make room on that storage for what all its ranks write, and call again", text)
    assert "make the directory writable" not in text
    monkeypatch.undo()
    assert load([a, b, c, d])[1] == 1


def test_ranks_without_a_file_have_parity_too(nodes):
    state = {"w": np.arange(50)}

    def saving(comm):
        return save_state_dict(state, nodes[comm.rank], comm, storage="per_node", parity=4)

    def loading(comm):
        found = {"w": np.zeros(50, dtype=np.int64)}
        load_state_dict(found, nodes[comm.rank], comm, storage="per_node")
        return (found["w"] == state["w"]).all()

    SimulatedWorld(4).run(saving)
    for path, files in zip(nodes, CheckpointDirectory(nodes[0]).read_manifest().nodes.values()):
        assert {*files} == {name for name in os.listdir(path) if name.endswith((".safetensors", ".parity"))}
    (writer,) = [path for path in nodes if bytes_of(path, ".safetensors")]
    assert not bytes_of(writer, ".parity"), "there is nothing that it could protect"
    lose(writer)
    assert all(SimulatedWorld(4).run(loading))


def test_tensors_without_elements_are_rebuilt_by_a_manifest_in_partitions(nodes, monkeypatch):
    monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 10)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 4)

    def state(rank):
        found = {f"{rank}.{i}": np.full((i % 3, 2), rank, dtype=np.float32) for i in range(20)}
        return found | {f"{rank}.{i}": np.zeros((0,), dtype=np.int64) for i in range(20, 23)}

    def saving(comm):
        return save_state_dict(state(comm.rank), nodes[comm.rank], comm, storage="per_node", parity=4)

    def loading(comm):
        found = {key: np.ones_like(value) for key, value in state(comm.rank).items()}
        load_state_dict(found, nodes[comm.rank], comm, storage="per_node")
        return all((found[key] == value).all() for key, value in state(comm.rank).items())

    done(SimulatedWorld(4).run_all(saving))
    assert any(name.endswith(".partition") for name in os.listdir(nodes[0]))
    lost = Path(nodes[2], data_file(nodes[2], 2)).read_bytes()
    lose(nodes[2])
    assert SimulatedWorld(4).run_all(loading) == [True] * 4
    (found,) = [path for path in nodes if data_file(nodes[0], 2) in os.listdir(path)]
    assert Path(found, data_file(nodes[0], 2)).read_bytes() == lost


@pytest.mark.parametrize(
    ("hosts", "options", "text"),
    [
        ("xyxy", {"node_copies": 2}, ""),
        ("xxyy", {"node_copies": 2}, "on host x, host y"),
        ("xxyz", {"node_copies": 2}, "on host x"),
        ("xxyy", {"node_copies": 3}, ""),
        ("xxxx", {"node_copies": 4}, "on host x"),
        ("xxyy", {"parity": 2}, ""),
        ("xyxy", {"parity": 2}, "on host x, host y"),
        ("xyzx", {"parity": 4}, "on host x"),
        ("xxxx", {"node_copies": 1}, ""),
    ],
)
def test_directories_of_one_host_do_not_protect_each_other(nodes, monkeypatch, caplog, hosts, options, text):
    where = {f"rank {rank}": host for rank, host in enumerate(hosts)}
    monkeypatch.setattr(node_saves.socket, "gethostname", lambda: where[threading.current_thread().name])
    monkeypatch.setattr(node_saves, "_warned", set())

    def saving(paths, options):
        def job(comm):
            threading.current_thread().name = f"rank {comm.rank}"
            save_state_dict(shards(comm.position, 4, 1), paths[comm.rank], comm, storage="per_node", **options)

        SimulatedWorld(4).run(job)
        return [each.getMessage() for each in caplog.records if "protect" in each.getMessage()]

    # Each step of a manager has directories of its own.
    found = [saving([f"{path}/{step}" for path in nodes], options) for step in (1, 2)][1]
    assert len(found) == bool(text), found
    if text:
        assert f"does not survive the loss of a host: {text}, directories protect each other alone: " in found[0]
        advised("saving/node_saves.py", "give all ranks of a host one directory, or run on more hosts", found[0])
        caplog.clear()
        assert not saving([nodes[hosts.index(host)] for host in hosts], {"node_copies": len({*hosts})})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parity": 1}, "parity has to be None, or 2 to 128"),
        ({"parity": 5}, "no more than there are nodes; got 5"),
        ({"parity": True}, "parity has to be an integer >= 0; got True"),
        ({"parity": 2, "node_copies": 2}, "parity=2 needs storage='per_node', and no node_copies"),
        ({"parity": 2, "storage": "shared"}, "parity=2 needs storage='per_node', and no node_copies"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(nodes, monkeypatch, options, text):
    monkeypatch.setattr(NodeDirectory, "write_data", lambda *args, **kwargs: pytest.fail("data was written"))
    assert text in one_error(save(nodes, 1, **options), ValidationError)
    assert not any(os.listdir(path) for path in nodes if os.path.exists(path))


def test_uneven_nodes_are_refused_before_anything_is_written(nodes, monkeypatch):
    a, b, *_ = nodes
    with monkeypatch.context() as patch:
        patch.setattr(NodeDirectory, "write_data", lambda *args, **kwargs: pytest.fail("data was written"))
        text = one_error(save([a, a, a, b], 1, parity=2), ValidationError)
    assert "parity=2 needs as many ranks on each node; got 3, 1" in text
    advised("native/parity.py", "node_copies=2 works with any", text)
    done(save([a, a, a, b], 1, node_copies=2))
    lose(a)
    assert load([b, b])[1] == 1


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (".parity", {"parity": 4}),
        (".safetensors", {"node_copies": 2}),
        (".prepared", {"parity": 4}),
        (".partition", {"parity": 4}),
    ],
)
def test_a_disk_that_is_full_is_told_with_a_remedy_and_leaves_nothing(saved, monkeypatch, what, options):
    """While parity, a copy of another node's file, the manifest or a partition of it is written."""
    _, b, *_ = saved
    before = {path: sorted(os.listdir(path)) for path in saved}
    write_all, own = local.write_all, ("2_", "3_") if what == ".safetensors" else ()
    monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 0)

    def refuse(descriptor, parts):
        directory, name = os.path.split(os.readlink(f"/proc/self/fd/{descriptor}"))
        if directory == b and what in name and not name.startswith(own):
            raise OSError(28, "No space left on device")
        return write_all(descriptor, parts)

    monkeypatch.setattr(local, "write_all", refuse)
    text = one_error(save([path for path in saved for _ in range(2)], 2, **options), CheckpointError)
    assert f"No space left on device: {b}/" in text and " are free there now. Remedy (FC402): make room" in text
    assert {path: sorted(os.listdir(path)) for path in saved} == before
    monkeypatch.undo()
    done(save([path for path in saved for _ in range(2)], 2, **options))


def test_a_lost_parity_file_stops_the_commit(saved, monkeypatch):
    _, b, *_ = saved
    prepare = NodeDirectory.prepare_save

    def lose_first(self, save, rank, manifest, node):
        if self.path == b:
            (name, *_) = [name for name in manifest.nodes[node] if name.endswith(".parity")]
            os.unlink(os.path.join(b, name))
        return prepare(self, save, rank, manifest, node)

    monkeypatch.setattr(NodeDirectory, "prepare_save", lose_first)
    text = one_error(save([path for path in saved for _ in range(2)], 2, unique_id=0, parity=4))
    assert ".parity" in text and "[rank 2]" in text
    assert load(saved)[1] == 1
