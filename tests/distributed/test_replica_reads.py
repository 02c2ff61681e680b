"""Two ranks that saved replicas: each reads its own copy, and the other's where its own is damaged.

The jobs: what every rank has is saved by every rank, and one copy of it is damaged.
"""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.native.directory import CheckpointDirectory
from tests.native.samples import flip

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

# Three blocks.
SHAPE = (600, 1024)


def whole():
    return np.random.RandomState(7).randn(*SHAPE).astype("float32")


def own(rank):
    return np.arange(5, dtype="float32") + 10 * rank


def source():
    """``w`` and ``b`` on every rank, and of ``v`` a part that nobody else has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "w": paddle.to_tensor(whole()),
        "b": paddle.to_tensor(whole()[0]).astype("bfloat16"),
        "v": fc.ShardedWeight("v", paddle.to_tensor(own(rank)), (5,), (5 * world,), (5 * rank,)),
    }


def save(directory):
    report = fc.save_state_dict(source(), directory, save_replicas=True)
    return {"written": report.bytes_written, "total": report.total_bytes, "held": report.held_bytes}


def _equal(a, b):
    return a.dtype == b.dtype and bool((a.astype("float32") == b.astype("float32")).all())


class _Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def load(directory, keys=("w", "b", "v"), **options):
    """What a load reports, or its error; which targets are not what was saved; and the warnings of this rank."""
    expected = source()
    state = {}
    for key in keys:
        if key == "v":
            part = paddle.full([5], -1.0)
            state[key] = fc.ShardedWeight("v", part, (5,), expected[key].global_shape, expected[key].global_offset)
        else:
            state[key] = paddle.full(expected[key].shape, -1.0).astype(expected[key].dtype)
    heard = _Warnings()
    logger = logging.getLogger("paddle_flexckpt")
    logger.addHandler(heard)
    try:
        report, error = fc.load_state_dict(state, directory, **options), None
    except fc.CheckpointError as raised:
        report, error = None, (type(raised).__name__, str(raised))
    finally:
        logger.removeHandler(heard)
    local = {key: getattr(value, "local_tensor", value) for key, value in state.items()}
    wanted = {key: getattr(expected[key], "local_tensor", expected[key]) for key in keys}
    return {
        "error": error,
        "wrong": [key for key in keys if not _equal(local[key], wanted[key])],
        "touched": [key for key in keys if not _equal(local[key], paddle.full_like(local[key], -1.0))],
        "warnings": heard.texts,
        "report": report and report.as_dict(),
        "summary": report and report.summary(),
    }


# -- what is asserted -------------------------------------------------------------------------------------------------

BLOCK = 1 << 20
W_BYTES, B_BYTES, V_BYTES = 600 * 1024 * 4, 1024 * 2, 20
NEEDED = W_BYTES + B_BYTES + V_BYTES


@pytest.fixture(scope="module")
def saved(world2, tmp_path_factory):
    path = tmp_path_factory.mktemp("replicas") / "checkpoint"
    for report in world2.run(save, directory=str(path)):
        assert report == {"written": NEEDED, "total": 2 * NEEDED, "held": 2 * NEEDED}
    return path


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint")


def place_of(checkpoint, key, rank):
    """File and first byte of a rank's copy of a tensor."""
    catalog = CheckpointDirectory(str(checkpoint)).read_manifest().catalog
    (row,) = [r for r in range(len(catalog)) if (catalog.key_name(r), catalog.rank[r]) == (key, rank)]
    return checkpoint / catalog.file_name(row), int(catalog.byte_offset[row])


def damage(checkpoint, key, rank, byte):
    path, begin = place_of(checkpoint, key, rank)
    flip(path, begin + byte)


def load_on_both(world2, checkpoint, **options):
    return world2.run(load, directory=str(checkpoint), **options)


def test_without_damage_nothing_is_said(world2, checkpoint):
    for result in load_on_both(world2, checkpoint, verify="full"):
        assert (result["wrong"], result["error"], result["warnings"]) == ([], None, [])
        report = result["report"]
        assert report["replicas_used"] == {}
        assert report["bytes_read"] == report["bytes_verified"] == report["bytes_needed"] == NEEDED
        assert "replica" not in result["summary"]


@pytest.mark.parametrize("verify", ["read", "full"])
def test_a_damaged_block_is_read_from_the_other_ranks_file(world2, checkpoint, verify):
    damage(checkpoint, "w", 1, BLOCK + 5)
    first, second = load_on_both(world2, checkpoint, verify=verify)
    for result in (first, second):
        assert (result["error"], result["wrong"]) == (None, [])
        assert result["report"]["total_bytes"] == 2 * NEEDED
    assert (first["report"]["replicas_used"], first["warnings"]) == ({}, [])
    assert first["report"]["bytes_read"] == first["report"]["bytes_needed"] == NEEDED
    (text,) = second["report"]["replicas_used"].values()
    mine, theirs = place_of(checkpoint, "w", 1)[0], place_of(checkpoint, "w", 0)[0]
    assert list(second["report"]["replicas_used"]) == ["w"]
    assert f"file {str(mine)!r}, key 'w', saved by rank 1: bytes {BLOCK} to {2 * BLOCK} of the shard" in text
    assert text.endswith(f"read from file {str(theirs)!r}, key 'w', saved by rank 0 instead")
    # The damaged block, once.
    assert second["report"]["bytes_read"] == NEEDED + BLOCK
    assert second["report"]["bytes_verified"] == NEEDED
    assert second["report"]["bytes_extra"] == BLOCK
    (warning,) = second["warnings"]
    assert warning.startswith(f"rank 1: {checkpoint} is damaged: a tensor was read from replicas, such as 'w': ")
    assert text in warning
    assert "1 read from replicas on this rank, as copies of them are damaged" in second["summary"]


def test_a_file_that_is_gone_is_made_up_for_as_far_as_there_are_replicas(world2, checkpoint):
    path = place_of(checkpoint, "w", 0)[0]
    path.unlink()
    other = place_of(checkpoint, "w", 1)[0]
    first, second = load_on_both(world2, checkpoint, keys=("w", "b"))
    for result in (first, second):
        assert (result["error"], result["wrong"]) == (None, [])
        assert result["report"]["bytes_read"] == W_BYTES + B_BYTES
        assert result["report"]["bytes_extra"] == 0
    assert second["report"]["replicas_used"] == {}
    assert sorted(first["report"]["replicas_used"]) == ["b", "w"]
    for key, text in first["report"]["replicas_used"].items():
        assert text == (
            f"{path} is missing; the manifest names it; read from file {str(other)!r}, key {key!r}, saved by rank 1 "
            "instead"
        )
    assert "2 tensors were read from replicas" in first["warnings"][0]
    # What rank 0 alone had is lost, and that is an error on both ranks, before anything is read.
    results = load_on_both(world2, checkpoint)
    assert results[0]["error"] == results[1]["error"]
    kind, text = results[0]["error"]
    assert kind == "CorruptCheckpointError"
    assert f"{path} is missing" in text
    assert [result["touched"] for result in results] == [[], []]


def test_without_permission_damage_is_an_error_on_both_ranks(world2, checkpoint):
    damage(checkpoint, "w", 1, 0)
    results = load_on_both(world2, checkpoint, use_replicas=False)
    assert results[0]["error"] == results[1]["error"]
    kind, text = results[0]["error"]
    assert kind == "CorruptCheckpointError"
    assert "saved by rank 1: bytes 0 to 1048576 of the shard" in text
    assert "replica" not in text
    assert not any(result["warnings"] for result in results)


def test_damage_to_all_copies_is_an_error_that_names_them_on_both_ranks(world2, checkpoint):
    for rank in (0, 1):
        damage(checkpoint, "w", rank, 2 * BLOCK + 100 + rank)
    results = load_on_both(world2, checkpoint)
    assert results[0]["error"] == results[1]["error"]
    kind, text = results[0]["error"]
    assert kind == "CorruptCheckpointError"
    for rank in (0, 1):
        assert f"saved by rank {rank}: bytes {2 * BLOCK} to {W_BYTES} of the shard" in text
    assert "nor can its replica be read: " in text
    assert not fc.verify_checkpoint(checkpoint).recoverable


def test_copies_damaged_in_different_blocks_still_make_a_whole(world2, checkpoint):
    damage(checkpoint, "w", 0, 10)
    damage(checkpoint, "w", 1, 2 * BLOCK + 10)
    assert fc.verify_checkpoint(checkpoint).recoverable
    for rank, result in enumerate(load_on_both(world2, checkpoint, verify="full")):
        assert (result["error"], result["wrong"]) == (None, [])
        assert list(result["report"]["replicas_used"]) == ["w"]
        assert result["report"]["bytes_verified"] == NEEDED
        # Each reads the damaged block of its own copy in vain. Threads read the blocks: where one finds the damage
        # before another begins, that one turns to the other copy, and reads the damaged block of it in vain too.
        own, both = BLOCK if rank == 0 else W_BYTES - 2 * BLOCK, W_BYTES - BLOCK
        assert result["report"]["bytes_extra"] in (own, both)


def test_whole_tensors_in_one_process(checkpoint):
    damage(checkpoint, "w", 0, 0)
    merged = fc.load_merged_state_dict(checkpoint)
    assert bytes(merged["w"].numpy().tobytes()) == whole().tobytes()
    with pytest.raises(fc.CorruptCheckpointError, match="bytes 0 to 1048576"):
        fc.load_merged_state_dict(checkpoint, use_replicas=False)
