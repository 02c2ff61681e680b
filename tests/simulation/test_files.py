"""The simulated file system: what a loss of power leaves, by the model of tests/crash; locks, space, watchers."""

from __future__ import annotations

import errno
from random import Random

import pytest

from tests.crash.file_system import Call
from tests.crash.power_loss import Disk
from tests.simulated.contents import Content
from tests.simulated.files import FileSystem
from tests.simulated.inodes import Directory
from tests.simulated.trees import fill, tree_of

# A few names and bytes, so that the states are few enough to be compared as sets.
DURABLE = {"old": b"0123", "d": None, "d/kept": b"ab"}


class Twin:
    """Make the same calls to a simulated file system and to the model's disk."""

    def __init__(self, has_disk: bool = True) -> None:
        self.files = FileSystem()
        fill(self.files, DURABLE)
        self.disk = Disk(DURABLE)
        self._has_disk = has_disk
        self._opened = 10

    def _at(self, path: str) -> tuple[Directory, str]:
        directory = self.files.root
        *above, name = path.split("/")
        for part in above:
            directory = directory.entries[part]
        return directory, name

    def _inode(self, path: str):
        directory, name = self._at(path)
        return self.files.root if path == "." else directory.entries[name]

    def _apply(self, name: str, path: str, **more) -> None:
        if self._has_disk:
            self.disk.apply(Call(name, path, **more))

    def _told(self, path: str, name: str, **more) -> None:
        """Make a call on an open file."""
        self._opened += 1
        self._apply("open", path, descriptor=self._opened)
        self._apply(name, path, descriptor=self._opened, **more)

    def create(self, path: str) -> None:
        self.files.create(*self._at(path))
        self._opened += 1
        self._apply("open", path, descriptor=self._opened, created=True)

    def write(self, path: str, offset: int, data: bytes) -> None:
        assert self.files.write(self._inode(path), offset, data) == len(data)
        self._told(path, "write", offset=offset, data=data)

    def truncate(self, path: str, length: int) -> None:
        self.files.truncate(self._inode(path), length)
        self._told(path, "ftruncate", offset=length)

    def sync(self, path: str) -> None:
        self.files.sync(self._inode(path))
        self._told(path, "fsync")

    def mkdir(self, path: str) -> None:
        self.files.make_directory(*self._at(path))
        self._apply("mkdir", path)

    def unlink(self, path: str) -> None:
        self.files.unlink(*self._at(path))
        self._apply("unlink", path)

    def rmdir(self, path: str) -> None:
        self.files.remove_directory(*self._at(path))
        self._apply("rmdir", path)

    def rename(self, path: str, new: str) -> None:
        self.files.rename(*self._at(path), *self._at(new))
        self._apply("rename", path, target=new)

    def link(self, path: str, new: str) -> None:
        self.files.link(self._inode(path), *self._at(new))
        self._apply("link", path, target=new)


PROGRAMS = {
    "a commit": (
        ("create", "tmp"),
        ("write", "tmp", 0, b"xy"),
        ("sync", "tmp"),
        ("rename", "tmp", "old"),
    ),
    "without fsync": (("create", "tmp"), ("write", "tmp", 0, b"xy"), ("rename", "tmp", "old")),
    "overwritten in part": (("write", "old", 1, b"zz9"), ("write", "old", 3, b"77")),
    "emptied and written": (("truncate", "old", 0), ("write", "old", 0, b"new"), ("truncate", "old", 2)),
    "a hole": (("write", "old", 6, b"!"),),
    "shorter, then longer": (("truncate", "old", 1), ("truncate", "old", 5)),
    "a directory and its files": (("mkdir", "e"), ("create", "e/f"), ("write", "e/f", 0, b"1"), ("sync", "e")),
    "removed": (("unlink", "d/kept"), ("rmdir", "d")),
    "linked": (("link", "old", "d/twin"), ("write", "old", 4, b"45"), ("unlink", "old"), ("sync", ".")),
    "renamed twice": (("rename", "old", "b"), ("rename", "b", "c"), ("create", "old")),
    "a name comes again": (("unlink", "old"), ("create", "old"), ("write", "old", 0, b"n"), ("sync", "old")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loss_of_power_leaves_what_the_model_allows_and_all_of_that(name):
    def after(steps, has_disk: bool = True) -> Twin:
        twin = Twin(has_disk)
        for what, *args in steps:
            getattr(twin, what)(*args)
        return twin

    for length in range(1, len(PROGRAMS[name]) + 1):
        steps = PROGRAMS[name][:length]
        twin = after(steps)
        assert tree_of(twin.files) == twin.disk.tree()
        # The model chooses one length and one set of sectors each time.
        allowed = {frozenset(tree.items()) for n in range(40) for tree in twin.disk.states(Random(n), 4096)}
        found = set()
        for seed in range(300):
            twin = after(steps, has_disk=False)
            twin.files.lose_power(Random(seed))
            found.add(frozenset(tree_of(twin.files).items()))
            assert tree_of(twin.files, durable=True) == tree_of(twin.files)
        assert found == allowed, f"after {steps}"


def test_random_programs_lose_no_more_than_the_model_allows():
    random = Random(7)
    for _ in range(150):
        twin, steps = Twin(), []
        for _ in range(random.randrange(1, 9)):
            name = random.choice(("old", "new", "d/kept", "d/new"))
            step = random.choice(
                (
                    ("create", name),
                    ("write", name, random.randrange(5), random.randbytes(random.randrange(1, 4))),
                    ("truncate", name, random.randrange(6)),
                    ("sync", random.choice((name, ".", "d"))),
                    ("unlink", name),
                    ("rename", name, name.replace("new", "other").replace("old", "new")),
                )
            )
            what, *args = step
            try:
                getattr(twin, what)(*args)
            except (OSError, KeyError):
                continue
            steps.append(step)
        allowed = {frozenset(tree.items()) for n in range(30) for tree in twin.disk.states(Random(n), 4096)}
        assert frozenset(tree_of(twin.files, durable=True).items()) in allowed
        twin.files.lose_power(random)
        assert frozenset(tree_of(twin.files).items()) in allowed, steps


def test_sectors_of_a_large_file_are_lost_one_by_one():
    found = set()
    for seed in range(60):
        content = Content(b"a" * 2000)
        content.write(0, b"b" * 1600)
        content.lose(Random(seed))
        data = content.read(0, 9999)
        assert set(data) <= set(b"ab\0") and len(data) == 2000
        found.add(bytes(data[at] for at in (0, 511, 512, 1023, 1024, 1535, 1536, 1599, 1600)))
    assert b"aabbaaaaa" in found or b"bbaabbaaa" in found
    assert {b"aaaaaaaaa", b"bbbbbbbba"} <= found
    # No sector is torn.
    assert all(
        each[0] == each[1] and each[2] == each[3] and each[4] == each[5] and each[6] == each[7] for each in found
    )


def test_a_client_of_a_shared_file_system_loses_its_own_bytes_alone():
    found = set()
    for seed in range(100):
        files = FileSystem(is_shared=True)
        fill(files, {"log": b"....", "other": b"-"})
        log, mine = files.root.entries["log"], files.create(files.root, "mine")
        files.write(mine, 0, b"unsynced", "node 0")
        files.write(log, 0, b"00", "node 0")
        files.write(log, 1, b"11", "node 1")
        files.write(log, 4, b"0", "node 0")
        files.write(files.root.entries["other"], 0, b"0", "node 0")
        files.sync(files.root.entries["other"], "node 0")
        files.lose_client("node 0", Random(seed))
        tree = tree_of(files)
        assert tree["other"] == b"0" and "mine" in tree, "names are the server's, and what was synced stays"
        assert tree["log"][1:3] == b"11"
        found.add(tree["log"])
        files.sync(log, "node 1")
        files.lose_power(Random(seed))
        assert tree_of(files)["log"] == tree["log"]
    assert {b".11.", b".11.\0", b"011.0", b"011.", b"\x0011.\0"} >= found >= {b".11.", b"011.0"}


def test_an_fsync_of_another_node_makes_its_own_writes_durable():
    found = set()
    for seed in range(50):
        files = FileSystem(is_shared=True)
        file = files.create(files.root, "f")
        files.write(file, 0, b"aaaa", "a")
        files.write(file, 2, b"bb", "b")
        files.sync(file, "b")
        files.lose_power(Random(seed))
        found.add(tree_of(files)["f"])
    assert {b"\0\0bb", b"aabb"} <= found
    assert all(each[2:] == b"bb" for each in found)


def test_after_an_fsync_that_failed_no_later_one_saves_the_bytes():
    """The error is told once; the pages count as clean (the "fsyncgate" of 2018)."""
    found, seen = set(), set()
    for seed in range(60):
        files, random = FileSystem(), Random(seed)
        fill(files, {"f": b"old"})
        file = files.root.entries["f"]
        files.write(file, 0, b"new")
        files.fail_to_sync(file, random)
        seen.add(files.read(file, 0, 9))
        files.write(file, 3, b"!")
        files.sync(file)
        files.lose_power(random)
        found.add(tree_of(files)["f"])
    assert seen == {b"old", b"new"}, "the kernel's memory may have them for a while"
    assert {b"old!", b"new!"} <= found
    assert all(each[3:] == b"!" for each in found), "what was written after it was synced in earnest"


def test_locks():
    files = FileSystem()
    file, woken = files.create(files.root, "f"), []
    assert files.lock(file, "a", False) and files.lock(file, "b", False)
    assert not files.lock(file, "c", True)
    file.waiters.append(lambda: woken.append("c"))
    assert not files.lock(file, "a", True), "b shares it"
    assert woken == ["c"], "and what a had is gone, as on Linux"
    assert not files.lock(file, "c", True)
    files.unlock(file, "b")
    assert files.lock(file, "c", True) and not files.lock(file, "a", False)
    assert files.lock(file, "c", False) and files.lock(file, "a", False)
    files.unlock(file, "nobody")
    assert file.locks == {"c": False, "a": False}


def test_space():
    files = FileSystem(capacity=10)
    file = files.create(files.root, "f")
    assert files.write(file, 0, b"12345678") == 8
    assert files.write(file, 8, b"90abc") == 2
    for call in (lambda: files.write(file, 10, b"!"), lambda: files.make_directory(files.root, "d")):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
    assert files.write(file, 0, b"ABC") == 3, "what is there already is overwritten"
    files.truncate(file, 1 << 40)
    assert files.used == 10, "a hole takes no space"
    files.open(file)
    files.unlink(files.root, "f")
    assert files.used == 10, "nor is space free while the file is open"
    files.close(file)
    assert files.used == 0
    files.full_errno = errno.EDQUOT
    with pytest.raises(OSError) as caught:
        files.write(files.create(files.root, "g"), 10, b"x")
    assert caught.value.errno == errno.EDQUOT


def test_out_of_reach_and_read_only():
    files = FileSystem()
    fill(files, {"f": b"1"})
    file = files.root.entries["f"]
    changes = (
        lambda: files.write(file, 0, b"2"),
        lambda: files.create(files.root, "g"),
        lambda: files.unlink(files.root, "f"),
        lambda: files.rename(files.root, "f", files.root, "g"),
    )
    looks = (
        lambda: files.read(file, 0, 1),
        lambda: files.names_of(files.root),
        lambda: files.stat(file),
        lambda: files.sync(file),
        lambda: files.lock(file, "a", True),
    )
    files.read_only = True
    for call in changes:
        with pytest.raises(OSError, match="Read-only"):
            call()
    for call in looks:
        call()
    files.gone = errno.ESTALE
    for call in (*changes, *looks):
        with pytest.raises(OSError, match="Stale"):
            call()
    files.gone, files.read_only = None, False
    assert files.read(file, 0, 9) == b"1"


def test_watchers_are_told_of_each_change():
    files, told = FileSystem(), []
    files.on_change(lambda what, path, inode: told.append((what, path, inode.size)))
    directory = files.make_directory(files.root, "d")
    file = files.create(directory, "a")
    files.write(file, 0, b"12")
    files.sync(file)
    files.rename(directory, "a", directory, "b")
    files.link(file, files.root, "c")
    files.unlink(directory, "b")
    files.truncate(file, 0)
    files.unlink(files.root, "c")
    files.remove_directory(files.root, "d")
    files.lose_power(Random(0))
    assert told == [
        ("mkdir", "/d", 0),
        ("create", "/d/a", 0),
        ("write", "/d/a", 2),
        ("sync", "/d/a", 2),
        ("leave", "/d/a", 2),
        ("rename", "/d/b", 2),
        ("link", "/c", 2),
        ("unlink", "/d/b", 2),
        ("truncate", "/c", 0),
        ("unlink", "/c", 0),
        ("rmdir", "/d", 0),
        ("lose", "/", 0),
    ]


def test_the_order_of_names_is_the_seeds():
    names = [f"{n}" for n in range(9)]
    orders = set()
    for seed in range(20):
        files = FileSystem(seed=seed)
        fill(files, {name: b"" for name in names})
        assert sorted(files.names_of(files.root)) == names
        orders.add(tuple(files.names_of(files.root)))
    assert len(orders) == 20


def test_a_map_stays_where_it_is_while_the_file_grows():
    content = Content(b"1234", is_tracked=False)
    mapped = content.map()
    content.truncate(9 << 20)
    content.write(8 << 20, b"far")
    assert bytes(mapped[8 << 20 : (8 << 20) + 3]) == b"far"
    mapped[0:2] = b"ab"
    assert content.read(0, 5) == b"ab34\0" and content.map()[0] == ord("a")
    content.truncate(1)
    content.truncate(4)
    assert content.read(0, 9) == b"a\0\0\0" == bytes(mapped[:4])


def test_another_disk_is_empty_and_can_be_written() -> None:
    files = FileSystem(capacity=100)
    fill(files, DURABLE)
    files.lose_all()
    assert tree_of(files) == tree_of(files, durable=True) == {}
    assert files.used == 0
    fill(files, {"new": bytes(90)})
    assert tree_of(files) == {"new": bytes(90)}
