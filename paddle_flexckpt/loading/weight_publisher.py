"""WeightPublisher: a live model as numbered versions on disk, full or as deltas, for engines that generate with it.

Tested in tests/loading/test_weight_publisher.py and tests/crash/test_weight_versions.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.foreign.huggingface import read_tensor_file
from paddle_flexckpt.foreign.resolved_weights import ResolvedWeights
from paddle_flexckpt.foreign.weight_deltas import CHECKSUMS, ENCODINGS, import_package, new_hasher
from paddle_flexckpt.foreign.weight_versions import (
    COMPRESSION,
    INDEX_FILE,
    list_versions,
    newest_full,
    read_chain,
    remove_version,
    version_directory,
)
from paddle_flexckpt.loading.delta_files import DeltaFiles
from paddle_flexckpt.loading.publishing import Publication, PublishOptions, publish_as
from paddle_flexckpt.media.backend import Backend, Location
from paddle_flexckpt.media.opening import open_destination, shown
from paddle_flexckpt.observers import observed
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import PublishReport
from paddle_flexckpt.tools.tensor_files import TensorFile, make_index, tensor_file
from paddle_flexckpt.transfer.agreement import check_coordinator, check_same
from paddle_flexckpt.transfer.arguments import plain_value
from paddle_flexckpt.transfer.options import GROUP, rule, takes

logger = logging.getLogger("paddle_flexckpt")

_CALL = "WeightPublisher.publish"
# Of a random text in the metadata of each version, by which receivers tell it from one of another run.
ID = "version_id"


@dataclass(frozen=True)
class PublisherOptions(PublishOptions):
    """The options of a publisher of versions.

    Attributes:
        full_every: Every so many versions one is full, so that a receiver need not have those before it; 1: all are.
        encoding: ``"xor"`` has the fewest bytes for weights that change a little; ``"overwrite"`` is faster to apply.
        checksum: The checksum of each tensor; ``"blake3"`` needs the package blake3.
        keep: The newest versions to keep, with all that they need; the newest full version and all after it always
            stay. None keeps all.
    """

    full_every: int = field(default=20, metadata=rule(least=1))
    encoding: Literal["xor", "overwrite"] = field(default="xor", metadata=rule(choices=ENCODINGS))
    checksum: Literal["xxh3-128", "adler32", "blake3"] = field(default="xxh3-128", metadata=rule(choices=CHECKSUMS))
    keep: int | None = field(default=None, metadata=rule(least=1))

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        new_hasher(self.checksum)
        if self.full_every > 1:
            import_package("zstandard")


class WeightPublisher:
    """Numbered versions of a live model's weights in one directory, in the format that slime, miles and SGLang share.

    Each version is full, or a delta: the bytes that have changed since the version before, as that lies on disk. So a
    publisher that has been started anew goes on with the next number. docs/rollout.md has the receivers.
    """

    @takes(PublisherOptions, root="what is compared are the versions there", process_group=GROUP)
    def __init__(
        self,
        root: Location,
        full_every: int = 20,
        encoding: Literal["xor", "overwrite"] = "xor",
        process_group: Any = None,
        **options: Any,
    ) -> None:
        """Touch nothing yet.

        Args:
            root: The directory of the versions, which every rank sees: a path, a URL, or what ``open_storage`` gives.
            process_group: The ranks that take part; all ranks of the job by default.
            **options: Like all other arguments, of :class:`PublisherOptions`.

        Raises:
            TypeError: There is no such option.
        """
        self._root, self._group = root, process_group
        self._options = PublisherOptions(full_every=full_every, encoding=encoding, **options)

    def publish(self, model: Any, full: bool = False) -> PublishReport:
        """Write the next version. Every rank of the group calls this.

        Each rank compares about as many bytes as any other with those of the version before. Besides what
        :func:`publish` takes, a rank holds its largest tensor. A version that was not finished is removed first, and
        its number is used again. The index comes last.

        Args:
            model: As of :func:`publish`.
            full: Whether the version is full in any case; the same on every rank.

        Returns:
            The report.

        Raises:
            ValidationError: As of :func:`publish`; or the version before has other tensors.
            CorruptCheckpointError: The version before is damaged (on every rank, with the same text).
            CheckpointError: Another publisher is writing, or a rank could not write (likewise); there is no new
                version.
            LostRankError: A rank has died. Files of an unfinished version may be left, or the whole version.
        """
        return _publish(self._root, self._options, self._group, model, full)


@observed("publish", "root")
def _publish(root: Location, asked: PublisherOptions, group: Any, model: Any, full: bool) -> PublishReport:
    comm, leader = communicator_for(group), asked.coordinator_rank
    context = f"{_CALL} cannot write to {shown(root)}"
    with contextlib.ExitStack() as stack:

        def look() -> tuple[Backend, bytes]:
            head = asked.encode(_CALL, full=plain_value("full", "bool", full)).decode()
            check_coordinator(comm, leader)
            backend, plan = open_destination(root), (0, 0)
            if comm.position == leader:
                backend.make_directory()
                stack.enter_context(backend.locks.take())
                plan = _plan(backend, asked, full)
            return backend, json.dumps([head, *plan]).encode()

        backend, answers = comm.together(look, context)
        views = [json.loads(answer) for answer in answers]
        check_same([view[0].encode() for view in views], context, comm.ranks)
        _, number, base = views[leader]
        kind = functools.partial(_DeltaPublication, backend, base) if base else _FullPublication
        report = publish_as(kind, model, version_directory(backend, number), comm, asked, _CALL)
        after = f"version {number} is in {shown(root)}, and older ones cannot be removed"
        comm.lead(leader, lambda: _remove_old(backend, asked.keep), after)
    return replace(report, version=number, base_version=base or None)


def _plan(root: Backend, asked: PublisherOptions, full: bool) -> tuple[int, int]:
    """Remove versions that were not finished; return the next one's number, and that of its base, 0 for a full one."""
    newest = max(list_versions(root), default=0)
    for number in reversed(list_versions(root, unfinished=True)):
        if number > newest:
            remove_version(root, number)
    if full or not newest or asked.full_every == 1:
        return newest + 1, 0
    try:
        return newest + 1, newest if len(read_chain(root, newest)) < asked.full_every else 0
    except CorruptCheckpointError as error:
        logger.warning("the next version of weights is a full one: %s", error)
        return newest + 1, 0


def _remove_old(root: Backend, keep: int | None) -> None:
    """Remove the versions before the newest full one that is no newer than those to keep."""
    found = list_versions(root)
    oldest = None if keep is None else newest_full(root, found[: max(0, len(found) - keep + 1)])
    for number in reversed(list_versions(root, unfinished=True)):
        if oldest is not None and number < oldest:
            remove_version(root, number)


class _FullPublication(Publication):
    _options: PublisherOptions

    def _divide(self) -> list[TensorFile]:
        metadata, files = {"format": "pt", ID: self._token}, super()._divide()
        # A single file has an index, too, and the name that goes with it.
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        return [tensor_file(name, file.names, self._infos, metadata=metadata) for name, file in zip(names, files)]

    def _look_back(self) -> None:
        _, answers = self._comm.together(lambda: (None, json.dumps(self._sums()).encode()), self._context)
        self._all_sums = {name: each for answer in answers for name, each in json.loads(answer).items()}

    def _sums(self) -> dict[str, str]:
        """Return the checksums of the tensors in this rank's files, which are durable."""
        found, backend = dict[str, str](), self._output.backend
        for file in (os.path.basename(self._files.path(file.name)) for file in self._own):
            with backend.open(file) as stored:
                for name, tensor in read_tensor_file(backend, file).tensors.items():
                    hasher = new_hasher(self._options.checksum)
                    hasher.update(stored.read(tensor.begin, tensor.end - tensor.begin))
                    found[name] = hasher.hexdigest()
        return found

    def _index(self) -> tuple[str, bytes]:
        metadata = {ID: self._token, "checksum_format": self._options.checksum, "checksums": self._all_sums}
        return INDEX_FILE, make_index(self._all_files, metadata)


class _DeltaPublication(Publication):
    writes_in_place = False
    _files: DeltaFiles

    def __init__(
        self, root: Backend, base: int, comm: Communicator, output: Backend, asked: PublisherOptions, call: str
    ) -> None:
        super().__init__(comm, output, asked, call)
        self._root, self._base, self._asked = root, base, asked

    def _open_files(self) -> DeltaFiles:
        # With a thousand ranks a version has as many files: a rank reads those that have its tensors.
        own = {name for file in self._own for name in file.names}
        before = ResolvedWeights(self._root, read_chain(self._root, self._base, wanted=own))
        how = self._asked.encoding, self._asked.checksum
        files = DeltaFiles(self._output, self._all_files, self._infos, before, *how)
        self._closing.callback(files.close)
        self._output.backend.make_directory()
        return files

    def _look_back(self) -> None:
        """Let ranks that have changes write their files, which are numbered. Two collectives."""
        _, answers = self._comm.together(lambda: (None, json.dumps(self._files.changed).encode()), self._context)
        changed: dict[int, dict[str, int]] = dict(enumerate(map(json.loads, answers)))
        writers = [rank for rank, names in changed.items() if names]
        file_of = {rank: f"model-{i:05d}-of-{len(writers):05d}.safetensors" for i, rank in enumerate(writers)}
        self._map = {name: file_of[rank] for rank in writers for name in sorted(changed[rank])}
        self._sizes = {file_of[rank]: sum(changed[rank].values()) for rank in writers}
        own = file_of.get(self._comm.position)
        self._on_all(lambda: self._files.write_file(own) if own is not None else None)
        self._bytes_written = self._sizes.get(own or "", 0)

    def _index(self) -> tuple[str, bytes]:
        metadata = {
            "version": f"{self._base + 1:06d}",
            "base_version": f"{self._base:06d}",
            "delta_encoding": self._asked.encoding,
            "compression_format": COMPRESSION,
            "checksum_format": self._asked.checksum,
            ID: self._token,
        }
        return INDEX_FILE, json.dumps({"metadata": metadata, "weight_map": self._map}).encode()

    def report(self, begin: float) -> PublishReport:
        total = sum(self._sizes.values())
        return replace(super().report(begin), files=[*self._sizes], keys=len(self._map), total_bytes=total)
