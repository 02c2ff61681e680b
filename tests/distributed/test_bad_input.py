"""Bad input: one clear error, the same on every rank, and nothing changed."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
from tests.distributed import jobs_bad_input as jobs
from tests.saved import short

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

#: What every error has to say: key, rank, file, expected, got and remedy, as far as the case has them.
LOADS = {
    "wrong_path": ["{path}", "does not exist", "Remedy (FC301): correct the path"],
    "path_is_a_file": ["{path}", "is not a directory", "Remedy"],
    "not_a_checkpoint": ["{path}", "is not a checkpoint", "no *.manifest file", "Remedy"],
    "manifest_lost": ["{path}", "a save (id 0)", "its manifest has been lost", "or rebuild it: flexckpt repair"],
    "paddles_checkpoint_damaged": ["{path}", "0.metadata is damaged", "Remedy (FC305): restore the file"],
    "no_such_id": ["no checkpoint with id 4", "complete ids here: [0]"],
    "data_file_truncated": ["{path}/1_0-1.safetensors", "bytes; expected", "truncated", "Remedy"],
    "data_file_missing": ["{path}/1_0-1.safetensors is missing", "Remedy (FC304): restore the file"],
    "data_file_swapped": ["{path}/0_0-1.safetensors belongs to another save", "token", "Remedy"],
    "bit_flipped_in_data": [
        *("{path}/1_0-1.safetensors", "key 'w'", "saved by rank 1", "are damaged", "expected xxh3", "got"),
        *("Targets are partly overwritten", "Remedy (FC305): load another checkpoint"),
    ],
    "bit_flipped_in_manifest": ["{path}/0.manifest is damaged", "checksum", "or load another checkpoint"],
    "bit_flipped_in_manifest_header": ["{path}/0.manifest", "damaged"],
    "manifest_truncated": ["{path}/0.manifest is damaged"],
    "manifest_of_another_id": ["{path}/3.manifest is the manifest of id 0", "renamed"],
    "ranks_ask_for_different_ids": ["ranks disagree", "id 0", "id 1", "Remedy"],
}
TARGETS = {
    "key_missing_on_one_rank": ["[rank 1]", "no such key", "key 'model.v'", "expected", "got 2 keys", "Remedy"],
    "extra_key": ["no rank asks for key 'b'", "Remedy"],
    "dtype": ["dtypes differ", "key 'b', rank 1", "expected bfloat16 (target)", "got float32 (source)", "Remedy"],
    "dtype_that_no_cast_can_mend": ["a cast would lose", "key 'b'", "expected int32", "got float32", "Remedy"],
    "global_shape": ["[ranks 0-1] global shapes differ", "key 'w'", "expected [10, 6]", "got [8, 6]", "Remedy"],
    "number_of_axes": ["global shapes differ", "key 'b'", "expected [1, 6]", "got [6]", "Remedy"],
    "not_initialised": [
        "[rank 1]",
        "not initialised",
        "key 'b', rank 1",
        "got shape [6]",
        "Remedy (FC103): initialise it",
    ],
    "outside_its_global_shape": ["outside its global shape", "key 'w', rank 1", "expected", "got", "Remedy"],
    "local_shape_is_not_the_tensors": ["not the local shape", "key 'w'", "expected (8, 2)", "got (8, 3)"],
    "int_value": ["tensors and ShardedWeights only", "key 'step'", "[ranks 0-1]", "got 7 (int)", "Remedy"],
    "str_value": ["tensors and ShardedWeights only", "key 'name.of'", "got 'llama' (str)", "Remedy"],
    "name_is_no_string": ["names that are strings", "got 3"],
    "marked_is_distributed": ["is_distributed", "key 'b'", "Remedy (FC104): use model.sharded_state_dict()"],
    "partial_dist_tensor": [
        "Partial over mesh axis 0",
        "a term of a sum",
        "key 'b'",
        "Remedy (FC802): save what dist.reshard() makes",
    ],
    "aoa_config": ["[ranks 0-1] AOA statement 2", "'nowhere'", "w, nowhere -> w, axis=0", "Remedy"],
    "aoa_config_that_removes_what_feeds_a_target": [
        *("[ranks 0-1] nothing feeds a target", "key 'b'", "expected", "got a statement removes", "Remedy"),
    ],
    "aoa_config_that_gives_another_shape": ["AOA statement 1: w^T -> w", "gives 'w'", "[6, 8]", "[8, 6]", "Remedy"],
    "ranks_disagree_about_aoa_config": ["ranks disagree", "aoa_config", "Remedy"],
    "aoa_config_on_one_rank": ["ranks disagree", "aoa_config", "null", "Remedy"],
    "coordinator_out_of_range": ["coordinator_rank counts within the process group, 0 to 1; got 2"],
    "ranks_disagree_about_strict": ["ranks disagree", "strict", "Remedy"],
    "unknown_policy": ["dtype is 'raise' or 'cast'; got 'ignore'"],
    "not_a_dict": ["has to be a dict", "got a list"],
    "tied_targets_of_different_values": ["'b' and 'x' are one tied parameter", "two values", "Remedy"],
}
SOURCES = {
    "rank_omits_its_shard": ["no rank holds", "key 'w'", "expected", "got 24 elements", "Remedy"],
    "outside_its_global_shape": ["outside its global shape", "key 'w', rank 1", "expected", "got", "Remedy"],
    "overlapping_shards_disagree": ["disagree", "key 'w', rank 1", "expected", "got different values", "Remedy"],
    "ranks_differ_in_dtype": ["differ in dtype", "key 'b', rank 1", "float32", "got bfloat16", "Remedy"],
    "ranks_differ_in_global_shape": ["differ in global shape", "key 'b', rank 1", "[6]", "[7]", "Remedy"],
    "not_initialised": TARGETS["not_initialised"],
    "int_value": TARGETS["int_value"],
    "name_is_no_string": ["names that are strings", "key 'model.'", "got 3"],
    "same_name_twice": ["two entries of the nested state dict have the same name", "key 'a.b'"],
    "coordinator_out_of_range": ["coordinator_rank counts within the process group, 0 to 1; got -1"],
    "partial_dist_tensor": TARGETS["partial_dist_tensor"],
}
SAVES = {
    **SOURCES,
    "coordinator_out_of_range": ["coordinator_rank has to be an integer >= 0; got -1. Remedy"],
    "async_save_is_no_writer": ["async_save has to be a bool or a BackgroundWriter; got 'yes'"],
    "ranks_save_under_different_ids": ["ranks disagree", '"unique_id": 4', '"unique_id": 5', "Remedy"],
    "id_is_negative": ["unique_id has to be an integer >= 0; got -1"],
    "disk_full_on_one_rank": ["[rank 1]", "No space left on device"],
    "commit_fails": ["[rank 0]", "Input/output error"],
}
#: Statements that mean nothing, or not what the targets are.
ABOUT_STATEMENTS = {"aoa_config", "aoa_config_that_gives_another_shape"}
#: Problems of the disk, and those that only the values show; the others are found before anything is done.
NOT_VALIDATION = {
    "paddles_checkpoint_damaged",
    *("data_file_truncated", "data_file_missing", "data_file_swapped", "bit_flipped_in_data"),
    *("bit_flipped_in_manifest", "bit_flipped_in_manifest_header", "manifest_truncated", "manifest_of_another_id"),
    *("disk_full_on_one_rank", "commit_fails"),
}


def check_error(results, case, fragments):
    errors = [result[case]["error"] for result in results]
    assert errors[0] is not None, "nothing was said"
    assert errors[1] == errors[0], "the ranks do not say the same"
    kind, text = errors[0]
    assert (kind == "AoaError") == (case in ABOUT_STATEMENTS)
    assert (kind in ("ValidationError", "AoaError")) == (case not in NOT_VALIDATION)
    for fragment in fragments:
        assert fragment.format(path=results[0][case].get("path")) in short(text)
    return kind


def test_the_tables_are_whole():
    """Every case has an expectation, and the other way round."""
    assert sorted(LOADS) == sorted(jobs.LOADS)
    assert sorted(TARGETS) == sorted(jobs.TARGETS)
    assert sorted(SOURCES) == sorted(jobs.SOURCES)
    assert sorted(SAVES) == sorted(jobs.SAVES)


@pytest.fixture(scope="module")
def loads(world2, tmp_path_factory):
    return world2.run(jobs.loads, directory=str(tmp_path_factory.mktemp("loads")))


@pytest.mark.parametrize("case", [*LOADS, *TARGETS])
def test_load(loads, case):
    kind = check_error(loads, case, LOADS.get(case) or TARGETS[case])
    corrupt = case in LOADS and case in NOT_VALIDATION
    assert (kind == "CorruptCheckpointError") == corrupt
    for result in loads:
        assert result[case]["disk"]
        if case != "bit_flipped_in_data":  # which says that it overwrote
            assert result[case]["unchanged"]


@pytest.fixture(scope="module")
def reshards(world2):
    return world2.run(jobs.reshards)


@pytest.mark.parametrize("case", [*TARGETS, *(f"source: {case}" for case in SOURCES)])
def test_reshard(reshards, case):
    fragments = TARGETS[case] if case in TARGETS else SOURCES[case.removeprefix("source: ")]
    check_error(reshards, case, fragments)
    for result in reshards:
        assert result[case]["unchanged"]
        assert result["afterwards"]


def test_a_target_in_the_memory_of_a_source(reshards):
    fragments = [
        "shares memory with a source",
        "key 'w'",
        "rank 0",
        "expected memory of its own",
        "Remedy (FC107): clone",
    ]
    case = f"source: {jobs.TARGET_IN_SOURCE}"
    check_error(reshards, case, fragments)
    assert all(result[case]["unchanged"] for result in reshards)


@pytest.fixture(scope="module", params=[None, 0], ids=["under a new id", "in place of the old"])
def saves(request, world2, tmp_path_factory):
    results = world2.run(jobs.saves, directory=str(tmp_path_factory.mktemp("saves")), unique_id=request.param)
    return request.param, results


@pytest.mark.parametrize("case", list(SAVES))
def test_save(saves, case):
    unique_id, results = saves
    check_error(results, case, SAVES[case])
    for result in (result[case] for result in results):
        # Once all have written, only the next save removes anything; an id that was taken is not taken again.
        leaves = case == "commit_fails"
        assert result["disk"] == (not leaves), f"left behind: {result['files']}"
        assert leaves == any(name.endswith(".saving") for name in result["files"])
        assert result["old"]
        assert result["new"] == [unique_id if unique_id == 0 else 1 + leaves] * 2
        assert result["new is right"]


def test_what_looks_odd_and_is_right(world2, tmp_path):
    first, second = world2.run(jobs.fine, directory=str(tmp_path))
    # Rows 3 and 4 are stored twice: once per shard that holds them.
    total = 4 * (10 * 6 + 6)
    assert first == [True, True, total, 4 * (8 * 3 + 6)]
    assert second == [True, True, total, 0]


def test_a_flipped_bit_in_half_a_block(world2, tmp_path):
    """A part of a block is used only if the whole block is as it was written."""
    (kind, text), second = world2.run(jobs.half_a_block, directory=str(tmp_path))
    assert [kind, text] == second
    assert kind == "CorruptCheckpointError" and "'w'" in text and "expected xxh3" in text


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_called_with_no_group_or_path_leaves_nobody_waiting(world, tmp_path, size):
    answers = world(size).run(jobs.before_the_first_exchange, directory=str(tmp_path / "c"))
    said = {
        "group": "process_group has to be a group of paddle.distributed, 'self' or None; got 'all' (str)",
        "group of ranks": "process_group has to be a group of paddle.distributed, 'self' or None; got [0, 1] (list)",
        "path": "path has to be a path or URL as text or os.PathLike, or what open_storage() gives; got None",
    }
    for what, text in said.items():
        for call in answers[0][what]:
            (told,) = {tuple(answer[what][call]) for answer in answers}
            assert told[0] == "ValidationError", (what, call, told)
            assert f"[rank {size - 1}] {text}" in told[1], (what, call)
