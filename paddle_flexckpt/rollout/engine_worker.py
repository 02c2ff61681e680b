"""The state of one worker of an inference engine: which version it serves, which is staged, and the way back.

A worker takes a version from a segment: a complete safetensors file in shared memory, which never changes. Nothing
here knows an engine: what a worker needs of it is :class:`Engine`. Tested in tests/rollout/test_engine_worker.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.rollout.engine_client import PROTOCOL
from paddle_flexckpt.rollout.mapped_tensors import Kinds, MappedTensors, ModelDirectory
from paddle_flexckpt.rollout.segment import DIRECTORY, Region, place_of_directory

# The version of an engine that holds the weights of its own model directory.
BASE = "base"
# The version of a worker whose commit failed, until it is rolled back or commits another.
UNDEFINED = "undefined"
_MOST_NAMES = 20

Tensors = Mapping[str, np.ndarray]


@dataclass
class LiveComparison:
    """The result of comparing an engine's live parameters with a version.

    Attributes:
        compared: The number of tensors of which a part is on this rank.
        different: Those whose part differs.
        unreadable: Those that could not be compared, and the reason.
    """

    compared: int = 0
    different: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """The part of an engine that a worker calls. The arrays are views of mapped memory, which cannot be written to."""

    def load(self, tensors: Tensors) -> None:
        """Load a complete set of tensors into the model; all of it, or raise."""

    def compare(self, tensors: Tensors) -> LiveComparison:
        """Compare the model's parameters with a complete set of tensors."""


class Version(NamedTuple):
    """A version of the weights, with path and digest of its segment; the base has none."""

    name: str
    tensors: MappedTensors | None
    path: str = ""
    digest: str = ""


class OwnerError(ValidationError):
    """Another switch owns the worker."""


def answer(
    rank: int,
    function: Callable[..., Mapping[str, Any]],
    arguments: Sequence[Any],
    named: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a call's results as a status, whatever happens: an engine loses count of replies where a worker raises.

    The status has the ``call`` of the named arguments, by which the caller knows that it is of that call.
    """
    status = {"ok": True, "rank": rank, "call": named.get("call", "")}
    try:
        return {**status, **function(*arguments, **{name: each for name, each in named.items() if name != "call"})}
    except (KeyboardInterrupt, SystemExit):  # the process ends
        raise
    except BaseException as error:
        return {**status, "ok": False, "error": f"{type(error).__name__}: {error}"}


def _of_owner(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Declare that a method is refused unless the worker's owner calls it."""

    @functools.wraps(method)
    def call(self: EngineWorker, *arguments: str, owner: str = "") -> dict[str, Any]:
        self._check_owner(owner)
        try:
            return method(self, *arguments)
        finally:
            self._heard = time.monotonic()

    return call


class EngineWorker:
    """One rank of an engine.

    A version is staged, committed on all ranks, and then accepted. Until then :meth:`rollback` restores the version
    that was accepted last, which is the same on every rank. While it has an owner, it refuses changes by others.
    """

    def __init__(self, engine: Engine, directory: str) -> None:
        """Args: engine: the engine on this rank. directory: its model directory."""
        self._engine = engine
        self._base = ModelDirectory(directory)
        self._accepted = Version(BASE, None)
        self._current: Version | None = self._accepted
        self._staged: Version | None = None
        self._needs_restart = False
        self._owner, self._heard = "", time.monotonic()

    def status(self, directory: str = DIRECTORY) -> dict[str, Any]:
        """Return what this worker holds, the segments that it has mapped, and the identity of their directory."""
        mapped = {version.path for version in (self._accepted, self._current, self._staged) if version}
        return {
            "version": self._name,
            "accepted": self._accepted.name,
            "staged": self._staged.name if self._staged else None,
            "segments": sorted(os.path.basename(path) for path in mapped if path),
            "place": place_of_directory(directory),
            "needs_restart": self._needs_restart,
            "owner": self._owner,
            "silent": time.monotonic() - self._heard,
            "protocol": PROTOCOL,
        }

    @_of_owner
    def begin(self, owner: str) -> dict[str, Any]:
        """Take a new owner, or none (""), in place of the one that calls; drop what that one has staged."""
        if owner != self._owner:
            self._drop_staged()
        self._owner = owner
        return {}

    @_of_owner
    def stage(self, version: str, path: str, digest: str = "") -> dict[str, Any]:
        """Map a segment and compare its names, element types and shapes with the engine's checkpoint.

        The model is not touched. What was staged before is dropped. ``digest`` is that of the sealed segment; without
        it, what is there now counts. An error says that the segment does not fit, or is no whole safetensors file.
        """
        self._check_usable()
        self._drop_staged()
        if not isinstance(version, str) or version in ("", BASE, UNDEFINED):
            raise ValidationError(f"a version cannot have the name {version!r}")
        tensors = MappedTensors([path], held=True)
        problems = list(_differences(self._base.kinds, tensors.kinds, path))
        if problems:
            tensors.close()
            raise ValidationError(problems, f"version {version} does not fit the engine's model")
        self._staged = Version(version, tensors, path, digest or tensors.digest())
        return {"tensors": len(tensors.kinds)}

    @_of_owner
    def commit(self, version: str) -> dict[str, Any]:
        """Load the staged version, which is the only one that may be named; the engine has to be paused.

        After another error the model may hold parts of both, until :meth:`rollback`.
        """
        self._check_usable()
        if self._staged is None or self._staged.name != version:
            held = f"version {self._staged.name} is" if self._staged else "nothing is"
            raise ValidationError(f"version {version} cannot be committed: {held} staged")
        self._current, staged, self._staged = None, self._staged, None
        self._load(staged)
        self._current = staged
        return {"version": version}

    @_of_owner
    def rollback(self) -> dict[str, Any]:
        """Drop what is staged, and restore the version that was accepted last; the engine has to be paused.

        After an error the worker refuses to stage and to commit: the engine has to be restarted.
        """
        self._check_usable()
        self._drop_staged()
        if self._current is not self._accepted:
            self._current, self._needs_restart = None, True
            self._load(self._accepted)
            self._current, self._needs_restart = self._accepted, False
        return {"version": self._accepted.name}

    @_of_owner
    def accept(self, version: str) -> dict[str, Any]:
        """Drop the version before the committed one; ``released``: its segment is no longer mapped."""
        if self._current is None or self._current.name != version:
            raise ValidationError(f"version {version} cannot be accepted: the worker holds version {self._name}")
        before, self._accepted = self._accepted, self._current
        return {"released": before is self._accepted or before.tensors is None or before.tensors.close()}

    @_of_owner
    def discard(self) -> dict[str, Any]:
        """Drop what is staged; ``released`` says whether its segment is no longer mapped."""
        return {"released": self._drop_staged()}

    def digests(self, request: str) -> dict[str, Any]:
        """Compare digests with the bytes of the current version, and these with the live parameters.

        ``request`` is JSON: ``{"version": ..., "regions": [[name, base, extents, strides, digest], ...]}``. A region is
        of a tensor's elements in row-major order; its numbers count elements. Its digest is xxh3-128, in hexadecimal,
        of its elements in the order of ``extents``.

        Raises:
            ValidationError: It is of another version than the worker holds, or names a region that is not there.
        """
        wanted = json.loads(request)
        if self._current is None or wanted["version"] != self._current.name:
            raise ValidationError(f"the digests are of version {wanted['version']}, the worker holds {self._name}")
        with self._arrays(self._current) as arrays:
            different = _differing(arrays, wanted["regions"])
            live = self._engine.compare(arrays)
        return {
            "compared": len(wanted["regions"]),
            "different": len(different),
            "different_names": different[:_MOST_NAMES],
            "live_compared": live.compared,
            "live_different": len(live.different),
            "live_different_names": live.different[:_MOST_NAMES],
            "live_unreadable": len(live.unreadable),
            "live_unreadable_names": dict(list(live.unreadable.items())[:_MOST_NAMES]),
        }

    def _load(self, version: Version) -> None:
        if version.tensors is not None and version.tensors.digest() != version.digest:
            raise CorruptCheckpointError(f"the segment {version.path} has changed since it was written")
        with self._arrays(version) as arrays:
            self._engine.load(arrays)

    def _drop_staged(self) -> bool:
        staged, self._staged = self._staged, None
        return staged is None or staged.tensors is None or staged.tensors.close()

    def _check_owner(self, owner: str) -> None:
        if owner != self._owner:
            now = f"{self._owner!r} switches" if self._owner else "nobody switches"
            raise OwnerError(f"{now} this engine now{f', and not {owner!r}' if owner else ''}")

    def _check_usable(self) -> None:
        if self._needs_restart:
            raise CheckpointError("a roll-back failed: the model may hold parts of two versions; restart the engine")

    @property
    def _name(self) -> str:
        return self._current.name if self._current else UNDEFINED

    @contextlib.contextmanager
    def _arrays(self, version: Version) -> Iterator[Tensors]:
        tensors = version.tensors or self._base.map()
        try:
            yield tensors.arrays
        finally:
            if version.tensors is None:
                tensors.close()


def _differences(expected: Kinds, got: Kinds, path: str) -> Iterator[Problem]:
    for name in sorted(expected.keys() | got.keys()):
        wanted, found = (_shown(kinds.get(name)) for kinds in (expected, got))
        if wanted != found:
            yield Problem("a tensor is not as in the engine's checkpoint", name, None, path, wanted, found)


def _shown(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{kind[0]} {list(kind[1])}" if kind else "no such tensor"


def _differing(arrays: Tensors, regions: Sequence[Any]) -> list[str]:
    different: dict[str, None] = {}
    for name, base, extents, strides, digest in regions:
        try:
            array = arrays[name]
            size = array.itemsize
            region = Region(base * size, tuple(extents), tuple(stride * size for stride in strides), size)
            part = np.ascontiguousarray(region.of(array.reshape(-1).view(np.uint8)))
        except (KeyError, ValueError) as error:
            raise ValidationError(Problem(f"the version has no elements {extents} from {base} on", name)) from error
        if xxhash.xxh3_128_hexdigest(part.view(np.uint8)) != digest:
            different[name] = None
    return list(different)
