"""``publish``: whole tensors of live shards in files that others read, written by all ranks, all or nothing."""

from __future__ import annotations

import json
import os
import resource
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.loading import live_model, publishing
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.media.local import LocalBackend, OutputParts
from paddle_flexckpt.testing.simulated import SimulatedCommunicator, SimulatedWorld
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.tensor_files import divide_evenly
from tests.remedies.following import provoked
from tests.transfer.samples import cut, values_of

KINDS = {
    "m.a": ("float32", (40, 6)),
    "m.b": ("float16", (7, 5, 3)),
    "m.c": ("int64", (9,)),
    "m.d": ("float64", (16, 16)),
    "m.e": ("uint8", (3,)),
    "m.none": ("float32", (0, 4)),
    "m.one": ("float32", ()),
    "m.a.moment1_0": ("float32", (40, 6)),
}
WEIGHTS = [key for key in KINDS if key != "m.a.moment1_0"]


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


def published(directory) -> dict[str, np.ndarray]:
    """What Hugging Face's libraries read: the files of the index, or the one file."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    content = json.loads(index.read_text())
    found = {}
    for name in sorted(set(content["weight_map"].values())):
        tensors = load_file(directory / name)
        assert {key for key, file in content["weight_map"].items() if file == name} == set(tensors)
        found.update(tensors)
    assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def equal(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == value.dtype and found[key].tobytes() == value.tobytes() and found[key].shape == value.shape
        for key, value in expected.items()
    )


def send(monkeypatch, few_runs: int = -1) -> None:
    """Let ranks write nothing from their own memory but tensors of so few runs."""
    monkeypatch.setattr(live_model, "FEW_RUNS", few_runs)
    monkeypatch.setattr(live_model, "RUN_BYTES", 1 << 60)


@pytest.mark.parametrize(("cuts", "replicas"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("how", ["owned", "some", "sent", "one by one", "one writer"])
def test_files_have_the_values_of_all_ranks(values, tmp_path, monkeypatch, cuts, replicas, how):
    batch = 64 if how == "one by one" else 1 << 20
    monkeypatch.setattr(publishing, "BATCH_BYTES", batch)
    if how in ("some", "sent", "one by one"):
        send(monkeypatch, 5 if how == "some" else -1)

    def job(comm):
        output = LocalBackend(str(tmp_path / "out"))
        output.has_path = how != "one writer"
        report = publish(cut(values, comm.rank % cuts, cuts), output, comm)
        return report, comm.collectives

    reports, collectives = zip(*SimulatedWorld(cuts * replicas).run(job))
    assert len(set(collectives)) == 1
    if how == "owned":
        assert [report.bytes_received for report in reports] == [0] * len(reports)
        assert collectives[0] == 3 + (len(reports) > 1)  # some tensors have replicas
    assert equal(published(tmp_path / "out"), {key: values[key] for key in WEIGHTS})
    assert reports[0].total_bytes == sum(values[key].nbytes for key in WEIGHTS)
    assert sum(report.bytes_written for report in reports) == reports[0].total_bytes
    assert (reports[0].keys, reports[0].left_out) == (len(WEIGHTS), 1)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [*reports[0].files, *["model.safetensors.index.json"] * (len(reports[0].files) > 1)]
    )


def test_it_is_what_an_export_of_the_checkpoint_is(values, tmp_path):
    """With statements, a prefix and a configuration; names, shapes and bytes."""
    config = {"aoa_statements": ["m.a^T -> n.a", "m.d -> n.d1, n.d2, axis=0", "m.b -> _", "m.e -> n.e"]}

    def both(comm):
        state = cut(values, comm.rank, 3)
        fc.save_state_dict(state, tmp_path / "saved", comm)
        return publish(state, tmp_path / "out", comm, aoa_config=config, prefix="n", config={"layers": 2})

    SimulatedWorld(3).run(both)
    export_safetensors(tmp_path / "saved", tmp_path / "exported", config, prefix="n")
    assert equal(published(tmp_path / "out"), published(tmp_path / "exported"))
    assert sorted(published(tmp_path / "out")) == ["a", "d1", "d2", "e"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"layers": 2}


def test_it_loads_again(values, tmp_path):
    SimulatedWorld(2).run(lambda comm: publish(cut(values, comm.rank, 2), tmp_path / "out", comm, max_file_bytes=500))
    target = {key: np.zeros_like(values[key]) for key in WEIGHTS}
    SimulatedWorld(1).run(lambda comm: fc.load_state_dict(target, tmp_path / "out", comm))
    assert equal(target, {key: values[key] for key in WEIGHTS})


@pytest.mark.parametrize(("how", "received", "collectives"), [("owned", 0, 3), ("sent", 512, 7), ("apart", 512, 7)])
def test_a_rank_receives_what_it_lacks_of_what_it_writes(tmp_path, monkeypatch, how, received, collectives):
    """From no rank that sees the files as it does, unless tensors have many short runs there."""
    values = {f"w{i}": np.full((8, 8), i, np.float32) for i in range(8)}
    if how == "sent":
        send(monkeypatch)
    monkeypatch.setattr(publishing, "place_of", lambda backend: backend.path)
    paths = [tmp_path / "out", tmp_path / "." / "out" if how != "apart" else f"{tmp_path}/./out"]

    def job(comm):
        return publish(cut(values, comm.rank, 2), paths[comm.rank], comm), comm.collectives

    reports, counted = zip(*SimulatedWorld(2).run(job))
    assert [report.bytes_written for report in reports] == [1024, 1024]
    assert [report.bytes_received for report in reports] == [received, received]
    assert set(counted) == {collectives}
    assert equal(published(tmp_path / "out"), values)


def test_ranks_of_two_machines_send_what_the_other_machine_writes(tmp_path, monkeypatch):
    """Of four ranks, two a machine; every other tensor is cut among all of them."""
    values = {f"w{i}": np.full((8, 8), i, np.float32) for i in range(8)}
    monkeypatch.setattr(publishing, "place_of", lambda backend: backend.path)

    def state(rank):
        own = {}
        for number, (key, value) in enumerate(values.items()):
            if number % 2:
                part = value[2 * rank : 2 * rank + 2].copy()
                own[key] = fc.ShardedWeight(key, part, part.shape, value.shape, (2 * rank, 0))
            elif number // 4 == rank // 2:  # the first four tensors are in the files of the first two ranks
                part = value[4 * (rank % 2) : 4 * (rank % 2) + 4].copy()
                own[key] = fc.ShardedWeight(key, part, part.shape, value.shape, (4 * (rank % 2), 0))
        return own

    def job(comm):
        output = tmp_path / "out" if comm.rank < 2 else f"{tmp_path}/./out"
        return publish(state(comm.rank), output, comm)

    reports = SimulatedWorld(4).run(job)
    assert equal(published(tmp_path / "out"), values)
    # Each has a file of two tensors: one that it writes, of which it lacks three quarters, and one that the two ranks
    # of its machine write, half each; and so it does in the other one's file.
    assert [report.bytes_received for report in reports] == [192] * 4
    assert [report.bytes_written for report in reports] == [256 + 2 * 128] * 4


def test_ranks_that_reach_the_output_otherwise_are_refused(values, tmp_path):
    def job(comm):
        output = LocalBackend(str(tmp_path / "out"))
        output.has_path = comm.rank == 0
        return publish(cut(values, comm.rank, 2), output, comm)

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(
        isinstance(each, ValidationError) and "give the same output on every rank" in str(each) for each in outcomes
    )
    assert not (tmp_path / "out").exists()


def test_replicas_are_written_by_whoever_has_a_file_and_only_compared(tmp_path):
    values = {f"w{i}": np.full((8, 8), i, np.float32) for i in range(8)}

    def job(comm):
        return publish(dict(values), tmp_path / "out", comm), comm.collectives

    reports, collectives = zip(*SimulatedWorld(4).run(job))
    assert [(report.bytes_written, report.bytes_received) for report in reports] == [(512, 0)] * 4
    assert set(collectives) == {4}


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_ranks_write_about_as_much(ranks):
    infos = {f"w{i:03d}": TensorInfo((64 + i % 3, 8), "float32") for i in range(640)}
    files = divide_evenly(infos, 1 << 40, ranks)
    sizes = [file.data_bytes for file in files]
    assert len(files) == ranks
    assert max(sizes) - sum(sizes) / ranks <= 66 * 8 * 4
    assert [name for file in files for name in sorted(file.names)] == sorted(infos)
    small = divide_evenly(infos, 10_000, ranks)
    assert max(file.data_bytes for file in small) <= 10_000 + 66 * 8 * 4


def everywhere(size, state_of, output, **options):
    return SimulatedWorld(size).run_all(lambda comm: publish(state_of(comm.rank), output, comm, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": {"x": object()}}, "config cannot be read or written as JSON"),
        ({"config": "/nowhere/config.json"}, "config cannot be read or written as JSON"),
        ({"max_file_bytes": 0}, "max_file_bytes has to be an integer >= 1"),
        ({"prefix": "q"}, "there is nothing to export"),
        ({"aoa_config": {"aoa_statements": ["no -> w"]}}, "no"),
        ({"coordinator_rank": 2}, "coordinator_rank counts within the process group"),
        ({"check_replicas": "all"}, "check_replicas is True or False"),
    ],
)
def test_what_does_not_fit_is_one_error_and_leaves_nothing(values, tmp_path, options, words):
    outcomes = everywhere(2, lambda rank: cut(values, rank, 2), tmp_path / "out", **options)
    assert all(isinstance(outcome, ValidationError) and words in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "out").exists()


def test_ranks_that_differ_are_told_in_what(values, tmp_path):
    def job(comm):
        return publish(cut(values, comm.rank, 2), tmp_path / "out", comm, max_file_bytes=1 << (20 + comm.rank))

    outcomes = SimulatedWorld(2).run_all(job)
    assert all(isinstance(each, ValidationError) and "max_file_bytes" in str(each) for each in outcomes)
    assert not (tmp_path / "out").exists()


def test_a_path_that_is_none_on_one_rank_is_an_error_on_all(values, tmp_path):
    outcomes = SimulatedWorld(2).run_all(
        lambda comm: publish(cut(values, comm.rank, 2), tmp_path / "out" if comm.rank == 0 else None, comm)
    )
    assert all(isinstance(each, ValidationError) and "[rank 1] path has to be a path" in str(each) for each in outcomes)
    assert not (tmp_path / "out").exists()


def test_a_limit_on_the_size_of_files_is_told_with_its_remedy(tmp_path):
    """And on whole checkpoints, exports and conversions."""
    state = {"w": np.ones(1 << 19, np.float32)}

    def in_background(path):
        with fc.BackgroundWriter() as writer:  # its process has the limit of this one
            fc.save_state_dict(state, path, async_save=writer).result()

    fc.save_state_dict(state, tmp_path / "saved")
    calls = [
        lambda path: publish(state, path),
        lambda path: SimulatedWorld(2).run(lambda comm: publish(state, path, comm)),
        lambda path: fc.save_state_dict(state, path),
        in_background,
        lambda path: export_safetensors(tmp_path / "saved", path),
        lambda path: fc.merge_sharded_state_dict(str(tmp_path / "saved"), str(path)),
    ]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, call in enumerate(calls):
        output = tmp_path / str(number)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with provoked("media/full_disks.py", "raise the limit on the size of a file (`ulimit -f`), and call again"):
                call(output)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not [*output.glob("*.safetensors")]
        call(output)
        assert len([*output.glob("*.safetensors")]) == 1


def test_an_output_that_is_in_use_is_left_as_it_is(values, tmp_path):
    (tmp_path / "readme").write_text("mine")
    outcomes = everywhere(2, lambda rank: cut(values, rank, 2), tmp_path)
    assert all("is not empty. Remedy" in str(outcome) for outcome in outcomes)
    assert os.listdir(tmp_path) == ["readme"]


def test_replicas_that_differ_are_an_error(values, tmp_path):
    def state(rank):
        return {"w": np.full(64, rank, np.float32)}

    outcomes = everywhere(2, state, tmp_path / "out")
    assert all(isinstance(outcome, CheckpointError) and "'w'" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "out").exists()
    assert not [
        each for each in everywhere(2, state, tmp_path / "out", check_replicas=False) if isinstance(each, Exception)
    ]


@pytest.mark.parametrize("how", ["owned", "sent"])
@pytest.mark.parametrize("call", ["__init__", "write_at", "make_durable", "rename"])
def test_a_rank_that_cannot_write_takes_back_what_all_wrote(values, tmp_path, monkeypatch, call, how):
    """In whichever thread it is."""
    if how == "sent":
        send(monkeypatch)
    owner = os if call == "rename" else OutputParts
    method = getattr(owner, call)

    def full(first, *arguments):
        path = first if call == "rename" else arguments[0] if call == "__init__" else first._path
        if "model-00003" in path:
            raise OSError(28, "No space left on device")
        return method(first, *arguments)

    monkeypatch.setattr(owner, call, full)
    outcomes = everywhere(3, lambda rank: cut(values, rank, 3), tmp_path / "out", config={})
    assert all(isinstance(each, CheckpointError) and "No space left" in str(each) for each in outcomes)
    assert all(("rank 0" if call == "rename" else "2") in str(each) for each in outcomes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["owned", "sent"])
def test_ranks_that_lose_one_when_all_is_written_leave_what_another_commits(values, tmp_path, monkeypatch, how):
    """A rank ends right after it has said that all is written: one hears that, and commits; the others do not."""
    if how == "sent":
        send(monkeypatch)
    together = SimulatedCommunicator.together

    def lossy(self, work, context=""):
        found = together(self, work, context)
        owner = getattr(getattr(work, "__func__", work), "__qualname__", "")
        written = owner.endswith("_write_owned") if how == "owned" else "_on_all" in owner
        if written and self.rank > 0:
            raise LostRankError("rank 2 has gone")
        return found

    monkeypatch.setattr(SimulatedCommunicator, "together", lossy)
    outcomes = SimulatedWorld(3).run_all(lambda comm: publish(cut(values, comm.rank, 3), tmp_path / "out", comm))
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    assert equal(published(tmp_path / "out"), {key: values[key] for key in WEIGHTS})


@pytest.mark.parametrize("lost", [LostRankError("rank 0 has gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("size", [1, 3])
def test_who_cannot_know_whether_the_model_is_there_leaves_its_files(values, tmp_path, monkeypatch, lost, size):
    """The rank that writes the index dies right after it, or a signal comes just then."""
    on_all = publishing.Publication._on_all

    def interrupted(self, work):
        on_all(self, work)
        if getattr(work, "__name__", "") == "_commit":
            raise lost

    monkeypatch.setattr(publishing.Publication, "_on_all", interrupted)
    outcomes = SimulatedWorld(3).run_all(
        lambda comm: publish(cut(values, comm.rank, 3) if size > 1 else {"w": values["m.a"]}, tmp_path / "out", comm)
    )
    assert all(type(outcome) is type(lost) for outcome in outcomes)
    expected = {key: values[key] for key in WEIGHTS} if size > 1 else {"w": values["m.a"]}
    assert equal(published(tmp_path / "out"), expected)


def test_an_index_that_is_not_durable_goes_before_the_files_that_it_names(values, tmp_path, monkeypatch):
    sync, seen = LocalBackend.sync, []

    def full(self):
        seen.append(sorted(os.listdir(tmp_path / "out")))
        if "model.safetensors.index.json" in seen[-1]:
            raise OSError(28, "No space left on device")
        return sync(self)

    remove = LocalBackend.remove

    def noted(self, name):
        if name.startswith("model-"):
            seen.append("index" if os.path.exists(tmp_path / "out" / "model.safetensors.index.json") else "no index")
        return remove(self, name)

    leave, others = publishing.Publication.__exit__, threading.Barrier(3)

    def in_order(self, *error):
        if self._leads:
            others.wait()
            leave(self, *error)
        else:
            leave(self, *error)
            others.wait()

    monkeypatch.setattr(LocalBackend, "sync", full)
    monkeypatch.setattr(LocalBackend, "remove", noted)
    monkeypatch.setattr(publishing.Publication, "__exit__", in_order)
    outcomes = everywhere(3, lambda rank: cut(values, rank, 3), tmp_path / "out")
    assert all(isinstance(each, CheckpointError) and "No space left" in str(each) for each in outcomes)
    assert "no index" in seen and "index" not in seen
    assert not (tmp_path / "out").exists()


class Killed(BaseException):
    """The process is gone: nothing is put right."""


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 600])
def test_killed_at_any_moment_it_is_whole_or_no_model(values, tmp_path, monkeypatch, max_file_bytes):
    calls, limit = [0], [0]

    def counted(function):
        def call(self, *arguments, **options):
            calls[0] += 1
            if calls[0] == limit[0]:
                raise Killed
            return function(self, *arguments, **options)

        return call

    (tmp_path / "probe").mkdir()
    writer = type(LocalBackend(tmp_path / "probe").create("probe"))
    for owner, names in (
        (LocalBackend, ("create", "sync", "make_directory")),
        (writer, ("write", "finish")),
        (OutputParts, ("__init__", "write_at", "make_durable")),
        (os, ("rename",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    monkeypatch.setattr(publishing.Publication, "__exit__", lambda *_: None)
    expected = {key: values[key] for key in WEIGHTS}
    whole = 0
    for limit[0] in range(1, 200):
        calls[0], output = 0, tmp_path / f"out{limit[0]}"
        try:
            SimulatedWorld(1).run(
                lambda comm: publish(cut(values, 0, 1), output, comm, max_file_bytes=max_file_bytes, config={})  # noqa: B023
            )
            break
        except Killed:
            names = os.listdir(output) if output.exists() else []
            if "model.safetensors" in names or "model.safetensors.index.json" in names:
                assert equal(published(output), expected)
                assert "config.json" in names
                whole += 1
    else:
        pytest.fail("it never came to its end")
    assert limit[0] > 15
    assert whole < limit[0] / 2
    assert equal(published(output), expected)
