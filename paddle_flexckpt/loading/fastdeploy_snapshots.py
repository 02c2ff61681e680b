"""publish_fastdeploy: live shards as an ``ipc_snapshot`` of FastDeploy, in which each rank of the engine has its files.

All ranks' parts are the targets of one program of AOA statements, which cut what the user's statements make. So each
shard is written straight to the files of the ranks that want it, and no rank holds a whole model.

Tested in tests/loading/test_fastdeploy_snapshots.py and tests/distributed/test_fastdeploy_snapshots.py.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Union

from paddle_flexckpt.aoa import TensorInfo
from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.loading.publishing import Publication, PublishOptions, publish_as
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.observers import observed
from paddle_flexckpt.report import PublishReport
from paddle_flexckpt.rollout.fastdeploy_versions import VERSION_FILE, Listing, file_digest, part_file
from paddle_flexckpt.tools.tensor_files import Chosen, TensorFile, group_evenly, tensor_file
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.transfer.options import GROUP, SHARDS, rule, takes

# An axis, or an axis and the shares of the tensors that lie side by side along it.
Axis = Union[int, "tuple[int, Sequence[int]]"]
_PART = re.compile(r"rank\d*/")


@dataclass(frozen=True)
class SnapshotOptions(PublishOptions):
    """The options of publishing for FastDeploy.

    Attributes:
        step: The version's number or name.
        degree: The engine's tensor-parallel degree, which is the number of its ranks.
        axes: The axis along which the engine splits a tensor, by the engine's name or a pattern with ``*``. For a fused
            tensor, of which each rank has its parts of all side by side, the axis and their shares: ``(1, [1, 1])``, or
            heads, ``(1, [num_heads, num_key_value_heads, num_key_value_heads])``. As in the engine, ranks share a
            key-value head where there are fewer than ranks. Each rank has the whole of a tensor that no pattern
            matches.
        gpu_ids: The GPU that each rank of the engine uses, as ``CUDA_VISIBLE_DEVICES`` numbers it; by default its rank.
    """

    step: int | str = 0
    degree: int = field(default=1, metadata=rule(least=1))
    axes: Mapping[str, Axis] = field(default_factory=dict)
    gpu_ids: Sequence[int] | None = None

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        wrong = []
        if type(self.step) not in (int, str) or self.step == "":
            wrong.append(f"step has to be a number or a name; got {self.step!r}")
        if len(self.gpus) != self.degree or not all(type(gpu) is int and gpu >= 0 for gpu in self.gpus):
            wrong.append(f"gpu_ids has to have a number for each of {self.degree} ranks; got {self.gpus!r}")
        for pattern, axis in self.axes.items():
            number, shares = _axis(axis)
            if not all(type(each) is int for each in (number, *shares)) or not shares or min(shares) < 1:
                wrong.append(f"axes[{pattern!r}] has to be an axis, or an axis and shares; got {axis!r}")
        if wrong:
            raise ValidationError(wrong)

    @property
    def gpus(self) -> Sequence[int]:
        """Return the GPU of each rank."""
        return range(self.degree) if self.gpu_ids is None else self.gpu_ids


def _axis(axis: Axis) -> tuple[int, Sequence[int]]:
    """Return an axis and its shares."""
    if isinstance(axis, (tuple, list)) and len(axis) == 2:
        return axis[0], tuple(axis[1])
    return axis, (1,)  # type: ignore[return-value]


@takes(
    SnapshotOptions, model=SHARDS, output="what is compared is the directory that it stands for", process_group=GROUP
)
@observed("publish", "output")
def publish_fastdeploy(
    model: Any,
    output: Location,
    step: int | str,
    degree: int,
    axes: Mapping[str, Axis],
    process_group: Any = None,
    coordinator_rank: int = 0,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> PublishReport:
    """Write a live model as an ``ipc_snapshot`` of FastDeploy: files for each rank of the engine, with its parts.

    Every rank of the group calls this, and sees the directory. It works as ``publish`` does. The statements make the
    engine's whole tensors, fused ones in natural order (all of q, of k, of v), under the engine's names; then each is
    cut. ``version.yaml`` comes last, with the step, and sizes and checksums of all files.

    Args:
        model: A layer with ``sharded_state_dict()``, or names to shards (or plain, replicated tensors).
        output: The directory for the files, which is empty or does not exist yet: a path.
        process_group: The ranks that take part; all ranks of the job by default.
        **options: Like all other arguments, of :class:`SnapshotOptions`.

    Returns:
        The report; its keys count a tensor once for each rank of the engine.

    Raises:
        ValidationError: As for ``publish``; a tensor cannot be cut so; nothing was written.
        CheckpointError: A rank could not write (on every rank, with the same text); what was written is removed.
        LostRankError: A rank has died. Files of an incomplete model may be left, or the whole model.
    """
    asked = SnapshotOptions(
        coordinator_rank=coordinator_rank, aoa_config=aoa_config, step=step, degree=degree, axes=axes, **options
    )
    return publish_as(SnapshotPublication, model, output, process_group, asked, "publish_fastdeploy")


class SnapshotPublication(Publication):
    """A write of a snapshot's files by all ranks, as a context manager."""

    _options: SnapshotOptions
    # The index's contents: of the coordinator, when all ranks have written.
    _listing = b""

    def _choose(self) -> Chosen:
        options, backend = self._options, self._output.backend
        if not backend.has_path:
            raise ValidationError(
                f"{backend.path} is no path, and FastDeploy reads files by path. Remedy (FC406): give the path of a "
                "directory"
            )
        whole, source = super()._choose(), self._state.catalog
        taken = sorted(key for key in (*source.keys, *whole.keys.values()) if _PART.match(key))
        if taken:
            raise ValidationError([Problem("publish_fastdeploy has another use for this name", taken[0])])
        axes = choose_axes(whole.infos, options.axes, options.degree)
        cuts = (_cut(key, name, whole.infos[name], axes.get(name), options.degree) for name, key in whole.keys.items())
        mapping = whole_mapping(options.aoa_config, source, completion=[*itertools.chain(*cuts)])
        found = tensor_infos(source, mapping)
        parts = [f"rank{rank}/{name}" for rank in range(options.degree) for name in whole.keys]
        infos = {part: found[part] for part in parts}
        return replace(whole, mapping=mapping, keys={part: part for part in parts}, infos=infos)

    def _divide(self) -> list[TensorFile]:
        options, files = self._options, list[TensorFile]()
        each = math.ceil(self._comm.size / options.degree)
        for rank, gpu in enumerate(options.gpus):
            infos = {part: info for part, info in self._infos.items() if part.startswith(f"rank{rank}/")}
            for number, names in enumerate(group_evenly(infos, options.max_file_bytes, each)):
                file = part_file(rank, gpu, number)
                files.append(tensor_file(file, names, infos, lambda part: part.partition("/")[2]))
        return files

    def _look_back(self) -> None:
        def digests() -> tuple[None, bytes]:
            found = {file.name: (file.nbytes, file_digest(self._files.path(file.name))) for file in self._own}
            return None, json.dumps(found).encode()

        _, answers = self._comm.together(digests, self._context)
        files = {name: entry for answer in answers for name, entry in json.loads(answer).items()}
        self._listing = Listing(self._options.step, self._options.degree, files).encode()

    def _index(self) -> tuple[str, bytes]:
        return VERSION_FILE, self._listing


def choose_axes(
    infos: Mapping[str, TensorInfo], axes: Mapping[str, Axis], degree: int
) -> dict[str, tuple[int, Sequence[int]]]:
    """Return axis and shares of each tensor that is split; ValidationError if it cannot be, or patterns do not fit."""
    found: dict[str, tuple[int, Sequence[int]]] = {}
    problems: list[Problem | str] = []
    for pattern, given in axes.items():
        matching = [name for name in infos if fnmatchcase(name, pattern)]
        if not matching:
            there = f"matches no tensor; there are {sorted(infos)[:3]}"
            problems.append(f"axes: {pattern!r} {there}. Remedy (FC101): correct the pattern")
        for name in matching:
            shape, (axis, shares) = infos[name].shape, _axis(given)
            wanted = _not_split(shape, axis, shares, degree)
            cut = axis % max(len(shape), 1), shares
            if not wanted and found.setdefault(name, cut) != cut:
                wanted = f"one axis; another pattern gives {found[name]}"
            if wanted:
                problem = Problem("a tensor cannot be split so", name, expected=wanted, got=f"axis {axis}")
                problems.append(replace(problem, code="FC101", remedy="correct axes or degree"))
    if problems:
        raise ValidationError(problems)
    return found


def _not_split(shape: Sequence[int], axis: int, shares: Sequence[int], degree: int) -> str:
    """Return what a tensor of a shape would need for a split; "" where it can be split so."""
    if not -len(shape) <= axis < len(shape):
        return f"an axis of {list(shape)}"
    unit, rest = divmod(shape[axis], sum(shares))
    if len({*shares}) == 1:
        fits, divisors = not unit * shares[0] % degree, ""
    else:
        fits = not shares[0] % degree and not any(share % degree and degree % share for share in shares[1:])
        divisors = ", or to divide it but for the first"
    if rest or not fits:
        each = f"shares {list(shares)} of extent" if len(shares) > 1 else "extent"
        return f"{each} {shape[axis]} to be multiples of degree {degree}{divisors}"
    return ""


def _piece_counts(shares: Sequence[int], degree: int) -> list[int]:
    """Return the number of pieces of each component; where there are fewer than ranks, several ranks have one piece.

    Components of equal shares are cut whatever they consist of. Unequal ones consist of heads, which are not cut.
    """
    return [degree if len({*shares}) == 1 else min(share, degree) for share in shares]


def _cut(key: str, name: str, info: TensorInfo, axis: tuple[int, Sequence[int]] | None, degree: int) -> Iterator[str]:
    """Yield the statements that make all ranks' parts of a tensor."""
    parts = [f"rank{rank}/{name}" for rank in range(degree)]
    if axis is None or degree == 1:
        yield f"{quoted(key)} -> {', '.join(map(quoted, parts))}, copy"
        return
    number, shares = axis
    is_fused, counts = len(shares) > 1, _piece_counts(shares, degree)
    unit = info.shape[number] // sum(shares)
    pieces = [
        [f"rank/{i}/{j}/{name}" if is_fused else parts[j] for j in range(count)] for i, count in enumerate(counts)
    ]
    sizes = [unit * share // count for share, count in zip(shares, counts) for _ in range(count)]
    yield f'{quoted(key)} -> {", ".join(map(quoted, itertools.chain(*pieces)))}, axis={number}, sizes="{sizes}"'
    for rank, part in enumerate(parts if is_fused else ()):
        own = [quoted(component[rank * len(component) // degree]) for component in pieces]
        yield f"{', '.join(own)} -> {quoted(part)}, axis={number}"
