"""What is on storage in a simulated world: saves, and checkpoints read bit by bit past the simulated processes.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.partition_files import decode_partition, merge_rows
from paddle_flexckpt.tools.step_record import RECORD, StepRecord
from tests.simulated.training import all_versions_of, shapes_of

if TYPE_CHECKING:
    from tests.simulated.scenario import Scenario

MANIFEST = "0.manifest"
STEP = re.compile(r"/step_(\d{8,})$")


@dataclass
class Attempt:
    """Describe one save of one step.

    Attributes:
        outcomes: By rank, what the call or the handle said: None for done, or the error.
        is_committed: Whether its manifest has been in place.
    """

    version: int
    job: str
    incarnation: int
    step: int
    begun: float
    size: int
    outcomes: dict[int, str | None] = field(default_factory=dict)
    is_committed: bool = False

    @property
    def is_acknowledged(self) -> bool:
        """Tell whether a rank was told that it is done."""
        return None in self.outcomes.values()

    def __str__(self) -> str:
        return f"the save of step {self.step} by start {self.incarnation} of job {self.job}"


@dataclass
class Committed:
    """Describe a checkpoint on storage."""

    attempt: Attempt
    files: tuple[str, ...]
    record: StepRecord | None


class StoredCheckpoints:
    """Read checkpoints as they are on storage, and tell which save each is of.

    Attributes:
        attempts: The saves, by version of their values.
        read: Reads a file past all processes; None if it is not there. The cluster sets it, and the next one.
        names: Lists a directory's files likewise.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.attempts: dict[int, Attempt] = {}
        self.read: Callable[[str], bytes | None] = lambda path: None
        self.names: Callable[[str], list[str]] = lambda path: []

    def examine(self, directory: str) -> Committed | str:
        """Read a checkpoint as it is on storage; return it, or what is wrong with it."""
        manifest = self._decode(directory, MANIFEST)
        if isinstance(manifest, str):
            return manifest
        content: dict[str, bytes] = {}
        for name, size in manifest.sizes.items():
            stored = self.read(f"{directory}/{name}")
            if stored is None or len(stored) != size:
                return f"{name} has {None if stored is None else len(stored)} bytes, not {size}"
            content[name] = stored
        values = self._values(manifest, content)
        if isinstance(values, str):
            return values
        attempt, record = values
        if attempt.step != int(STEP.search(directory)[1]):  # type: ignore[index]
            return f"it has values of {attempt}"
        files = tuple(f"{directory}/{name}" for name in (*manifest.files, MANIFEST))
        return Committed(attempt, files, record)

    def _decode(self, directory: str, name: str) -> Manifest | str:
        """Read a manifest with its partitions; return it, or what is wrong with it."""
        data = self.read(f"{directory}/{name}")
        if data is None:
            return "there is no manifest"
        try:
            manifest = Manifest.decode(data, directory)
            read = [
                decode_partition(self.read(f"{directory}/{each.file}") or b"", each.file, manifest, number)
                for number, each in enumerate(manifest.partitions)
            ]
            return merge_rows(manifest, read)
        except (CorruptCheckpointError, ValidationError) as error:
            return str(error)

    def _values(self, manifest: Manifest, content: dict[str, bytes]) -> tuple[Attempt, StepRecord | None] | str:
        """Return which save the values of a checkpoint's data files are of, and its record; or what is wrong."""
        catalog, seen = manifest.catalog, set()
        record: StepRecord | None = None
        shapes = shapes_of(self._scenario.habits)
        counts = dict.fromkeys(shapes, 0)
        for row in range(len(catalog)):
            key, name = catalog.keys[int(catalog.key[row])], catalog.file_name(row) or ""
            begin = int(catalog.byte_offset[row])
            stored = content[name][begin : begin + int(catalog.byte_length[row])]
            if key == RECORD:
                try:
                    record = StepRecord.decode(np.frombuffer(stored, dtype=np.uint8))
                except CorruptCheckpointError as error:
                    return str(error)
            elif key in shapes:
                numbers = np.frombuffer(stored, dtype="<i8")
                counts[key] += len(numbers)
                seen |= all_versions_of(numbers)
        missing = [key for key, shape in shapes.items() if counts[key] < int(np.prod(shape))]
        if missing:
            return f"{missing} are not whole"
        if len(seen) != 1:
            return f"it is a mixture of versions {sorted(seen)}"
        version = seen.pop()
        attempt = self.attempts.get(version)
        return f"it has values of {version}" if attempt is None else (attempt, record)
