"""Random lives of versions of weights: a publisher and receivers that die at any of their calls, removals, damage.

    python -m tests.crash.weight_versions --seed 1 --count 1000

Each life is a root, a few publishers one after the other, and receivers of three kinds: this library's, the reference's
in place (tests/rollout/reference.py), and both on one copy. A process dies before one of its calls that change files,
or in the middle of a write. After each step every version has the bytes that were published, or is refused with a
remedy; a receiver has the bytes of its version, or is refused and has what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.foreign.resolved_weights import resolve_version
from paddle_flexckpt.loading.weight_publisher import WeightPublisher
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.rollout.local_copy import apply_version
from tests.rollout import reference

CALLS = ("open", "write", "writev", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
SHAPES = {"a": (40, 8), "b": (16,), "c": (3, 5), "d": (200,)}


class Died(BaseException):
    """Stands for the death of a process: nothing that it does afterwards has an effect."""


class Violation(AssertionError):
    """Signal that a version or a copy has other bytes than were published."""


def dying(at: int, work: Callable[[], object]) -> bool:
    """Do something in a process that dies at a call of this number; return whether it did."""
    left = [at]

    def call_of(function: Callable, halves: bool = False) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            if left[0] <= 0:
                raise Died
            left[0] -= 1
            if left[0] == 0:
                if halves:
                    function(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2], *arguments[2:])
                raise Died
            return function(*arguments, **options)

        return call

    patches = {name: call_of(getattr(os, name)) for name in CALLS} | {"pwrite": call_of(os.pwrite, halves=True)}
    with mock.patch.multiple(os, **patches):
        try:
            work()
        except Died:
            return True
        except CheckpointError:
            if left[0] > 0:
                raise
            return True  # its last words
    return False


class Life:
    """One root with its publishers and receivers."""

    def __init__(self, seed: int, root: Path) -> None:
        self.random, self.bits = random.Random(seed), np.random.default_rng(seed)
        self.root, self.locals = root / "versions", [root / f"local{i}" for i in range(3)]
        self.values = {name: self.bits.integers(0, 256, shape, dtype=np.uint8) for name, shape in SHAPES.items()}
        self.options = {"full_every": self.random.choice((2, 3, 5)), "keep": self.random.choice((None, 1, 2, 4))}
        #: By version, the bytes that were published.
        self.history: dict[int, list[dict[str, bytes]]] = {}
        self.newest, self.is_damaged = 0, False
        self.found: Counter[str] = Counter()

    def at(self) -> int:
        """Return the number of a call: mostly beyond the last one."""
        return self.random.randint(1, 40) if self.random.random() < 0.5 else 1 << 30

    def publish(self) -> None:
        for value in self.values.values():
            if self.random.random() < 0.6:
                flat = value.reshape(-1)
                flat[self.bits.choice(flat.size, max(1, flat.size // 20), replace=False)] ^= 7
        whole = {name: value.tobytes() for name, value in self.values.items()}
        how = {
            "encoding": self.random.choice(("xor", "overwrite")),
            "checksum": self.random.choice(("xxh3-128", "adler32")),
        }
        publisher = WeightPublisher(self.root, process_group=SoloCommunicator(), **self.options, **how)
        before = max(self.there(), default=0)
        try:
            died = dying(self.at(), lambda: publisher.publish(self.values, full=self.random.random() < 0.1))
        except CorruptCheckpointError as error:
            self.refused(error)
            publisher.publish(self.values, full=True)
            died = False
        self.found["publisher died" if died else "published"] += 1
        after = max(self.there(), default=0)
        if after not in (before, before + 1) or (not died and after == before):
            raise Violation(f"version {after} follows {before}; died: {died}")
        if after > before:
            self.history[after] = [whole]

    def there(self) -> list[int]:
        """Return the versions that have a last file."""
        names = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        found = []
        for name in names:
            files = os.listdir(self.root / name)
            if reference.INDEX in files or [f for f in files if f.endswith(".safetensors")] == ["model.safetensors"]:
                found.append(int(name.removeprefix("weight_v")))
        return found

    def refused(self, error: Exception) -> None:
        """Note a refusal, which needs damage, or a version that is not there; it has a remedy."""
        if "Remedy (FC308)" not in str(error):
            raise Violation(f"a refusal without the remedy: {error}") from error
        self.found["refused"] += 1

    def look(self) -> None:
        """Read every version."""
        for number in self.there():
            try:
                directory = resolve_version(LocalBackend(str(self.root / f"weight_v{number:06d}")))
                files = [name for name in directory.names() if name.endswith(".safetensors")]
                data = {name: directory.read(name) for name in files}
            except CorruptCheckpointError as error:
                if not self.is_damaged and number >= self.oldest():
                    raise Violation(f"version {number} is refused: {error}") from error
                self.refused(error)
                continue
            if _tensors(data) not in self.history[number]:
                raise Violation(f"version {number} has other bytes than were published")

    def oldest(self) -> int:
        """Return the oldest version that has to be there."""
        keep = self.options["keep"]
        there = self.there()
        return there[0] if keep is None or not there else there[-1]

    def receive(self) -> None:
        """Bring a copy to a version: mostly the newest."""
        there = self.there()
        if not there:
            return
        kind = self.random.randrange(3)
        local = self.locals[kind]
        number = there[-1] if self.random.random() < 0.7 else self.random.randint(1, there[-1] + 1)
        before = self.state(local)
        if kind == 1 or (kind == 2 and self.random.random() < 0.5):
            if before is not None and (before == "unfinished" or before > number or before not in self.history):
                return
            try:
                reference.pull(local, None, self.root, number)
                is_right = not self.is_damaged or reference.tensors_of(local) in self.history[number]
            except Exception:
                is_right = False
            if not is_right:  # it changes the copy in place: what it leaves is lost
                shutil.rmtree(local, ignore_errors=True)
                self.found["reference refused"] += 1
                return
        else:
            had = reference.tensors_of(local) if local.exists() and isinstance(before, int) else None
            try:
                died = dying(self.at(), lambda: apply_version(self.root, local, number))
            except CorruptCheckpointError as error:
                if not self.is_damaged and number in there and number >= self.oldest():
                    raise Violation(f"{local.name} at {before} is refused version {number}: {error}") from error
                self.refused(error)
                if had is not None and self.state(local) == before and reference.tensors_of(local) != had:
                    raise Violation(f"a refusal has changed {local.name}") from error
                return
            if died:
                self.found["receiver died"] += 1
                after = self.state(local)
                if isinstance(after, int) and reference.tensors_of(local) not in self.history[after]:
                    raise Violation(f"{local.name} says {after}, and has other bytes")
                return
        self.found["received"] += 1
        if reference.tensors_of(local) not in self.history[number]:
            raise Violation(f"{local.name} has other bytes than version {number}, coming from {before}")

    def state(self, local: Path) -> int | str | None:
        """Return the version of a copy."""
        path = local / ".weight_sync" / "state.json"
        if not path.exists():
            return None
        text = json.loads(path.read_text())["version"]
        return text if text == "unfinished" else int(text)

    def damage(self) -> None:
        """Remove or change a file of a version."""
        files = sorted(path for path in self.root.glob("weight_v*/*") if path.is_file())
        if not files:
            return
        path = self.random.choice(files)
        if int(path.parent.name.removeprefix("weight_v")) == max(self.there(), default=0):
            return  # the publisher counts on the newest one's number
        self.is_damaged = True
        self.found["damaged"] += 1
        number = int(path.parent.name.removeprefix("weight_v"))
        if self.random.random() < 0.5:
            path.unlink()
            return
        data = bytearray(path.read_bytes())
        full = path.parent / "model-00001-of-00001.safetensors"
        if path.name != reference.INDEX and data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)
        self.found[f"damage in {'a full' if full.exists() else 'a delta'}"] += bool(number)

    def run(self, steps: int) -> Counter[str]:
        for _ in range(steps):
            draw = self.random.random()
            if draw < 0.45 or not self.there():
                self.publish()
            elif draw < 0.96:
                self.receive()
            else:
                self.damage()
            self.look()
        # The end: a full version brings everybody to the same bytes.
        WeightPublisher(self.root, process_group=SoloCommunicator(), **self.options).publish(self.values, full=True)
        newest = max(self.there())
        for local in (self.locals[0], self.locals[2]):
            apply_version(self.root, local)
            if reference.tensors_of(local) != {name: value.tobytes() for name, value in self.values.items()}:
                raise Violation(f"{local.name} has other bytes than version {newest}")
            left = sorted(path.name for path in (local / ".weight_sync").rglob("*"))
            if left != ["lock", "next", "state.json"]:
                raise Violation(f"files are left in {local.name}: {left}")
        return self.found


def _tensors(files: dict[str, bytes]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        for name, data in files.items():
            Path(place, name).write_bytes(data)
        return reference.tensors_of(place)


def live(seed: int, steps: int = 24) -> Counter[str]:
    """Go through one life; return what happened how often. Violation if something is wrong."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        life = Life(seed, Path(place))
        try:
            return life.run(steps)
        except Exception as error:
            raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="lives (default %(default)s)")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # threads that wait for each other are slower than one
    found: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        found += live(seed)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
