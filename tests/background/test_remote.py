"""Asynchronous saves to remote storage: the writer reaches it by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("fsspec")

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native.directory import CheckpointDirectory, is_complete
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import load, load_shards, save, shards, stopped
from tests.saved import short_names


def test_a_file_system_in_this_process_is_refused(writers):
    url = "memory://flexckpt-background/run"
    with pytest.raises(ValidationError) as caught:
        save(url, 1, writers())
    assert (
        f"{url} is in the memory of this process, where no other process can save. Remedy (FC406): save synch"
        in str(caught.value)
    )
    assert CheckpointDirectory(url).list_ids() == []
    save(url, 1)
    assert load(url) == 1


@pytest.fixture(scope="module")
def server():
    for module in ("moto.server", "s3fs", "flask_cors"):
        pytest.importorskip(module)
    from tests.s3_server import running_server

    with running_server() as running:
        yield running


def test_two_ranks_save_to_s3(server):
    storage = server.storage(server.new_url())
    with BackgroundWriter() as first, BackgroundWriter() as second:
        pair = first, second
        for version in (1, 2):
            handles = SimulatedWorld(2).run(
                lambda comm: save_state_dict(
                    shards(comm.position, 2, version), storage, comm, async_save=pair[comm.position]  # noqa: B023
                )
            )  # fmt: skip
            assert {handle.result().unique_id for handle in handles} == {version - 1}
    assert [load_shards(storage, 2, unique_id) for unique_id in (0, 1)] == [1, 2]
    assert is_complete(storage, 0)
    assert is_complete(storage, 1)
    # The lease has been given back, by the writer.
    left = short_names(key.rpartition("/")[2] for key in server.objects(storage.path))
    assert left == sorted(
        [f"{rank}_{i}-{i + 1}.safetensors" for rank in (0, 1) for i in (0, 1)] + ["0.manifest", "1.manifest"]
    )


def test_a_lease_is_kept_up_while_a_save_waits_for_its_writer(server, writers):
    storage = server.storage(server.new_url(), lease_seconds=15.0)
    writer = writers()
    with stopped(writer):
        handle = save(storage, 1, writer)
        # Whoever wants the lease watches it for its whole time, unless it is renewed meanwhile.
        with pytest.raises(CheckpointError, match="another save is writing to"):
            open_to_save(server.storage(storage.path, lease_seconds=15.0)).lock()
    handle.result()
    assert load(storage) == 1
    open_to_save(storage).lock().release()


def test_a_bucket_that_is_not_there_is_an_error(server, writers):
    storage = server.storage("s3://no-such-bucket/run")
    with pytest.raises(CheckpointError, match="no-such-bucket"):
        save(storage, 1, writers())
