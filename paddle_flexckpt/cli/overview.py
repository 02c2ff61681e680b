"""flexckpt ls, du and doctor: what there is, what takes the room, and what this installation lacks.

Tested in tests/cli/test_overview.py.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np

from paddle_flexckpt._version import __version__
from paddle_flexckpt.aoa.sides import MASTER, split_state
from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, CorruptCheckpointError, ValidationError
from paddle_flexckpt.cli.arguments import Outcome, add_checkpoint, table
from paddle_flexckpt.cli.outputs import (
    DoctorReport,
    ListedCheckpoint,
    ListReport,
    Package,
    PatchState,
    Usage,
    UsageReport,
)
from paddle_flexckpt.engine.step_record import RECORD, StepRecord, read_record
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.listing import CheckpointInfo, list_checkpoints
from paddle_flexckpt.patching import check_patch, find_root, read_patches
from paddle_flexckpt.report import format_bytes

_GROUPS = ("layer", "role", "dtype", "rank")
_LAYER = re.compile(r"(.*?\.?\d+)\.")
#: Distribution, versions that the tests run with (as a pattern), and what it is for.
_PACKAGES = (
    ("paddlepaddle", r"3\.[0-3]\.", "saves and loads of live states"),
    ("paddlepaddle-gpu", r"3\.[0-3]\.", "the same on GPUs"),
    ("numpy", r"1\.26\.|2\.", "everything"),
    ("safetensors", r"0\.([7-9]|\d\d)|[1-9]", "everything"),
    ("xxhash", r"3\.([5-9]|\d\d)|[4-9]", "checksums"),
    ("ml_dtypes", r"0\.([5-9]|\d\d)|[1-9]", "bfloat16 and float8"),
    ("fsspec", r"2024\.1[012]|202[5-9]|20[3-9]", "object stores"),
    ("s3fs", r"2024\.1[012]|202[5-9]|20[3-9]", "S3"),
    ("pyyaml", r"[6-9]", "AOA statements in YAML"),
    ("paddlenlp", r"3\.0\.0b4", "PaddleNLP's trainer"),
    ("paddleformers", r"1\.2\.0", "PaddleFormers' trainer"),
)
_REQUIRED = ("numpy", "safetensors", "xxhash", "ml_dtypes")
_SHARED_MEMORY = "/dev/shm"


def add_command(commands: Any) -> None:
    """Add the parsers of these commands."""
    listing = commands.add_parser(
        "ls",
        help="list the checkpoints of a directory: step, age, size, whether each is complete",
        description="Lists the checkpoints in a directory and in those right below it. Their bytes are not read: "
        "`flexckpt verify` does that. The exit status is 1 if one of them is not complete.",
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
    add_checkpoint(usage)
    usage.add_argument(
        "--by",
        choices=_GROUPS,
        default="role",
        help="what is summed up: parameters and each kind of state (default), layers, dtypes, or the ranks that saved",
    )

    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, whether it is supported, and which defects of it can be mended",
        description="Lists the versions of Python and of the packages that matter, and the patches that fit what is "
        "installed. The exit status is 1 if something needed is missing, or a version is not supported.",
        epilog="example: flexckpt doctor",
    )
    for parser, run in ((listing, _list), (usage, _usage), (doctor, _doctor)):
        parser.add_argument("--json", action="store_true", help="print all as JSON")
        parser.set_defaults(run=run)


def _list(options: argparse.Namespace) -> Outcome:
    """Return a line for each checkpoint; code 1 if one is not complete."""
    found = list_checkpoints(options.root)
    if not found:
        raise ValidationError(
            [f"there are no checkpoints in {open_backend(options.root).path} and right below. Remedy: correct the path"]
        )
    records = [_record(info) if info.complete else None for info in found]
    if options.json:
        listed = [
            ListedCheckpoint(
                **vars(info),
                time=None if record is None else record.time,
                metrics=None if record is None else record.metrics,
            )
            for info, record in zip(found, records)
        ]
        text = ListReport(open_backend(options.root).path, listed).to_json()
    else:
        now = time.time()
        lines = [("step", "id", "age", "bytes", "ranks", "complete", "metrics", "path")]
        for info, record in zip(found, records):
            metrics = record.metrics if record else {}
            lines.append(
                (
                    "-" if info.step is None else str(info.step),
                    str(info.unique_id),
                    _age(now - record.time) if record else "-",
                    format_bytes(info.total_bytes),
                    str(info.world_size),
                    "yes" if info.complete else "no",
                    ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()) or "-",
                    info.path + (f": {info.problem}" if info.problem else ""),
                )
            )
        text = "\n".join(table(lines, right=(0, 1, 2, 3, 4)))
    return Outcome(text, int(not all(info.complete for info in found)))


def _record(info: CheckpointInfo) -> StepRecord | None:
    backend = open_backend(info.path)
    try:
        with LockedManifest(SourceDirectory(backend), info.unique_id, [RECORD]) as manifest:
            return read_record(backend, manifest)
    except (CorruptCheckpointError, ValidationError):
        return None  # the checkpoint is whole without it; `flexckpt verify` says what is damaged


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _usage(options: argparse.Namespace) -> str:
    """Return a line for each group, the largest first."""
    catalog = SourceDirectory(options.source).read_manifest(options.unique_id).catalog
    names, of_row = _groups(catalog, options.by)
    sizes = np.zeros(len(names), dtype=np.int64)
    np.add.at(sizes, of_row, catalog.byte_length)
    keys = [len(np.unique(catalog.key[of_row == group])) for group in range(len(names))]
    order = np.argsort(-sizes, kind="stable").tolist()
    total = int(sizes.sum())
    if options.json:
        groups = [Usage(names[i], int(sizes[i]), keys[i]) for i in order]
        return UsageReport(options.source, options.by, groups, total).to_json()
    lines = [(options.by, "bytes", "", "share", "keys")]
    for i in order:
        size = int(sizes[i])
        lines.append((names[i], str(size), format_bytes(size), f"{size / max(total, 1):.1%}", str(keys[i])))
    lines.append(("total", str(total), format_bytes(total), "", str(len(np.unique(catalog.key)))))
    return "\n".join(table(lines, right=(1, 2, 3, 4)))


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
    return "master weights" if state == MASTER else f"state {state}" if state else "parameters"


def _doctor(options: argparse.Namespace) -> Outcome:
    """Return what is installed and what is known of it; code 1 if something does not do."""
    packages: list[Package] = []
    problems: list[str] = []
    for name, pattern, purpose in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = ""
        supported = bool(version) and re.match(pattern, version) is not None
        packages.append(Package(name, version, supported, purpose))
        if version and not supported:
            problems.append(f"{name} {version} is not a version that the tests run with")
        if not version and name in _REQUIRED:
            problems.append(f"{name} is missing. Remedy: pip install {name}")
    patches = _patches()
    python = ".".join(map(str, sys.version_info[:3]))
    free = _free_shared_memory()
    if options.json:
        states = [PatchState(*each) for each in patches]
        report = DoctorReport(__version__, python, packages, states, free, problems)
        return Outcome(report.to_json(), int(bool(problems)))
    lines = [("package", "version", "supported", "for"), ("flexckpt", __version__, "", ""), ("python", python, "", "")]
    for each in packages:
        verdict = "-" if not each.version else "yes" if each.supported else "no"
        lines.append((each.package, each.version or "-", verdict, each.purpose))
    text = table(lines)
    text.append(f"shared memory, for asynchronous saves and reshards: {_free(free)}")
    for name, status, title in patches:
        text.append(
            f"defect that a patch mends: {title}. Remedy: flexckpt patch --apply {name}"
            if status == "fits"
            else f"patched: {title} ({name})"
        )
    text += [f"problem: {problem}" for problem in problems]
    return Outcome("\n".join([*text, "" if problems else "no problems"]).rstrip("\n"), int(bool(problems)))


def _patches() -> list[tuple[str, str, str]]:
    """Return name, status and title of the patches that are in what is installed, or fit it."""
    every = list(read_patches().values())
    roots = {package: find_root(package) for package in {patch.package for patch in every}}
    found = [(patch.name, check_patch(roots[patch.package], every, patch)[0], patch.title) for patch in every]
    return [each for each in found if each[1] in ("fits", "applied")]


def _free_shared_memory() -> int | None:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return None


def _free(count: int | None) -> str:
    return f"there is no {_SHARED_MEMORY}" if count is None else f"{format_bytes(count)} free"
