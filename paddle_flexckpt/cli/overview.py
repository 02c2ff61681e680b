"""flexckpt ls, du and clean: list checkpoints, sum up their bytes, and remove what dead saves have left.

Tested in tests/cli/test_overview.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.cli.common import Outcome, add_checkpoint, checkpoints_of, table
from paddle_flexckpt.foreign.formats import SourceDirectory, explain_lacking, others_below
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.media.removals import leads_elsewhere
from paddle_flexckpt.native.directory import CheckpointInfo, LockedManifest, list_checkpoints
from paddle_flexckpt.native.save_names import lost_ids
from paddle_flexckpt.native.unfinished import LostManifest, UnfinishedSave, clean_up, unfinished_in, walk
from paddle_flexckpt.optimizer_states import MASTER, split_state
from paddle_flexckpt.rollout.segment import SegmentFile, find_segments
from paddle_flexckpt.tools.memory_runs import MemoryRun, find_runs, remove_unheld
from paddle_flexckpt.tools.step_record import RECORD, StepRecord, read_record
from paddle_flexckpt.transfer.names import is_state

_GROUPS = ("layer", "role", "dtype", "rank")
_LAYER = re.compile(r"(.*?\.?\d+)\.")


def add_command(commands: Any) -> None:
    """Add the parsers of these commands."""
    listing = commands.add_parser(
        "ls",
        help="list the checkpoints of a directory: step, age, size, whether each is complete",
        description="Lists the checkpoints in a directory and in those up to two levels below it, and the saves that "
        "have begun and are not complete; then those of other programs. Bytes of tensors are not read: `flexckpt "
        "verify` does that. The exit status is 1 if a checkpoint is not complete, a save has died, or no checkpoint is "
        "there.",
        epilog="example: flexckpt ls run",
    )
    listing.add_argument(
        "root", metavar="ROOT", help="a directory or URL with checkpoints, or with directories of them"
    )

    usage = commands.add_parser(
        "du",
        help="sum up the bytes of a checkpoint by layer, role, dtype or rank",
        epilog="example: flexckpt du run/step_00000100 --by role",
    )
    add_checkpoint(usage, all_steps=True)
    usage.add_argument(
        "--by",
        choices=_GROUPS,
        default="role",
        help="the groups: parameters and each kind of state (default), layers, dtypes, or the ranks that saved",
    )

    cleaning = commands.add_parser(
        "clean",
        help="list, or remove, what saves that died have left; or one checkpoint",
        description="Lists the saves that have begun and are not complete, in a directory and up to two levels below "
        "it. With --remove it removes the files of those that died. A running save holds a lock, and is left alone; so "
        "are all checkpoints, and files of which no save is known. In the directory of a memory tier it lists the runs "
        "that have steps there, and in shared memory the segments of weights that were pushed to engines. With "
        "--remove it removes those that no process holds, also the steps of a run that has crashed and is to be "
        "restarted. The runs of memory tiers one level below are only listed. With --id or --step it shows one "
        "checkpoint instead, and with --remove it removes that; the only complete one only with --only too.",
        epilog="example: flexckpt clean run --remove",
    )
    cleaning.add_argument("root", metavar="ROOT", help="a directory or URL of checkpoints, as of ls")
    cleaning.add_argument("--remove", action="store_true", help="remove the files of saves that died")
    which = cleaning.add_mutually_exclusive_group()
    which.add_argument(
        "--id", type=int, dest="unique_id", metavar="ID", help="one checkpoint of ROOT itself, by its id"
    )
    which.add_argument("--step", type=int, metavar="N", help="one checkpoint of ROOT and below, by its step")
    cleaning.add_argument("--only", action="store_true", help="with --remove: even if no other complete one is there")

    for parser, run in ((listing, _list), (usage, _usage), (cleaning, _clean)):
        parser.add_argument("--json", action="store_true", help="print all as JSON")
        parser.set_defaults(run=run)


def _list(options: argparse.Namespace) -> Outcome:
    """Return a line for each checkpoint and unfinished save; code 1 if one is not complete, and is not being saved."""
    backend = open_backend(options.root)
    _check_exists(backend)
    found = _checkpoints(backend)
    others = list(others_below(backend))
    unfinished, lost = find_unfinished(backend), find_lost(backend)
    if not found and not unfinished and not lost and not others:
        raise ValidationError(
            [f"there are no checkpoints in {backend.path} and below. Remedy (FC301): correct the path"]
        )
    records = [_record(info) if info.complete else None for info in found]
    if options.json:
        from paddle_flexckpt.cli.outputs import ListedCheckpoint, ListReport

        listed = [
            ListedCheckpoint(
                **vars(info),
                time=None if record is None else record.time,
                metrics=None if record is None else record.metrics,
                run=(record.run or None) if record else None,
            )
            for info, record in zip(found, records)
        ]
        text = ListReport(backend.path, listed, unfinished, lost, others).to_json()
    else:
        now = time.time()
        lines = [("step", "id", "age", "bytes", "ranks", "complete", "run", "metrics", "path")]
        for info, record in zip(found, records):
            metrics = record.metrics if record else {}
            lines.append(
                (
                    "-" if info.step is None else str(info.step),
                    str(info.unique_id),
                    _age_of(info, record, now),
                    format_bytes(info.total_bytes),
                    str(info.world_size),
                    "yes" if info.complete else "no",
                    (record.run if record else "") or "-",
                    ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()) or "-",
                    info.path + (f": {info.problem}" if info.problem else ""),
                )
            )
        shown = table(lines, right=(0, 1, 2, 3, 4)) if found else []
        shown += [f"other: {other.path}: {other.title}" for other in others]
        text = "\n".join([*shown, *map(lost_line, lost), *unfinished_lines(options.root, unfinished)])
    is_whole = (found or others) and not lost and all(info.complete for info in found) and is_all_running(unfinished)
    return Outcome(text, int(not is_whole))


def find_lost(backend: Backend) -> list[LostManifest]:
    """Return the checkpoints, in a directory and below, that were committed and whose manifest is gone."""
    return [LostManifest(each.path, unique_id) for each in walk(backend) for unique_id in lost_ids(each.names())]


def lost_line(lost: LostManifest) -> str:
    """Return a line about a manifest that is gone, with what brings it back."""
    path, unique_id = lost.path, lost.unique_id
    return (
        f"manifest lost: {path}, id {unique_id}: restore {open_backend(path).where(f'{unique_id}.manifest')} from a "
        f"copy, or `flexckpt repair {path} --id {unique_id}`"
    )


def _check_exists(backend: Backend) -> None:
    """Raise ValidationError if there is no such directory."""
    lacking = explain_lacking(backend)
    if lacking:
        raise ValidationError([lacking])


def _checkpoints(backend: Backend) -> list[CheckpointInfo]:
    """Return the checkpoints in a directory and up to two levels below it, and one more in that of a memory tier.

    A memory tier has a directory for each run.
    """
    found = list_checkpoints(backend)
    seen = {info.path for info in found}
    children = [backend.child(name) for name in sorted(backend.names("directories"))]
    rooms = [each.child(os.path.basename(run.path)) for each in children for run in find_runs(each)]
    for each in children:
        is_known = each.path in seen  # its own checkpoints are in the list
        rooms += [each.child(name) for name in sorted(each.names("directories"))] if is_known else [each]
    below = [info for each in rooms for info in list_checkpoints(each) if info.path not in seen]
    return found + list({(info.path, info.unique_id): info for info in below}.values())


def find_unfinished(backend: Backend) -> list[UnfinishedSave]:
    """Return the saves, in a directory and up to two levels below it, that are running or died."""
    return [save for each in walk(backend) for save in unfinished_in(each, ask=True)]


def is_all_running(unfinished: Sequence[UnfinishedSave]) -> bool:
    """Return whether no save of these has died, as far as can be known."""
    return all(save.running is not False for save in unfinished)


def unfinished_lines(root: str, unfinished: Sequence[UnfinishedSave]) -> list[str]:
    """Return a line for each unfinished save, and what removes those that died."""
    return [*map(_unfinished_line, unfinished), *_clean_hint(root, unfinished)]


def _unfinished_line(save: UnfinishedSave) -> str:
    state = {None: "running, or it died", True: "running", False: "it died"}[save.running]
    if save.prepared:
        state = "complete on this node, perhaps not on others"
    count = "1 file" if len(save.files) == 1 else f"{len(save.files)} files"
    return f"unfinished: {save.path}, id {save.unique_id}: {count}, {format_bytes(save.bytes)}; {state}"


def _clean_hint(root: str, unfinished: Sequence[UnfinishedSave]) -> list[str]:
    return [] if all(save.running for save in unfinished) else [f"`flexckpt clean {root} --remove` removes what died"]


def _clean(options: argparse.Namespace) -> Outcome:
    """Return a line for each unfinished save, or for each directory that was cleaned; code 1 if something stays."""
    from paddle_flexckpt.foreign.paddle_files import open_to_save

    backend = open_backend(options.root)
    _check_exists(backend)
    if options.unique_id is not None or options.step is not None:
        return _clean_one(options, backend)
    own = find_runs(backend)
    below = [run for name in sorted(backend.names("directories")) for run in find_runs(backend.child(name))]
    runs = [*own, *below]
    segments = find_segments(backend.path, options.remove) if backend.has_path else []
    freed = [run.path for run in own if options.remove and remove_unheld(backend, run)]
    freed += [each.path for each in segments if options.remove and not each.held]
    directories = [(each, unfinished_in(each, ask=True)) for each in walk(backend)]
    unfinished = [save for _, saves in directories for save in saves]
    cleaned = [
        clean_up(open_to_save(each), remove_empty=each is not backend)
        for each, saves in directories
        if saves and options.remove
    ]
    lost = find_lost(backend)
    if options.json:
        from paddle_flexckpt.cli.outputs import CleanReport

        return Outcome(
            CleanReport(backend.path, unfinished, cleaned, runs, segments, freed, lost=lost).to_json(),
            int(any(each.kept for each in cleaned)),
        )
    lost_lines = [*map(lost_line, lost)]
    if not unfinished and not runs and not segments:
        return Outcome("\n".join([f"there is no unfinished save in {backend.path} and below", *lost_lines]))
    memory: list[MemoryRun | SegmentFile] = [*runs, *segments]
    lines = [*lost_lines, *(_memory_line(each, each.path in freed) for each in memory)]
    lines += map(_unfinished_line, unfinished)
    for each in cleaned:
        text = f"{each.path}: {len(each.removed)} files removed" + ", and the directory" * each.directory_removed
        lines.append(text + (f"; {each.kept}" if each.kept else ""))
    if not options.remove:
        lines += _clean_hint(options.root, unfinished)
    is_free = not all([run.held for run in own] + [segment.held for segment in segments])
    rooms = [options.root] if is_free and not options.remove else []
    rooms += dict.fromkeys(os.path.dirname(run.path) for run in below if not run.held)
    lines += [f"`flexckpt clean {each} --remove` removes the memory that no process holds" for each in rooms]
    return Outcome("\n".join(lines), int(any(each.kept for each in cleaned)))


def _clean_one(options: argparse.Namespace, backend: Backend) -> Outcome:
    """Return a line about the checkpoint that was chosen, and whether it was removed; code 1 if it has to stay."""
    from paddle_flexckpt.cli.outputs import CleanReport

    found = _checkpoints(backend)
    if options.step is None:
        chosen = [each for each in found if each.path == backend.path and each.unique_id == options.unique_id]
        there = [each.unique_id for each in found if each.path == backend.path]
    else:
        chosen = [each for each in found if each.step == options.step]
        there = [each.step for each in found if each.step is not None]
    if len(chosen) != 1:
        what = f"id {options.unique_id}" if options.step is None else f"step {options.step}"
        paths = ", ".join(each.path for each in chosen)
        raise ValidationError(
            f"{backend.path} has {f'several checkpoints of {what}: {paths}' if chosen else f'no {what}'}; there are "
            f"{there or 'none'}. Remedy (FC301): give one of these, or the directory of one, by --id"
        )
    (info,) = chosen
    is_only = info.complete and sum(each.complete for each in found) == 1
    directory = backend
    for name in PurePosixPath(info.path).relative_to(backend.path).parts:
        directory = directory.child(name)
    is_link = leads_elsewhere(directory)
    refused = options.remove and (is_link or (is_only and not options.only))
    removed = _remove(backend, directory, info) if options.remove and not refused else []
    if options.json:
        return Outcome(CleanReport(backend.path, [], chosen=info, removed=removed).to_json(), int(refused))
    lines = [
        f"id {info.unique_id} of {info.path}: step {'-' if info.step is None else info.step}, "
        f"{format_bytes(info.total_bytes)}, {'complete' if info.complete else info.problem}"
    ]
    if is_only and not removed:
        lines.append(f"it is the only complete checkpoint in {backend.path} and below: after it none can be loaded")
    if removed:
        lines.append(f"{len(removed)} files removed")
    elif refused and is_link:
        lines.append("nothing was removed: it is behind a link")
    elif refused:
        lines.append("nothing was removed: add --only to remove it all the same")
    else:
        which = f"--id {options.unique_id}" if options.step is None else f"--step {options.step}"
        lines.append(f"`flexckpt clean {options.root} {which} --remove{' --only' * is_only}` removes it")
    return Outcome("\n".join(lines), int(refused))


def _remove(root: Backend, backend: Backend, info: CheckpointInfo) -> list[str]:
    """Remove a checkpoint; below the root also its directory, if that is empty, with the manager's page and report."""
    from paddle_flexckpt.foreign.paddle_files import open_to_save
    from paddle_flexckpt.native.id_removal import remove_checkpoint

    removed = remove_checkpoint(open_to_save(backend), info.unique_id)
    if backend is not root and not backend.names("any"):
        backend.remove_directory()
        above, name = open_backend(os.path.dirname(info.path)), os.path.basename(info.path)
        beside = {f"{name}.html", f"{name}.report.json"}.intersection(above.names())
        for each in sorted(beside):
            above.remove(each)
        removed += sorted(beside)
    return removed


def _memory_line(memory: MemoryRun | SegmentFile, is_removed: bool) -> str:
    state = "removed" if is_removed else "a process holds it" if memory.held else "no process holds it"
    if isinstance(memory, SegmentFile):
        return f"segment: {memory.path}: {format_bytes(memory.bytes)}; {state}"
    step = "no step" if memory.step is None else f"step {memory.step}"
    return f"memory: {memory.path}, of {memory.root}: {step}, {format_bytes(memory.bytes)}; {state}"


def _record(info: CheckpointInfo) -> StepRecord | None:
    backend = open_backend(info.path)
    try:
        with LockedManifest(SourceDirectory(backend), info.unique_id, [RECORD]) as manifest:
            return read_record(backend, manifest)
    except (CorruptCheckpointError, ValidationError):
        return None  # the checkpoint is complete without it; `flexckpt verify` finds the damage


def _age_of(info: CheckpointInfo, record: StepRecord | None, now: float) -> str:
    """Return a checkpoint's age by its record, or else by its manifest file; "-" where neither tells it."""
    if record is not None:
        return _age(now - record.time)
    backend = open_backend(info.path)
    if backend.has_path:
        with contextlib.suppress(OSError):  # there is none, or it is not a directory
            return _age(now - os.path.getmtime(backend.where(f"{info.unique_id}.manifest")))
    return "-"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _usage(options: argparse.Namespace) -> str:
    """Return a line for each group, the largest first."""
    sizes, keys = Counter[str](), Counter[str]()
    steps = [(each.path, each.unique_id) for each in checkpoints_of(options.source, options.unique_id)]
    for path, unique_id in steps or [(options.source, options.unique_id)]:
        catalog = SourceDirectory(path).read_manifest(unique_id).catalog
        names, of_row = _groups(catalog, options.by)
        for group, name in enumerate(names):
            rows = of_row == group
            sizes[name] += int(catalog.byte_length[rows].sum())
            keys[name] += len(np.unique(catalog.key[rows]))
        keys[""] += len(np.unique(catalog.key))
    total, every_key = sum(sizes.values()), keys.pop("")
    groups = sorted(sizes.items(), key=lambda each: -each[1])
    if options.json:
        from paddle_flexckpt.cli.outputs import Usage, UsageReport

        usages = [Usage(name, size, keys[name]) for name, size in groups]
        return UsageReport(options.source, options.by, usages, total).to_json()
    lines = [(options.by, "bytes", "", "share", "keys")]
    for name, size in groups:
        lines.append((name, str(size), format_bytes(size), f"{size / max(total, 1):.1%}", str(keys[name])))
    lines.append(("total", str(total), format_bytes(total), "", str(every_key)))
    last = [f"in {len(steps)} checkpoints"] if steps else []
    return "\n".join([*table(lines, right=(1, 2, 3, 4)), *last])


def _groups(catalog: Catalog, by: str) -> tuple[list[str], np.ndarray]:
    """Return the groups' names and, int64 ``[n]``, the group of each row."""
    if by == "rank":
        ranks, of_row = np.unique(catalog.rank, return_inverse=True)
        return [str(rank) for rank in ranks.tolist()], of_row
    if by == "dtype":
        return list(catalog.dtypes), catalog.dtype
    everything = set(catalog.keys)
    group = _layer_of if by == "layer" else _role_of
    found = [group(key, everything) for key in catalog.keys]
    names = sorted(set(found))
    number = {name: i for i, name in enumerate(names)}
    of_key = np.asarray([number[each] for each in found], dtype=np.int64)
    return names, of_key[catalog.key]


def _layer_of(key: str, keys: set[str]) -> str:
    if key.startswith(EXTRA_STATE):
        return "extra state"
    match = _LAYER.match(split_state(key, keys)[0] + ".")
    return match[1] if match else split_state(key, keys)[0].rpartition(".")[0] or "(no layer)"


def _role_of(key: str, keys: set[str]) -> str:
    if key.startswith(EXTRA_STATE):
        return "extra state"
    state = split_state(key, keys)[1]
    if not state and is_state(key, keys):
        return "states of other names"
    return "master weights" if state == MASTER else f"state {state}" if state else "parameters"
