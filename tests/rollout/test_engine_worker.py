"""A worker of an engine: what it refuses, and that a model is of one version on all ranks, whatever fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.rollout.engine_worker import EngineWorker, LiveComparison, answer
from paddle_flexckpt.rollout.segment import digest_of, place_of_directory
from tests.rollout.numpy_engine import NumpyEngine, model_directory, segment, weights, workers

BASE, ONE, TWO = weights(1), weights(2), weights(3)


class Ranks:
    """Two ranks of an engine, which all take each call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engines, self.workers = workers(model_directory(path / "model", BASE), BASE, 2)

    def call(self, name: str, *arguments: object) -> list[dict]:
        return [answer(rank, getattr(worker, name), arguments) for rank, worker in enumerate(self.workers)]

    def stage(self, version: str, arrays: dict[str, np.ndarray]) -> None:
        path = segment(self.path / f"{version}.safetensors", arrays)
        assert all(each["ok"] for each in self.call("stage", version, path))

    def commit(self, version: str, arrays: dict[str, np.ndarray]) -> list[bool]:
        self.stage(version, arrays)
        return [each["ok"] for each in self.call("commit", version)]

    def versions(self) -> list[str]:
        return [each["version"] for each in self.call("status")]

    def hold(self, arrays: dict[str, np.ndarray]) -> bool:
        return all(engine.holds(arrays) for engine in self.engines)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_a_version_is_staged_committed_and_accepted(ranks: Ranks) -> None:
    ranks.stage("1", ONE)
    assert ranks.hold(BASE)
    assert {(each["staged"], *each["segments"]) for each in ranks.call("status")} == {("1", "1.safetensors")}
    assert [each["ok"] for each in ranks.call("commit", "1")] == [True, True]
    assert ranks.hold(ONE)
    assert {(each["version"], each["accepted"], each["staged"]) for each in ranks.call("status")} == {
        ("1", "base", None)
    }
    # The base has no segment.
    assert [each["released"] for each in ranks.call("accept", "1")] == [True, True]
    assert ranks.commit("2", TWO) == [True, True]
    assert [each["segments"] for each in ranks.call("status")] == [["1.safetensors", "2.safetensors"]] * 2
    assert [each["released"] for each in ranks.call("accept", "2")] == [True, True]
    assert [each["released"] for each in ranks.call("accept", "2")] == [True, True]
    assert [each["segments"] for each in ranks.call("status")] == [["2.safetensors"]] * 2
    assert ranks.hold(TWO)


def test_a_segment_that_the_model_still_uses_is_not_released(ranks: Ranks) -> None:
    ranks.engines[1].keeps = True
    ranks.commit("1", ONE)
    ranks.call("accept", "1")
    ranks.engines[1].failing_loads = [2]  # half of the model still lies in the segment of version 1
    ranks.commit("2", TWO)
    ranks.engines[1].failing_loads = []
    assert all(each["ok"] for each in ranks.call("rollback"))
    assert ranks.hold(ONE)
    kept = ranks.engines[1].model["head"]
    assert ranks.commit("3", TWO) == [True, True]
    assert [each["released"] for each in ranks.call("accept", "3")] == [True, False]
    assert np.array_equal(kept, ranks.engines[1].part(ONE["head"]))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_a_commit_that_fails_on_a_rank_is_rolled_back_on_all(ranks: Ranks, failing: int, first: bool) -> None:
    before, version = BASE, "base"
    if not first:
        before, version = ONE, "1"
        ranks.commit("1", ONE)
        ranks.call("accept", "1")
    ranks.engines[failing].failing_loads = [2]
    assert ranks.commit("2", TWO) == [rank != failing for rank in range(2)]
    assert ranks.versions() == ["undefined" if rank == failing else "2" for rank in range(2)]
    assert not ranks.hold(before)
    assert [each["version"] for each in ranks.call("rollback")] == [version] * 2
    assert ranks.hold(before)
    assert ranks.versions() == [version] * 2
    assert ranks.commit("3", TWO) == [True, True]
    assert ranks.hold(TWO)


def test_a_way_back_that_never_came_leads_all_ranks_to_the_same_version(ranks: Ranks) -> None:
    ranks.commit("1", ONE)
    ranks.call("accept", "1")
    ranks.engines[1].failing_loads = [1, 1]
    assert ranks.commit("2", TWO) == [True, False]
    # The sender is lost. The next one sends all again, and fails as well.
    assert ranks.commit("3", weights(4)) == [True, False]
    assert [each["version"] for each in ranks.call("rollback")] == ["1", "1"]
    assert ranks.hold(ONE)


def test_a_version_that_was_never_accepted_is_replaced(ranks: Ranks) -> None:
    ranks.commit("1", ONE)
    assert ranks.commit("2", TWO) == [True, True]
    assert [each["released"] for each in ranks.call("accept", "2")] == [True, True]
    assert ranks.hold(TWO)


def test_a_rollback_without_a_commit_drops_what_is_staged(ranks: Ranks) -> None:
    ranks.stage("1", ONE)
    assert all(each["ok"] for each in ranks.call("rollback"))
    assert [engine.loads for engine in ranks.engines] == [0, 0]
    assert {each["staged"] for each in ranks.call("status")} == {None}


def test_after_a_rollback_that_fails_the_engine_has_to_be_restarted(ranks: Ranks) -> None:
    ranks.engines[1].failing_loads = [2, 3]
    ranks.commit("1", ONE)
    good, bad = ranks.call("rollback")
    assert (good["ok"], bad["ok"]) == (True, False)
    assert "injected fault at layers.0.up" in bad["error"]
    assert [each["needs_restart"] for each in ranks.call("status")] == [False, True]
    path = segment(ranks.path / "2.safetensors", TWO)
    for name, *arguments in (("stage", "2", path), ("commit", "2"), ("rollback",)):
        assert "restart the engine" in ranks.call(name, *arguments)[1]["error"]
    assert ranks.versions()[1] == "undefined"
    assert ranks.engines[1].loads == 2


def without(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in arrays.items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (without(ONE, "head"), "; expected F32 [8, 6]; got no such tensor"),
        ({**ONE, "lm_head": ONE["head"]}, "; expected no such tensor; got F32 [8, 6]"),
        ({**ONE, "head": ONE["head"][:4]}, "; expected F32 [8, 6]; got F32 [4, 6]"),
        ({**ONE, "head": ONE["head"].astype(np.float16)}, "; expected F32 [8, 6]; got F16 [8, 6]"),
    ],
)
def test_a_segment_that_does_not_fit_is_refused(ranks: Ranks, arrays: dict[str, np.ndarray], message: str) -> None:
    worker = ranks.workers[0]
    worker.stage("1", segment(ranks.path / "1.safetensors", ONE))
    with pytest.raises(ValidationError) as error:
        worker.stage("2", segment(ranks.path / "2.safetensors", arrays))
    assert message in str(error.value)
    text = "version 2 does not fit the engine's model: a tensor is not as in the engine's checkpoint (key '"
    assert str(error.value).startswith(text)
    assert worker.status()["staged"] is None
    assert ranks.hold(BASE)


@pytest.mark.parametrize("given", [True, False])
def test_a_segment_that_changes_after_it_was_written_is_not_served(ranks: Ranks, given: bool) -> None:
    """Neither by a commit, nor by a roll-back."""
    assert ranks.commit("1", ONE) == [True, True]
    ranks.call("accept", "1")
    path = Path(segment(ranks.path / "2.safetensors", TWO))
    digest = digest_of(np.fromfile(path, np.uint8))
    if not given:
        ranks.call("stage", "2", str(path))
    flip(path)
    if given:
        ranks.call("stage", "2", str(path), digest)
    for each in ranks.call("commit", "2"):
        assert each["error"] == f"CorruptCheckpointError: the segment {path} has changed since it was written"
    assert ranks.hold(ONE)
    assert [each["version"] for each in ranks.call("rollback")] == ["1", "1"]
    ranks.stage("3", TWO)
    ranks.call("commit", "3")
    flip(ranks.path / "1.safetensors")
    for each in ranks.call("rollback"):
        assert "has changed since it was written" in each["error"]
    assert [each["needs_restart"] for each in ranks.call("status")] == [True, True]


def flip(path: Path) -> None:
    """Change the last byte in place, as a process that has it mapped does."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_a_truncated_segment_is_refused(ranks: Ranks) -> None:
    path = Path(segment(ranks.path / "1.safetensors", ONE))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError, match="its tensors end at byte"):
        ranks.workers[0].stage("1", str(path))
    with pytest.raises(FileNotFoundError):
        ranks.workers[0].stage("1", str(ranks.path / "nothing"))
    assert not ranks.call("stage", "1")[0]["ok"]  # an argument is missing


@pytest.mark.parametrize("name", ["", "base", "undefined"])
def test_names_that_no_version_can_have(ranks: Ranks, name: str) -> None:
    with pytest.raises(ValidationError, match=f"a version cannot have the name {name!r}"):
        ranks.workers[0].stage(name, segment(ranks.path / "1.safetensors", ONE))


def test_other_versions_than_the_staged_one_are_refused(ranks: Ranks) -> None:
    worker = ranks.workers[0]
    with pytest.raises(ValidationError, match="version 1 cannot be committed: nothing is staged"):
        worker.commit("1")
    ranks.stage("1", ONE)
    with pytest.raises(ValidationError, match="version 2 cannot be committed: version 1 is staged"):
        worker.commit("2")
    assert worker.status()["staged"] == "1"
    with pytest.raises(ValidationError, match="version 1 cannot be accepted: the worker holds version base"):
        worker.accept("1")
    assert worker.discard() == {"released": True}
    with pytest.raises(ValidationError, match="nothing is staged"):
        worker.commit("1")
    assert ranks.hold(BASE)


def test_the_first_way_back_needs_the_files_that_the_engine_was_started_from(ranks: Ranks) -> None:
    ranks.engines[0].failing_loads = [1]
    ranks.commit("1", ONE)
    model_directory(ranks.path / "model", {name: array[:, :1] for name, array in BASE.items()})
    answers = ranks.call("rollback")
    assert ["have changed since it started" in each["error"] for each in answers] == [True, True]
    assert [each["needs_restart"] for each in ranks.call("status")] == [True, True]


def test_a_model_without_safetensors_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="is no directory with safetensors files"):
        EngineWorker(NumpyEngine(BASE), str(tmp_path))


def test_status_names_the_process_and_the_place(ranks: Ranks) -> None:
    status = ranks.call("status", str(ranks.path))
    assert {each["place"] for each in status} == {place_of_directory(str(ranks.path))} != {place_of_directory("/")}
    assert {each["protocol"] for each in status} == {3}


def digests(version: str, arrays: dict[str, np.ndarray]) -> str:
    """Digests of two parts of each tensor, without its first column."""
    regions = []
    for name, array in arrays.items():
        columns = array.shape[1]
        for start, stop in ((0, 3), (3, len(array))):
            box = np.ascontiguousarray(array[start:stop, 1:])
            regions.append([name, start * columns + 1, box.shape, [columns, 1], xxhash.xxh3_128_hexdigest(box)])
    return json.dumps({"version": version, "regions": regions})


@pytest.mark.parametrize("version", ["base", "1"])
def test_digests_of_received_bytes_and_of_live_parameters(ranks: Ranks, version: str) -> None:
    arrays = BASE
    if version == "1":
        arrays = ONE
        ranks.commit("1", ONE)
    for each in ranks.call("digests", digests(version, arrays)):
        assert (each["compared"], each["different"], each["live_compared"], each["live_different"]) == (8, 0, 4, 0)
    ranks.engines[1].model["head"] = ranks.engines[1].model["head"] + 1
    other = digests(version, {**arrays, "embed": arrays["embed"] + 1})
    for rank, each in enumerate(ranks.call("digests", other)):
        assert (each["different"], each["different_names"]) == (1, ["embed"])
        assert each["live_different_names"] == ["head"] * rank


def test_digests_name_what_could_not_be_read(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveComparison(1, [f"t{i}" for i in range(30)], {f"u{i}": "packed" for i in range(30)})
    monkeypatch.setattr(ranks.engines[0], "compare", lambda tensors: live)
    result = ranks.workers[0].digests(digests("base", BASE))
    assert (result["live_different"], len(result["live_different_names"])) == (30, 20)
    assert (result["live_unreadable"], len(result["live_unreadable_names"])) == (30, 20)


def test_digests_of_another_version_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ValidationError, match="the digests are of version 9, the worker holds base"):
        ranks.workers[0].digests(json.dumps({"version": "9", "regions": []}))


@pytest.mark.parametrize(
    "region",
    [
        ["head", 1, [8, 6], [6, 1], ""],
        ["head", 0, [9, 6], [6, 1], ""],
        ["head", -1, [1], [1], ""],
        ["x", 0, [1], [1], ""],
    ],
)
def test_digests_of_regions_that_are_not_there_are_refused(ranks: Ranks, region: list) -> None:
    with pytest.raises(ValidationError, match=rf"the version has no elements \[.*\(key '{region[0]}'\)"):
        ranks.workers[0].digests(json.dumps({"version": "base", "regions": [region]}))


def test_an_answer_is_a_status_whatever_is_raised() -> None:
    class Panic(BaseException):
        """As a module in Rust raises."""

    def fail(error: BaseException) -> dict:
        raise error

    assert answer(3, fail, [Panic("no")], {"call": "7"}) == {"ok": False, "rank": 3, "call": "7", "error": "Panic: no"}
    assert answer(3, fail, [CheckpointError("no")])["error"] == "CheckpointError: no"
    with pytest.raises(SystemExit):  # the engine ends this process
        answer(3, fail, [SystemExit()])


def test_an_owner_refuses_the_changes_of_others(ranks: Ranks) -> None:
    ranks.stage("1", ONE)

    def call(name: str, *arguments: str, owner: str) -> list[dict]:
        return [answer(0, getattr(worker, name), arguments, {"owner": owner}) for worker in ranks.workers]

    assert all(each["ok"] for each in call("begin", "a", owner=""))
    assert {(each["owner"], each["staged"]) for each in ranks.call("status")} == {("a", None)}
    assert {each["error"] for each in call("begin", "b", owner="")} == {"OwnerError: 'a' switches this engine now"}
    path = segment(ranks.path / "2.safetensors", TWO)
    assert all(each["ok"] for each in call("stage", "2", path, owner="a"))
    assert all(each["ok"] for each in call("begin", "a", owner="a"))
    assert {each["staged"] for each in ranks.call("status")} == {"2"}
    assert all(each["ok"] for each in call("begin", "b", owner="a"))
    for name, arguments in (("stage", ["2", path]), ("commit", ["2"]), ("rollback", []), ("accept", ["base"])):
        for owner in ("", "a"):
            assert {each["error"].partition(",")[0] for each in call(name, *arguments, owner=owner)} == {
                "OwnerError: 'b' switches this engine now"
            }
    assert ranks.hold(BASE)
    assert all(each["ok"] for each in call("begin", "", owner="b"))
    assert {each["error"] for each in call("rollback", owner="b")} == {
        "OwnerError: nobody switches this engine now, and not 'b'"
    }
    assert ranks.commit("2", TWO) == [True, True]
