"""What a save is asked to write to: names that are files', and directories that change while it writes."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.manager import CheckpointManager, MemoryTier, SaveEvery
from paddle_flexckpt.media.local import LocalOutputFile, OutputParts
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.export import export_safetensors
from tests.native.two_ranks import load, save, shards, state
from tests.remedies.following import provoked
from tests.saved import named, short, short_names

NAMES_A_FILE = "names a file, and a checkpoint is a directory. Remedy (FC406): give the path of a directory"


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "other.index.json", "model.safetensors/", ".safetensors"],
)
@pytest.mark.parametrize("kind", ["text", "path", "relative", "file URL", "storage"])
def test_a_path_that_names_a_file_is_not_saved_to(tmp_path, monkeypatch, name, kind):
    """It used to be the file's directory that was saved to, and what was there was replaced."""
    monkeypatch.chdir(tmp_path)
    save("good", 1, 0)
    before = tree(tmp_path)
    path = f"{tmp_path}/good/{name}"
    location = {
        "text": path,
        "path": Path(path),
        "relative": f"good/{name}",
        "file URL": f"file://{path}",
        "storage": open_storage(path),
    }[kind]
    outcomes = save(location, 2, 0)
    assert {type(outcome) for outcome in outcomes} == {ValidationError}
    (text,) = map(str, {str(outcome) for outcome in outcomes})
    assert NAMES_A_FILE in text
    assert "[ranks 0-1]" in text
    assert tree(tmp_path) == before
    assert load("good") == 1


@pytest.mark.parametrize("name", ["a.safetensors", "a.safetensors.index.json"])
def test_nor_is_it_by_whatever_else_writes_checkpoints(tmp_path, capsys, name):
    save(tmp_path / "good", 1, 0)
    before = tree(tmp_path)
    path = str(tmp_path / "good" / name)
    with BackgroundWriter() as writer, pytest.raises(ValidationError, match=re.escape(NAMES_A_FILE)):
        save_state_dict({"x": np.zeros(3)}, path, SoloCommunicator(), async_save=writer)
    with pytest.raises(ValidationError, match=re.escape(NAMES_A_FILE)):
        CheckpointManager(path, process_group=SoloCommunicator(), preemption_signals=())
    with pytest.raises(ValidationError, match=re.escape(NAMES_A_FILE)):
        export_safetensors(str(tmp_path / "good"), path)
    assert main(["export", str(tmp_path / "good"), path]) == 1
    assert NAMES_A_FILE in capsys.readouterr().err
    pytest.importorskip("fsspec")
    with pytest.raises(ValidationError, match=re.escape(f"memory://run/{name} {NAMES_A_FILE}")):
        save_state_dict({"x": np.zeros(3)}, f"memory://run/{name}", SoloCommunicator())
    assert tree(tmp_path) == before


def refuse(monkeypatch, number: int, call: str, part: str) -> None:
    """What would be made below a directory is refused: this process may write everywhere."""
    real = getattr(os, call)

    def fail(path, *args, **kwargs):
        if part in str(path) and (call == "mkdir" or args[0] & os.O_CREAT):
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP]
)
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_place_that_refuses_to_be_written_to(tmp_path, monkeypatch, number, call):
    """The error was the bare one of the system, without a remedy."""
    values, root = {"w": np.ones(3, np.float32)}, tmp_path / "there"
    save_state_dict(values, tmp_path / "source", SoloCommunicator())
    root.mkdir()

    def by_a_manager():
        with CheckpointManager(root / "run", process_group=SoloCommunicator(), preemption_signals=()) as manager:
            manager.save(1, state=values)

    for work in (
        lambda: save_state_dict(values, root / "c", SoloCommunicator()),
        lambda: publish({"w": values["w"]}, root / "p", SoloCommunicator()),
        lambda: export_safetensors(tmp_path / "source", root / "e"),
        by_a_manager,
    ):
        with monkeypatch.context() as refusing:
            refuse(refusing, number, call, str(root))
            if call == "mkdir" and number == errno.ENOTDIR:
                with pytest.raises(CheckpointError, match=r"is not a directory, so nothing.*Remedy \(FC406\)"):
                    work()
                continue
            with provoked("media/full_disks.py", "let this process write there") as caught:
                work()
        assert f"{os.strerror(number)}: {root}/" in str(caught.value) and str(caught.value).count("Remedy") == 1
        work()


@pytest.mark.parametrize("why", ["file", "below a file", "not writable", "parent not writable"])
@pytest.mark.parametrize("what", ["root", "memory"])
def test_a_manager_finds_out_before_the_first_save(tmp_path, monkeypatch, why, what):
    """The first save, perhaps after hours, was the first to say so."""
    place = tmp_path / "place"
    if "file" in why:
        place.write_text("mine")
    elif why == "not writable":
        place.mkdir()
    values = {"w": np.ones(3, np.float32)}
    path = place / "run" if why == "below a file" else place
    root, memory = (path, tmp_path / "shm") if what == "root" else (tmp_path / "run", path)
    tier = MemoryTier(memory, SaveEvery(1000), copies=1)
    before = tree(tmp_path)
    access = os.access
    refused = str(tmp_path) if why == "parent not writable" else str(place)

    def make():
        return CheckpointManager(
            root,
            process_group=SoloCommunicator(),
            preemption_signals=(),
            save_when=SaveEvery(1000),
            state=values,
            **more,
        )

    def first():
        with make() as manager:
            assert not manager.should_save(1)

    more = {"memory": tier} if what == "memory" else {}
    if "file" in why:
        with pytest.raises(ValidationError, match=r"is not a directory, so nothing can be saved.*Remedy \(FC406\)"):
            first()
        assert tree(tmp_path) == before
        place.unlink()
    else:
        with monkeypatch.context() as refusing:
            refusing.setattr(os, "access", lambda path, mode: path != refused and access(path, mode))
            with provoked("media/full_disks.py", "let this process write there", ValidationError) as caught:
                first()
        assert f"{path} cannot be saved to: {refused} is not writable" in str(caught.value)
        assert tree(tmp_path) == before
    first()
    if what == "root":  # a restore alone needs no permission
        with make() as manager:
            manager.save(1, state=values)
        with monkeypatch.context() as refusing:
            refusing.setattr(os, "access", lambda path, mode: False)
            with make() as manager:
                assert manager.restore(state=values).step == 1


def test_a_tilde_is_the_users_home_wherever_a_path_is_taken(tmp_path, monkeypatch, capsys):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    saved, target = {"w": np.ones(3, np.float32)}, {"w": np.zeros(3, np.float32)}
    for path in ("~/run", Path("~/path"), open_storage("~/storage")):
        save_state_dict(saved, path, SoloCommunicator())
        load_state_dict(target, path, SoloCommunicator())
        assert target["w"].tolist() == [1, 1, 1]
        target["w"][:] = 0
    with CheckpointManager("~/managed", process_group=SoloCommunicator()) as manager:
        manager.save(3, state=saved)
        assert manager.restore(state=target).step == 3
    export_safetensors("~/run", "~/export")
    assert main(["convert", "~/run", "~/converted"]) == 0
    assert main(["inspect", "~/export/model.safetensors"]) == 0
    assert sorted(os.listdir(home)) == ["converted", "export", "managed", "path", "run", "storage"]
    assert os.listdir(here) == []
    # Elsewhere it is a name as any other.
    save_state_dict(saved, "x~", SoloCommunicator())
    save_state_dict(saved, "./~", SoloCommunicator())
    assert sorted(os.listdir(here)) == ["x~", "~"]


def test_a_directory_of_such_a_name_that_is_there_is_one(tmp_path):
    path = tmp_path / "model.safetensors"
    path.mkdir()
    assert not any(isinstance(outcome, Exception) for outcome in save(path, 1, None))
    assert load(path) == 1


@pytest.mark.parametrize("bad", [None, 5, b"bytes", ["list"]])
def test_a_path_that_is_none_on_one_rank_is_told_on_all(tmp_path, bad):
    """One rank raised before it met the others, and left them waiting."""

    def both(work):
        outcomes = SimulatedWorld(2).run_all(
            lambda comm: work(comm, bad if comm.position == 1 else str(tmp_path / "c"))
        )
        (text,) = {str(outcome) for outcome in outcomes}
        assert {type(outcome) for outcome in outcomes} == {ValidationError}
        assert (
            f"[rank 1] path has to be a path or URL as text or os.PathLike, or what open_storage() gives; got {bad!r}"
            in text
        )

    both(lambda comm, path: save_state_dict(shards(comm.position, state(1)), path, comm))
    assert not (tmp_path / "c").exists() or os.listdir(tmp_path / "c") == []
    save(tmp_path / "c", 1, 0)
    both(lambda comm, path: load_state_dict(shards(comm.position, state(0)), path, comm))
    both(lambda comm, path: CheckpointManager(path, process_group=comm, preemption_signals=()))
    assert load(tmp_path / "c") == 1


def meanwhile(monkeypatch, work):
    """Does something once, when the manifest is written, and not in its place yet."""
    write = LocalOutputFile.write

    def writes(self, data):
        write(self, data)
        if ".manifest." in self._path and not done:
            done.append(self._path)
            work()

    done = []
    monkeypatch.setattr(LocalOutputFile, "write", writes)
    return done


def last_written(path: Path) -> Path:
    """Rank 1's data file of the save that is being made."""
    return path / named(path, "1_0-2.safetensors")


def remove(path: Path) -> None:
    last_written(path).unlink()


def cut(path: Path) -> None:
    os.truncate(last_written(path), 100)


def replace(path: Path) -> None:
    """By a file of the same size, of another save."""
    file = last_written(path)
    old = file.read_bytes()
    file.write_bytes(re.sub(rb"[0-9a-f]{32}", b"0" * 32, old, count=1))


@pytest.mark.parametrize(
    ("mischief", "said"),
    [(remove, "is missing"), (cut, "has 100 bytes; expected"), (replace, "belongs to another save")],
)
def test_data_files_that_change_before_the_commit_fail_it(tmp_path, monkeypatch, mischief, said):
    save(tmp_path, 1, 0)
    done = meanwhile(monkeypatch, lambda: mischief(tmp_path))
    outcomes = save(tmp_path, 2, 0)
    assert done
    assert {type(outcome) for outcome in outcomes} == {CheckpointError}, outcomes
    (text,) = {str(outcome) for outcome in outcomes}
    assert "[rank 0] nothing was committed, as somebody else has changed the files of this save" in text
    assert said in text
    assert f"{tmp_path}/1_0-2.safetensors" in short(text)
    assert load(tmp_path) == 1
    # And what is left goes with the next save.
    save(tmp_path, 3, 0)
    assert load(tmp_path) == 3
    files = ["0.manifest", "0_0-3.safetensors", "1_0-3.safetensors", "flex-ckpt.auto_generated.metadata"]
    assert short_names(tmp_path) == files


def test_a_directory_that_is_replaced_before_the_commit_fails_it(tmp_path, monkeypatch):
    """The new one has the same files even; but it is not the one that is locked."""
    path, aside = tmp_path / "c", tmp_path / "aside"
    save(path, 1, 0)

    def swap() -> None:
        path.rename(aside)
        shutil.copytree(aside, path)

    assert meanwhile(monkeypatch, swap) == []
    outcomes = save(path, 2, 0)
    assert {type(outcome) for outcome in outcomes} == {CheckpointError}, outcomes
    (text,) = {str(outcome) for outcome in outcomes}
    assert f"{path} is another directory than when the save began" in text
    assert load(path) == 1
    assert load(aside) == 1


def test_an_empty_directory_in_its_place_is_no_success(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save(path, 1, 0)

    def swap() -> None:
        path.rename(tmp_path / "aside")
        path.mkdir()

    meanwhile(monkeypatch, swap)
    assert {type(outcome) for outcome in save(path, 2, 0)} == {CheckpointError}
    assert os.listdir(path) == []
    assert load(tmp_path / "aside") == 1


def test_parts_are_written_whole_in_any_order_and_errors_name_the_file(tmp_path, monkeypatch):
    path, pwrite = str(tmp_path / "file"), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:3], offset))
    with OutputParts(path) as parts, OutputParts(path) as others:
        others.write_at(memoryview(b"56789"), 5)
        parts.write_at(memoryview(b"01234"), 0)
        parts.make_durable()
    assert Path(path).read_bytes() == b"0123456789"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with OutputParts(path) as parts, pytest.raises(OSError, match=re.escape(path)):
        parts.write_at(memoryview(b"x"), 0)
