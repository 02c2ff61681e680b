"""Nodes whose memory holds steps of a run: what a loss of power takes, and what must hold of these steps.

A node's memory survives the death of all processes. A node that is taken from a job and comes back still has what it
had. The ledger sees each change there, as it sees those of storage.

Tested in tests/simulation/test_memory.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulated.invariants import Ledger, is_unknown
from tests.simulated.parity import rebuild
from tests.simulated.stored import MANIFEST, Attempt
from tests.simulated.training import COPIES

if TYPE_CHECKING:
    from paddle_flexckpt.native.manifest import Manifest
    from tests.simulated.scenario import Scenario
    from tests.simulated.scheduler import Scheduler
    from tests.simulated.tasks import Process
    from tests.simulated.training import Script

# Where it is mounted on each node, and where steps are there.
MOUNT = "/memory"
# The file of the root that has the run whose steps are looked for.
ANCHOR = "run.json"
# As the world calls it past all processes: node, run, step, name.
_PLACE = re.compile(r"/(node\d+)\.memory/run/([0-9a-f]{16})/step_(\d{8,})/([^/]+)")
_STEP = re.compile(r"step_(\d{8,})")


def mount_of(node: str) -> str:
    """Return how the world calls the memory of a node."""
    return f"{node}.memory"


@dataclass
class InMemory:
    """Describe a save of a step in memory.

    Attributes:
        nodes: Those that have to publish it.
        published: Those that have.
        told: By rank, what it was told of the save's end.
    """

    attempt: Attempt
    nodes: frozenset[str] = frozenset()
    published: set[str] = field(default_factory=set)
    told: dict[int, str | None] = field(default_factory=dict)

    @property
    def was_whole(self) -> bool:
        """Tell whether all nodes have published it, which need not have it any more."""
        return bool(self.nodes) and self.published >= self.nodes


class MemoryLedger(Ledger):
    """Know besides what is in the memory of nodes.

    Attributes:
        below: Lists the directories in a directory, past all processes. The cluster sets it.
        root: Where the run saves, as storage calls it.
    """

    def __init__(self, scheduler: Scheduler, scenario: Scenario, root: str) -> None:
        super().__init__(scheduler, scenario)
        self.root = root
        self.below: Callable[[str], list[str]] = lambda path: []
        self._saves: dict[int, InMemory] = {}
        # By file of a step that a node has published: the step's directory there.
        self._files: dict[str, str] = {}
        self._published: dict[str, InMemory] = {}
        self._lost: set[str] = set()
        self._earlier: set[int] = set()

    # What scripts say.

    def told_of_memory(self, version: int, script: Script, error: str | None) -> None:
        """Note that a rank was told how its save to memory has ended."""
        attempt = self.attempts[version]
        save = self._save_of(attempt)
        save.told[script.rank] = error
        self._check_one_outcome(attempt, save.told)
        if error is None:
            self._scheduler.note(f"is told that step {attempt.step} is in memory")
            if not save.published:
                self.violate("what was reported done is there", f"{attempt} was reported done, and is not in memory")
        else:
            self._scheduler.note(f"is told that step {attempt.step} is not in memory: {error[:300]}")
            self._check_told(save)

    def _check_told(self, save: InMemory) -> None:
        for rank, error in save.told.items():
            if save.published and error is not None and not is_unknown(error):
                self.violate(
                    "what was reported failed is not there",
                    f"{save.attempt} is in memory; rank {rank} was told: {error}",
                )

    def found_nothing(self, script: Script) -> None:
        """Note that a rank was told that there is no step."""
        super().found_nothing(script)
        self._check_newest(script, None, self._scheduler.now)

    def restored(
        self, script: Script, step: int, versions: set[int], skipped: dict[int, str], since: float = 0.0
    ) -> None:
        """Note that a rank has restored a step."""
        if versions & self._earlier:
            self.violate("no mixture of two saves", f"a restore of step {step} gave values of another run")
        super().restored(script, step, {*versions}, skipped, since)
        found = self.attempts.get(min(versions, default=-1))
        if found is not None:
            self._check_newest(script, found, since)

    def _check_newest(self, script: Script, found: Attempt | None, since: float) -> None:
        """Check that no newer step is whole, in memory of the job's nodes or on storage; in memory, no later save."""
        if self.disturbed or self.troubled_until >= since or "best" in self._scenario.habits:
            return
        step, begun = (-1, 0.0) if found is None else (found.step, found.begun)
        known = [*(known.attempt for known in self.committed.values()), *self._whole_in_memory(script)]
        newer = [each for each in known if (each.step, each.begun) > (step, begun)]
        if newer:
            self.violate("a restore takes the newest step", f"{newer[0]} is whole; rank {script.rank} has {found}")

    def _whole_in_memory(self, script: Script) -> list[Attempt]:
        """Return the saves of the run that are whole on the nodes on which a job runs, and count.

        Those do not count that are of before the run went back: a later start has saved the step, or one below it.
        """
        roots = [self._root_of(node.name) for node in script.job.on_nodes]
        there = {path: save.attempt for path, save in self._published.items() if path.rpartition("/")[0] in roots}
        saves = [*(known.attempt for known in self.committed.values()), *there.values()]
        found: dict[int, Attempt] = {}
        for directory, attempt in there.items():
            name, manifest = directory.rpartition("/")[2], self._decode(directory, MANIFEST)
            is_void = any(each.incarnation > attempt.incarnation and each.step <= attempt.step for each in saves)
            if is_void or attempt.version in found or isinstance(manifest, str):
                continue
            here = {file: data for each in roots for file, data in self._read_all(f"{each}/{name}", manifest).items()}
            if {*manifest.catalog.files} <= rebuild(manifest, here).keys():
                found[attempt.version] = attempt
        return list(found.values())

    def _read_all(self, directory: str, manifest: Manifest) -> dict[str, bytes]:
        """Return those of a step's files that are whole in a directory."""
        names = {*manifest.catalog.files, *manifest.parity_files} & {*self.names(directory)}
        read = {name: self.read(f"{directory}/{name}") or b"" for name in names}
        return {name: data for name, data in read.items() if len(data) == manifest.sizes.get(name, len(data))}

    def _root_of(self, node: str) -> str:
        return f"/{mount_of(node)}/run/{self._run}"

    @property
    def _run(self) -> str:
        """Return the run whose steps a restart looks for."""
        anchor = self.read(f"{self.root}/{ANCHOR}")
        return "none" if anchor is None else str(json.loads(anchor)["run"])

    def begin_anew(self) -> None:
        """Note that somebody removes all that is on storage, and begins another run there."""
        self._earlier |= self.attempts.keys()
        self.committed, self._owners = {}, {}
        self.disturbed.clear()

    # What happens in memory.

    def lose_memory(self, node: str) -> None:
        """Note that a node has lost all that was in its memory."""
        self._lost.add(node)
        for directory in [each for each in self._published if each.startswith(f"/{mount_of(node)}/")]:
            self._forget_memory(directory)

    def _forget_memory(self, directory: str) -> None:
        self._published.pop(directory, None)
        self._files = {path: each for path, each in self._files.items() if each != directory}

    def _save_of(self, attempt: Attempt) -> InMemory:
        return self._saves.setdefault(attempt.version, InMemory(attempt))

    def appeared(self, path: str, process: Process | None) -> None:
        """Note that a file is there under this name, whole."""
        place = _PLACE.fullmatch(path)
        if place is None:
            super().appeared(path, process)
        elif place[4] == MANIFEST:
            self._publish(place[1], path.rpartition("/")[0])
        elif path in self._files:
            self.changed(path, process, "replaced")

    def changed(self, path: str, process: Process | None, how: str) -> None:
        """Note that a file was written, cut, replaced or removed."""
        if path not in self._files:
            super().changed(path, process, how)
            return
        directory = self._files[path]
        save = self._published[directory]
        if path.endswith(f"/{MANIFEST}") and how == "removed":
            self._scheduler.note(f"removes {save.attempt} from memory")
            self._check_removed(save)
        else:
            self.violate("a committed checkpoint is whole", f"{path} of {save.attempt} was {how}")
        self._forget_memory(directory)

    def _check_removed(self, save: InMemory) -> None:
        """Check that a step that goes from memory is not the newest that is whole."""
        attempt = save.attempt
        if self.disturbed or attempt.version in self._earlier:
            return
        saved = self.highest is not None and self.highest >= attempt.step
        later = (each for each in self._saves.values() if each.attempt.begun > attempt.begun)
        # A later start goes on from a lower step, as this one was not whole then.
        starts = {start: step for (_, start), (step, _) in self._restored.items()}
        saved |= any(step < attempt.step for start, step in starts.items() if start > attempt.incarnation)
        if not saved and not any(each.was_whole for each in later):
            self.violate("the newest step stays", f"{attempt} goes from memory, and no later one was whole")

    def _publish(self, node: str, directory: str) -> None:
        self._forget_memory(directory)
        manifest = self._decode(directory, MANIFEST)
        if isinstance(manifest, str):
            self.violate("a committed checkpoint is whole", f"{directory} was published: {manifest}")
            return
        nodes = {name: _node_in(name) for name in manifest.nodes}
        content, problem = self._read_files(directory, manifest, nodes)
        if not problem and (missing := sorted({*manifest.catalog.files} - content.keys())):
            problem = f"{missing[0]} is on no node"
        lost = any(each in self._lost for each in nodes.values())
        found = problem or self._values(manifest, content)
        if isinstance(found, str):
            if not lost:
                self.violate("a committed checkpoint is whole", f"{directory} was published: {found}")
            return
        attempt, _ = found
        if attempt.step != int(_STEP.search(directory)[1]):  # type: ignore[index]
            self.violate("a committed checkpoint is whole", f"{directory} has values of {attempt}")
        counts = [sum(file in names for names in manifest.nodes.values()) for file in manifest.catalog.files]
        if not manifest.parity_files and min(counts) < min(COPIES, len(nodes)):
            self.violate("as many copies as asked for", f"{attempt} has files on {min(counts)} nodes")
        save = self._save_of(attempt)
        save.nodes = frozenset(nodes.values())
        save.published.add(node)
        self._scheduler.note(f"publishes {attempt} in the memory of {node}")
        self._check_told(save)
        own = [file for name, names in manifest.nodes.items() if nodes[name] == node for file in names]
        self._published[directory] = save
        for name in (MANIFEST, *(each.file for each in manifest.partitions), *own):
            self._files[f"{directory}/{name}"] = directory

    def _read_files(self, directory: str, manifest: Manifest, nodes: dict[str, str]) -> tuple[dict[str, bytes], str]:
        """Read the data files of a step that one node publishes, from all nodes; and what is wrong with them."""
        content: dict[str, bytes] = {}
        below = directory.partition("/run/")[2]
        for name, files in manifest.nodes.items():
            for file in files:
                data = self.read(f"/{mount_of(nodes[name])}/run/{below}/{file}")
                if data is None and nodes[name] in self._lost:
                    continue
                if data is None or len(data) != manifest.sizes.get(file, len(data)):
                    return content, f"{file} has {None if data is None else len(data)} bytes on {name}"
                if content.setdefault(file, data) != data:
                    return content, f"{file} is another on {name}"
        return rebuild(manifest, content), ""

    # At the end.

    def check_memory_left(self, nodes: Iterable[str]) -> None:
        """Check that the run has left nothing in memory, if storage has a step that is as new."""
        for root in () if self.disturbed else map(self._root_of, nodes):
            left = [*self.below(root), *self.names(root)]
            newest = max((int(name.partition("_")[2]) for name in self.below(root)), default=-1)
            if left and newest <= (-1 if self.highest is None else self.highest):
                self.violate("clean-up is complete", f"{root} still has {left}")


def _node_in(name: str) -> str:
    """Return the node that a manifest names: "0 (node0:/memory/run/...)"."""
    return name.partition("(")[2].partition(":")[0]
