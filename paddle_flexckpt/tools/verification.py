"""Verification and repair of a checkpoint, by one process and without Paddle.

Tested in tests/tools/test_verification.py, tests/native/test_verify.py and tests/native/test_repair.py.
"""

from __future__ import annotations

import time

import numpy as np

from paddle_flexckpt.catalog import (
    CorruptCheckpointError,
    Problem,
    group_replicas,
    validate_coverage,
    validate_shards,
)
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.foreign.resolved_weights import ResolvedWeights, resolve_version
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.parity import check_checksum, read_stripe
from paddle_flexckpt.native.partition_files import partition_problems
from paddle_flexckpt.native.repair import rebuild_manifest
from paddle_flexckpt.native.verify import Verification, verify_files
from paddle_flexckpt.observers import observed
from paddle_flexckpt.progress import Meter, ProgressCallback
from paddle_flexckpt.report import RepairReport, VerifyReport
from paddle_flexckpt.transfer.arguments import plain_arguments


@observed("verify", "path")
def verify_checkpoint(
    path: Location, unique_id: int | None = None, *, progress: ProgressCallback | None = None
) -> VerifyReport:
    """Read a whole checkpoint once and list all problems.

    ::

        report = fc.verify_checkpoint("run/shards")
        if not report.ok:
            print(report.problems)

    The size, save token and header of every data file and the checksum of every block are compared with the manifest,
    which has a checksum of its own. The shards have to cover their tensors. One block is in memory at a time.

    Checkpoints of other programs have no checksums: only headers, sizes and indices, and the coverage of tensors by
    shards, are checked. Then ``bytes_verified`` is 0, and the report has a note. Versions of weights have checksums;
    of a full one of another program, only the tensors that deltas touch.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        unique_id: The checkpoint's id; None takes the highest.
        progress: Called with a :class:`~paddle_flexckpt.progress.Progress` as bytes are read.

    Returns:
        All problems, each with key, rank, file and byte where they are known. A damaged manifest is a problem too, and
        then the only one: without it there is nothing to compare with.

    Raises:
        ValidationError: There is no such checkpoint, or it is of a format that this version does not know.
        OSError: The manifest cannot be read.
    """
    begin = time.perf_counter()
    directory = SourceDirectory(path)
    try:
        held = LockedManifest(directory, unique_id)
    except CorruptCheckpointError as error:
        return _without_manifest(directory, unique_id, error, begin)
    with held as manifest:
        catalog = manifest.catalog
        if not manifest.foreign:
            meter = Meter(progress, "verify", int(catalog.byte_length.sum()), len(catalog.files))
            found = verify_files(directory.backend, manifest, meter)
        else:
            # The manifest was made from the files' headers, so they fit. Only versions of weights have checksums.
            weights = resolve_version(path, full=True)
            version = weights if isinstance(weights, ResolvedWeights) else None
            meter = Meter(progress, "verify", 0 if version is None else version.checked_bytes)
            found = Verification() if version is None else version.verify(meter)
        meter.finish()
    problems = _shard_problems(directory, manifest)
    return VerifyReport(
        path=directory.path,
        unique_id=manifest.unique_id,
        files=len(catalog.files),
        keys=len(np.unique(catalog.key)),
        items=len(catalog),
        total_bytes=int(catalog.byte_length.sum()),
        bytes_read=found.bytes_read,
        bytes_verified=found.bytes_verified,
        problems=[
            *found.problems,
            *([] if manifest.foreign else _swapped(directory, manifest, found)),
            *problems,
            *_parity_problems(directory, manifest),
        ],
        recoverable=found.recoverable and not problems,
        seconds={"total": time.perf_counter() - begin},
        has_checksums=not manifest.foreign or 0 < int(catalog.byte_length.sum()) == found.bytes_read,
    )


def _parity_problems(directory: CheckpointDirectory, manifest: Manifest) -> list[Problem]:
    """Return the problems of the parity files that are here: no load needs these as long as no node is lost."""
    problems = []
    for name in sorted(manifest.parity_files.intersection(directory.backend.names())):
        try:
            read_stripe(directory.backend, name, manifest)
            check_checksum(directory.backend, name)
        except CorruptCheckpointError as error:
            file, remedy = directory.backend.where(name), "save again; until then it protects nothing"
            problems.append(Problem("a parity file is damaged", file=file, got=str(error), code="FC305", remedy=remedy))
    return problems


def _without_manifest(
    directory: CheckpointDirectory, unique_id: int | None, error: CorruptCheckpointError, begin: float
) -> VerifyReport:
    """Return the report of a checkpoint whose manifest is damaged, by this error."""
    ids = directory.list_ids()
    if not ids or (unique_id is not None and unique_id not in ids):
        # Another program's: the error names the file.
        seconds = {"total": time.perf_counter() - begin}
        problems = [Problem(str(error))]
        return VerifyReport(directory.path, unique_id or 0, problems=problems, seconds=seconds, has_checksums=False)
    chosen = ids[-1] if unique_id is None else unique_id
    problems = _manifest_problems(directory, chosen, error)
    seconds = {"total": time.perf_counter() - begin}
    return VerifyReport(directory.path, chosen, problems=problems, seconds=seconds)


def _shard_problems(directory: CheckpointDirectory, manifest: Manifest) -> list[Problem]:
    """Return the problems of a manifest's shards, which have to be well-formed and to cover their tensors."""
    catalog = manifest.catalog
    # Malformed shards have no boxes to compare.
    problems = validate_shards(catalog) or validate_coverage(catalog, group_replicas(catalog)).problems
    if not manifest.partial:
        return problems
    remedy = "restore the files that are missing, and repair it again with overwrite=True; or load another checkpoint"
    file = directory.manifest_file(manifest.unique_id)
    return [
        *problems,
        Problem("the checkpoint is partial", file=file, got=manifest.partial, code="FC306", remedy=remedy),
    ]


def _manifest_problems(directory: CheckpointDirectory, unique_id: int, error: CorruptCheckpointError) -> list[Problem]:
    """Return the problems of a manifest that cannot be read: all damaged partitions, or the manifest itself."""
    try:
        problems = partition_problems(directory.backend, directory.read_committed(unique_id, ()))
    except (OSError, CorruptCheckpointError):
        problems = []
    return problems or [
        Problem(
            f"the manifest is damaged: {without_remedy(error)}",
            file=directory.manifest_file(unique_id),
            code="FC306",
            remedy="restore the file from a copy, or rebuild it with repair_manifest(path, unique_id, overwrite=True)",
        )
    ]


def _swapped(directory: CheckpointDirectory, manifest: Manifest, found: Verification) -> list[Problem]:
    """Return the problem that the manifest belongs to other data files, if these suggest it."""
    file, remedy = directory.manifest_file(manifest.unique_id), "restore the manifest that belongs to the data files"
    names = manifest.catalog.files
    others = [name for each, _, name in directory.data_files() if each == manifest.unique_id and name not in names]
    if found.tokens and not found.bytes_verified:
        what, tokens = "no data file is of the save that this manifest belongs to", sorted(set(found.tokens.values()))
        expected = " or ".join(tokens[:3])
        return [Problem(what, file=file, expected=expected, got=manifest.save_token, code="FC304", remedy=remedy)]
    if names and len(found.missing) == len(names) and others:
        what = "the files that this manifest names are missing, and others of its id are there"
        expected, got = ", ".join(names[:3]), ", ".join(others[:3])
        return [Problem(what, file=file, expected=expected, got=got, code="FC304", remedy=remedy)]
    return []


@plain_arguments
def repair_manifest(
    path: Location,
    unique_id: int,
    *,
    overwrite: bool = False,
    save_token: str | None = None,
    fewer_files: bool = False,
) -> RepairReport:
    """Rebuild a lost manifest of a checkpoint from the headers of its data files.

    The block checksums are computed anew from the data as it is: they protect it from now on, but **damage that
    happened before the repair cannot be found**. A manifest that can be read, or some of its partitions, is
    compared with the data files: damage and losses that it shows are not accepted.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        unique_id: The checkpoint's id.
        overwrite: Whether a manifest that is there, damaged or not, may be replaced.
        save_token: The save whose files to use, if files of several saves have this id.
        fewer_files: Whether there may be fewer data files than ranks of the save. A rank with nothing to write has no
            file. Without a manifest, or the file for Paddle's own loader, this cannot be distinguished from a lost
            file: then the checkpoint is marked as partial. Loads warn of it, and it does not count as complete.

    Returns:
        The report.

    Raises:
        ValidationError: A manifest is there, there are no such files, or they are damaged in a way that shows or do not
            make up a whole checkpoint of one save; nothing was written.
        CorruptCheckpointError: A data file changed while it was read; nothing was written.
        CheckpointError: A save is in progress there, or the checkpoint was changed meanwhile; nothing was written.
        OSError: The file system refused.
    """
    begin = time.perf_counter()
    directory = open_to_save(path)
    replaced = directory.manifest_bytes(unique_id)
    rebuilt = rebuild_manifest(directory, unique_id, overwrite, save_token, fewer_files)
    directory.write_manifest(rebuilt.manifest, replaced)
    catalog = rebuilt.manifest.catalog
    return RepairReport(
        path=directory.path,
        unique_id=unique_id,
        save_token=rebuilt.manifest.save_token,
        step=rebuilt.manifest.step,
        partial=rebuilt.manifest.partial,
        files=list(catalog.files),
        left_out=rebuilt.left_out,
        keys=len(catalog.keys),
        items=len(catalog),
        bytes_read=int(catalog.byte_length.sum()),
        seconds={"total": time.perf_counter() - begin},
    )
