"""Saves to a simulated object store that is slow, fails, answers late and lists what was there before."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("greenlet")

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import TakenError
from paddle_flexckpt.media import remote
from tests.saved import short, short_names
from tests.simulated import object_store
from tests.simulated.object_store import Fate, ServerError
from tests.simulated.tasks import Process
from tests.simulation.store_world import FAULTS, PART_BYTES, StoreWorld, compete, store_world

URL = "s3://bucket/run"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(remote, "LEAST_PART_BYTES", PART_BYTES)


@pytest.mark.parametrize("protocol", ["s3", "gs", "oss", "sftp"])
def test_a_checkpoint_is_saved_loaded_and_replaced(protocol):
    url = f"{protocol}://bucket/run"
    with store_world() as world:
        for version in (1, 2):
            world.call(lambda: world.save(url, version))  # noqa: B023
            assert world.call(lambda: world.load(url)) == version
        assert short_names(world.names("bucket/run")) == ["0.manifest", "0_0-2.safetensors"]
        assert not world.store.uploads
        assert {fate for _, fate in world.store.counts} == {"done"}


def test_the_same_seed_is_the_same_run():
    def story(seed: int) -> list[tuple[float, str]]:
        with store_world(seed, shares=FAULTS) as world:
            world.call(lambda: world.try_save(URL, 1))
            return [(when, f"{effect.kind} {short(effect.key)}") for when, effect, _ in world.effects]

    assert story(5) == story(5) != story(6)


def test_an_object_is_not_created_before_it_was_removed():
    """Requests pass each other on their way; the server does not say that it has done what has no effect."""
    with store_world() as world:
        store, key, answers = world.store, "bucket/lease", []

        def ask(action: Callable[[], object]) -> None:
            try:
                answers.append(store.request("ask", key, lambda: bool(action())))
            except ServerError as error:
                answers.append(error.status)

        world.call(lambda: ask(lambda: store.put(key, b"1", new=True)))
        latencies = iter((2.0, 0.5))  # what is asked last is done first
        with mock.patch.object(world.scheduler.random, "uniform", lambda low, high: next(latencies)):
            world.start(lambda: ask(lambda: store.put(key, b"2", new=True)))
            world.scheduler.run(until=world.scheduler.now + 0.1)
            world.call(lambda: ask(lambda: store.delete(key)))
        assert answers == [True, True, 409]
        assert not store.objects


@pytest.mark.parametrize("fate", ["lost", "refused", "reset", "cut"])
def test_each_request_that_fails_is_made_once_more(fate):
    """Every fourth; a retry of a request that had taken effect meets its own effect."""
    with store_world(3) as world:
        world.call(lambda: world.save(URL, 1))
        good = sum(world.store.counts.values())
    with store_world(3) as world:
        fates = iter(("done", "done", "done", fate) * good)
        world.store.script = lambda operation, key, process: next(fates)
        world.call(lambda: world.save(URL, 1))
        failed = world.requests(fate=fate)
        assert failed > 5
        # What meets its own effect looks at it, and then knows already whether the store keeps conditions.
        assert good - 3 <= world.requests(fate="done") <= good + 4
        world.store.script = None
        assert world.call(lambda: world.load(URL)) == 1
        assert not world.store.uploads


def test_an_outage_that_is_longer_than_all_retries_ends_in_one_error_and_a_save_after_it_cleans_up():
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))

        def main() -> None:
            world.scheduler.after(0.3, lambda: world.store.fail(3600))
            world.save(URL, 2)

        with pytest.raises(CheckpointError, match=r"cannot save to 's3://bucket/run': \[rank 0\]"):
            world.call(main)
        world.scheduler.run(until=4000)
        assert world.call(lambda: world.load(URL)) == 1
        world.call(lambda: world.save(URL, 3))
        assert world.call(lambda: world.load(URL)) == 3
        assert len(world.names("bucket/run")) == 2


def test_credentials_that_allow_no_change():
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))
        world.store.is_read_only = True
        with pytest.raises(CheckpointError, match="PermissionError"):
            world.call(lambda: world.save(URL, 2))
        assert world.call(lambda: world.load(URL)) == 1


@pytest.mark.parametrize("conditions", ["kept", "ignored", "refused", "unknown"])
def test_of_two_that_save_at_a_time_one_saves(conditions):
    """Whatever the store makes of conditions: the lease decides, and the one that is refused says so."""
    for seed in range(4):
        with store_world(seed, conditions=conditions) as world:
            for version in (1, 2):
                world.start(lambda version=version: world.try_save(URL, version), f"saver {version}")
            world.scheduler.run(steps=500_000)
            assert len(world.done) >= 1, world.failed
            assert all(type(error) in (CheckpointError, TakenError) for error in world.failed.values())
            for error in world.failed.values():
                assert "another save is writing to" in str(error)
            assert world.call(lambda: world.load(URL)) == world.done[-1]


@pytest.mark.parametrize("protocol", ["s3", "oss", "sftp"])
def test_a_request_of_a_dead_process_takes_effect_or_does_not(protocol):
    """Kill a saver while a change is on its way: the old checkpoint or the new one is there, and the next cleans up."""
    url, seen, latency = f"{protocol}://bucket/run", set(), (0.05, 0.5)

    def run(world: StoreWorld, death: float) -> None:
        world.call(lambda: world.save(url, 1))
        saver = world.start(lambda: world.try_save(url, 2), "saver")
        world.scheduler.after(death - world.scheduler.now, saver.kill)
        world.scheduler.run(until=60)

    for seed in range(2 if protocol == "s3" else 1):
        with store_world(seed, latency=latency) as world:
            run(world, 59.0)
            changes = [when for when, _, version in world.effects if version == 2]
        for change in changes:
            with store_world(seed, latency=latency) as world:
                run(world, change - 0.01)
                late = [when for when, _, version in world.effects if version == 2 and when > change - 0.01]
                assert all(when <= change + 0.5 for when in late)
                version = world.call(lambda: world.load(url))
                seen.add((version, bool(late)))
                world.call(lambda: world.save(url, 3))
                assert world.call(lambda: world.load(url)) == 3
                assert len(world.names("bucket/run")) == 2, world.names("bucket/run")
    assert {version for version, _ in seen} == {1, 2}
    assert {late for _, late in seen} == {True, False}


@pytest.mark.parametrize(
    ("protocol", "conduct"),
    [
        ("s3", {"shares": FAULTS}),
        ("s3", {"shares": FAULTS, "stale_lists": 60.0}),
        ("s3", {"shares": {**FAULTS, "hung": 0.01, "late": 0.01}}),
        ("s3", {"shares": FAULTS, "conditions": "ignored"}),
        ("s3", {"shares": FAULTS, "conditions": "refused", "page": 2}),
        ("gs", {"shares": FAULTS, "stale_lists": 60.0}),
        ("oss", {"shares": FAULTS, "stale_lists": 60.0}),
        ("sftp", {"shares": FAULTS}),
    ],
)
def test_what_was_reported_saved_is_there_until_it_is_replaced(protocol, conduct):
    """Savers that die, stop and exclude each other on a store that fails and lists what was there before."""
    url, saves = f"{protocol}://bucket/run", 0
    # With lower seeds a saver stops between its last look at the lease and its commit: a store without conditions
    # cannot refuse that.
    begin = {"refused": 1, "ignored": 2}.get(str(conduct.get("conditions")), 0)
    for seed in range(begin, begin + 3):
        with store_world(seed, **conduct) as world:
            compete(world, url)
            saves += len(world.done)
            puts = [version for _, effect, version in world.effects if effect.key == "bucket/run/0.manifest"]
            world.store.behave(shares={}, stale_lists=0.0)
            # The last one that was put in place, whether its saver lived to say so or not.
            assert not puts or world.call(lambda: world.load(url)) == puts[-1]
            assert set(world.done) <= set(puts)
            assert not world.broken
            world.call(lambda: world.save(url, 1000))
            assert world.call(lambda: world.load(url)) == 1000
            if protocol == "s3" and "late" not in conduct["shares"]:
                assert not world.store.uploads
            assert len(world.names("bucket/run")) == 2, world.names("bucket/run")
    assert saves >= 5


def test_a_last_look_that_takes_longer_than_the_lease_is_followed_by_another():
    """The lease was held when it was looked at, beside a listing that hangs; then somebody else takes it, and saves."""
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))
        slow = world.start(lambda: world.try_save(URL, 2), "slow")
        looks: list[float] = []

        def script(operation: str, key: str, process: Process) -> Fate:
            if process is not slow:
                return "done"
            now = world.scheduler.now
            if operation == "list":
                looks.append(now)
                if len(looks) == 2:
                    world.scheduler.after(2, lambda: world.start(lambda: world.try_save(URL, 3), "other"))
                    return "hung"
            # So are renewals.
            return "hung" if key.endswith(".lease") and len(looks) == 2 and now > looks[1] + 1 else "done"

        world.store.script = script
        world.scheduler.run(steps=500_000)
        assert world.done == [1, 3]
        assert "has taken over the right to save" in str(world.failed[2])
        assert world.call(lambda: world.load(URL)) == 3


def test_each_try_to_put_the_manifest_in_place_needs_the_lease():
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))
        slow = world.start(lambda: world.try_save(URL, 2), "slow")
        tries: list[float] = []

        def script(operation: str, key: str, process: Process) -> Fate:
            now = world.scheduler.now
            if process is slow and operation == "put" and key.endswith(".manifest"):
                tries.append(now)
                if len(tries) == 1:
                    world.scheduler.after(2, lambda: world.start(lambda: world.try_save(URL, 3), "other"))
                    return "hung"
            return "hung" if process is slow and tries and now < tries[0] + 59 else "done"

        world.store.script = script
        world.scheduler.run(steps=500_000)
        assert world.done == [1, 3]
        assert len(tries) == 1
        assert "has taken over the right to save" in str(world.failed[2])
        assert world.call(lambda: world.load(URL)) == 3


def test_a_manifest_that_may_still_arrive_is_not_called_a_failure():
    found = set()
    for seed in range(6):
        with store_world(seed) as world:
            world.call(lambda: world.save(URL, 1))
            world.store.behave(late_seconds=600.0)
            world.store.script = fates_of_manifests("late", *["refused"] * 5)
            world.call(lambda: world.try_save(URL, 2))
            assert "it is not known what became of the save to s3://bucket/run (id 0)" in str(world.failed[2])
            world.scheduler.run(until=world.scheduler.now + 600)
            found.add(world.call(lambda: world.load(URL)))
    # What a dead process had sent may never be read.
    assert found == {1, 2}


@pytest.mark.parametrize("protocol", ["s3", "gs"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_manifest_that_arrives_late_does_not_replace_that_of_a_later_save(protocol, is_first):
    url = f"{protocol}://bucket/run"
    if protocol == "gs" and not is_first:
        pytest.skip("gcsfs has no condition but that there be no object")
    for seed in range(6):  # what a dead process had sent may never be read
        with store_world(seed) as world:
            if not is_first:
                world.call(lambda: world.save(url, 1))
            world.store.behave(late_seconds=600.0, overtakes=True)
            world.store.script = fates_of_manifests("late", *["refused"] * 5, *["done"] * 5)
            world.start(lambda: world.try_save(url, 2))
            world.scheduler.after(150, lambda: world.start(lambda: world.save(url, 3)))
            world.scheduler.run(steps=500_000)
            assert "it is not known what became of the save" in str(world.failed[2])
            assert not world.broken
            assert world.call(lambda: world.load(url)) == 3


def test_a_saver_that_is_stopped_before_it_commits_does_not_replace_what_a_later_one_has_committed():
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))
        slow = world.start(lambda: world.try_save(URL, 2), "slow")
        stops: list[float] = []

        def script(operation: str, key: str, process: Process) -> Fate:
            if process is slow and operation == "put" and key.endswith(".manifest") and not stops:
                stops.append(world.scheduler.now)
                slow.stop()
                world.start(lambda: world.try_save(URL, 3), "other")
                world.scheduler.after(100, slow.resume)
            return "done"

        world.store.script = script
        world.scheduler.run(steps=500_000)
        assert stops
        assert world.done == [1, 3]
        assert not world.broken
        assert "has taken over the right to save" in str(world.failed[2])
        assert world.call(lambda: world.load(URL)) == 3


@pytest.mark.parametrize("protocol", ["s3", "gs"])
def test_a_commit_without_an_answer_that_another_save_has_replaced_is_no_failure(protocol):
    """The saver is stopped between its look at the lease and its second try."""
    url = f"{protocol}://bucket/run"
    with store_world(1) as world:
        puts: list[float] = []

        def script(operation: str, key: str, process: Process) -> Fate:
            if process.name == "first" and operation == "put" and key.endswith("0.manifest"):
                puts.append(world.scheduler.now)
                if len(puts) == 1:
                    return "lost"
                if len(puts) == 2:
                    process.stop()
                    world.scheduler.after(100.0, process.resume)
                    world.start(lambda: world.try_save(url, 2), "second")
            return "done"

        world.store.script = script
        world.start(lambda: world.try_save(url, 1), "first")
        world.scheduler.run(until=600)
        manifests = [each for each in world.effects if each[1].key.endswith("0.manifest") and each[1].kind == "put"]
        assert [version for _, _, version in manifests][:2] == [1, 2]
        assert world.done == [2]
        assert "it is not known what became of the save" in str(world.failed[1])
        assert world.call(lambda: world.load(url)) == 2


def test_a_manifest_without_a_tag_can_be_replaced():
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))
        key = "bucket/run/0.manifest"
        world.store.objects[key] = world.store.objects[key]._replace(tag="")
        world.call(lambda: world.save(URL, 2))
        assert world.call(lambda: world.load(URL)) == 2


@pytest.mark.parametrize("other_dies", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_late_commit_is_whole_while_another_save_has_not_committed_yet(other_dies, is_first):
    """The other has begun, and counts the stopped one as dead; its files are left until their manifest is refused."""
    with store_world() as world:
        if not is_first:
            world.call(lambda: world.save(URL, 1))
        slow = world.start(lambda: world.try_save(URL, 2), "slow")
        steps: list[str] = []

        def script(operation: str, key: str, process: Process) -> Fate:
            if process is slow and operation == "put" and key.endswith(".manifest") and not steps:
                steps.append("stopped")
                slow.stop()
                world.scheduler.after(1, lambda: world.start(lambda: world.try_save(URL, 3), "other"))
            if process.name == "other" and key.endswith(".safetensors") and len(steps) == 1 and operation != "delete":
                steps.append("goes on")
                world.scheduler.after(1, slow.resume)
                if other_dies:
                    world.scheduler.after(30, process.kill)
                return "hung"
            return "done"

        world.store.script = script
        world.scheduler.run(steps=500_000)
        assert steps == ["stopped", "goes on"]
        assert not world.broken
        assert "is complete, but" in str(world.failed[2])
        assert world.call(lambda: world.load(URL)) == (2 if other_dies else 3)
        world.store.script = None
        world.call(lambda: world.save(URL, 4))
        assert len(world.names("bucket/run")) == 2, world.names("bucket/run")


@pytest.mark.parametrize(("refusal", "is_known"), [((503, "SlowDown"), True), ((500, "InternalError"), False)])
def test_a_manifest_that_was_refused_is_a_failure(refusal, is_known):
    """A server that has failed does not say whether it has done what was asked for."""
    with store_world() as world, mock.patch.object(object_store, "_REFUSALS", (refusal,)):
        world.store.script = fates_of_manifests(*["refused"] * 6)
        world.call(lambda: world.try_save(URL, 1))
        assert ("it is not known" not in str(world.failed[1])) == is_known


def fates_of_manifests(*fates: Fate) -> Callable[[str, str, Process], Fate]:
    """A script by which the requests that put a manifest in place have these fates, and all others go well."""
    left = iter(fates)
    return lambda operation, key, _: next(left) if operation == "put" and key.endswith(".manifest") else "done"


def test_a_lease_that_was_renewed_after_it_had_run_out_is_not_believed():
    """Stopped between its look at the lease and the renewal, a saver takes it back from who has taken it over."""
    with store_world() as world:
        world.call(lambda: world.save(URL, 1))
        slow = world.start(lambda: world.try_save(URL, 2), "slow")
        looks: list[float] = []
        stops: list[float] = []

        def script(operation: str, key: str, process: Process) -> Fate:
            now = world.scheduler.now
            if process is slow and operation == "list":
                looks.append(now)
                return "hung" if len(looks) == 2 else "done"
            if process is slow and operation == "put" and key.endswith(".lease") and len(looks) == 2 and not stops:
                stops.append(now)
                slow.stop()
                world.start(lambda: world.try_save(URL, 3), "other")
                world.scheduler.after(50, slow.resume)
            return "done"

        world.store.script = script
        world.scheduler.run(steps=500_000)
        assert stops
        assert not world.broken
        assert world.done == [1, 3]
        assert "may have taken over the right to save" in str(world.failed[2])
        assert world.call(lambda: world.load(URL)) == 3
