"""A person who looks after checkpoints with the library's own tools, and the damage that such a person meets.

Damage comes to one file of a checkpoint at a time. Whoever verifies it has to find that, and a manifest that was lost
has to be rebuilt as it was. What nobody has touched has to be whole.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
import random
import re
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.simulated.tasks import Process

_MANIFEST = "0.manifest"
_TOKEN = re.compile(r"[0-9a-f]{32}(?= \(step)")
_KINDS = ("flip", "cut", "lose", "lose manifest", "flip manifest", "swap", "lengthen")


@dataclass(frozen=True)
class Damage:
    """Describe what was done to a checkpoint.

    Attributes:
        kind: One of ``flip``, ``cut``, ``lose``, ``lose manifest``, ``flip manifest``, ``swap``, ``lengthen``.
        before: Its files before, by name.
        after: Its files then.
    """

    kind: str
    before: dict[str, bytes]
    after: dict[str, bytes]

    @property
    def spares_data(self) -> bool:
        """Return whether no data file has suffered."""
        return self.kind.endswith("manifest")


class Caretaker:
    """Damage checkpoints, and look after them."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._damaged: dict[str, Damage] = {}
        self._count = 0

    def spoil(self, number: int) -> None:
        """Damage one file of one of the checkpoints that are whole; the number says which and how.

        Nothing happens to storage that does not let itself be written.
        """
        with contextlib.suppress(OSError):
            self._spoil(number)

    def _spoil(self, number: int) -> None:
        world, ledger = self._cluster.world, self._cluster.ledger
        directories = sorted(ledger.committed)
        if not directories:
            return
        choose = random.Random(number)
        directory, kind = choose.choice(directories), choose.choice(_KINDS)
        files = [path[len(directory) + 1 :] for path in ledger.committed[directory].files]
        before = {name: world.read(f"{directory}/{name}") or b"" for name in files}
        ledger.disturb(directory)
        name = _MANIFEST if kind.endswith("manifest") else choose.choice([each for each in files if each != _MANIFEST])
        data, place = before[name], choose.randrange(len(before[name]))
        if kind.startswith("lose"):
            world.remove_file(directory, name)
        else:
            if kind == "swap":
                others = [path for path in (f"{other}/{name}" for other in directories) if world.read(path) != data]
                data = (world.read(choose.choice(others)) if others else None) or data[::-1]
            elif kind.startswith("flip"):
                data = data[:place] + bytes([data[place] ^ (1 << choose.randrange(8))]) + data[place + 1 :]
            else:
                data = data[:place] if kind == "cut" else data + b"\0"
            world.put_tree(directory, {name: data})
        self._damaged[directory] = Damage(kind, before, self._tree(directory, before))
        self._cluster.scheduler.note(f"damage to {directory}/{name}: {kind}", self._cluster.operator)

    def begin(self) -> None:
        """Have a process look after all that is there."""
        cluster = self._cluster
        node = next((node for node in cluster.nodes if node.is_up), None)
        if node is not None:
            self._count += 1
            Process(cluster.scheduler, node, f"person looking {self._count}").start(self._look)

    def _look(self) -> None:
        for directory in self._cluster.world.directories():
            try:
                self._look_at(directory)
            except (CheckpointError, OSError) as error:
                self._cluster.scheduler.note(f"{type(error).__name__}: {str(error)[:200]}")

    def _look_at(self, directory: str) -> None:
        cluster = self._cluster
        ledger, since = cluster.ledger, cluster.scheduler.now
        location = cluster.location().child(directory.rpartition("/")[2])
        known, damage = ledger.committed.get(directory), self._damaged.get(directory)
        if damage is not None and self._is_as_left(directory, damage):
            if damage.kind != "lose manifest":
                report = verify_checkpoint(location, 0)
                if report.ok and self._is_as_left(directory, damage):
                    ledger.violate("damage is found", f"{directory} counts as whole after damage: {damage.kind}")
            if damage.spares_data:
                self._repair(directory, location, damage)
            return
        report, is_whole = verify_checkpoint(location), is_complete(location)
        is_same = known is not None and ledger.committed.get(directory) is known
        if is_same and since > ledger.troubled_until and not (report.ok and is_whole):
            problems = "; ".join(map(str, report.problems))[:300]
            ledger.violate("a committed checkpoint is whole", f"verifying {directory}: {problems or 'incomplete'}")

    def _repair(self, directory: str, location: Any, damage: Damage) -> None:
        """Rebuild a manifest, with the options that the errors ask for."""
        options: dict[str, Any] = {"overwrite": True}
        for _ in range(3):
            try:
                report = repair_manifest(location, 0, **options)
                break
            except ValidationError as error:
                tokens = _TOKEN.findall(str(error))
                more = {"save_token": tokens[0]} if tokens and "save_token" not in options else {"fewer_files": True}
                options.update(more)
                last = error
        else:
            raise last
        self._cluster.scheduler.note(f"has repaired {directory}: {report.files}")
        data = {name: content for name, content in damage.before.items() if name != _MANIFEST}
        if self._tree(directory, data) == data:
            found = self._cluster.ledger.examine(directory)
            if isinstance(found, str):
                self._cluster.ledger.violate("what was repaired is whole", f"{directory}: {found}")

    def _is_as_left(self, directory: str, damage: Damage) -> bool:
        return self._tree(directory, damage.before) == damage.after

    def _tree(self, directory: str, names: Any) -> dict[str, bytes]:
        world = self._cluster.world
        read = {name: world.read(f"{directory}/{name}") for name in names}
        return {name: data for name, data in read.items() if data is not None}
