"""A checkpoint as whole tensors: load_merged_state_dict in one process, merge_sharded_state_dict in files of all ranks.

Tested in tests/loading/test_merged.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.catalog.wire import join
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.loading.live_model import ModelState
from paddle_flexckpt.loading.publishing import ModelOptions, Publication
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import shown
from paddle_flexckpt.memory.live_targets import describe_targets
from paddle_flexckpt.memory.tensor_memory import empty_on_host
from paddle_flexckpt.observers import observed
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.report import PublishReport
from paddle_flexckpt.tools.tensor_files import PREFIX
from paddle_flexckpt.tools.whole_tensors import AS_STORED, compare_head
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.mapping import tensor_infos, whole_mapping
from paddle_flexckpt.transfer.options import ALONE, GROUP, PATH, UNUSED, FileOptions, WholeOptions, rule, takes
from paddle_flexckpt.transfer.targets import Targets
from paddle_flexckpt.transfer.transfer import Transfer, quiet_loads

logger = logging.getLogger("paddle_flexckpt")

_MAX_AXES = 9


@takes(WholeOptions, path=ALONE, offload=UNUSED, safetensors=UNUSED)
def load_merged_state_dict(
    path: Location,
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    safetensors: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Read a checkpoint into whole, fresh tensors on the CPU; no other rank takes part.

    All keys are read except a run's extra state, which has to be requested by its prefix. With AOA statements, the
    tensors that they define or leave unchanged are read.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        offload: Accepted for compatibility: the tensors are always on the CPU.
        safetensors: Accepted for compatibility.
        **options: Like all other arguments, of :class:`~paddle_flexckpt.transfer.options.WholeOptions`.

    Returns:
        Names to Paddle tensors, sorted by name; fused parameters in natural order (all of q, then of k, then of v).

    Raises:
        ValidationError: There is no such checkpoint, or the statements or ``verify`` do not fit.
        CorruptCheckpointError: It is damaged.
        UnreadableCheckpointError: The storage refuses or fails to read it.
    """
    asked = WholeOptions(prefix=prefix, unique_id=unique_id, aoa_config=aoa_config, **options)
    source, tensors = Files(path, asked), dict[str, Any]()

    def describe() -> Targets:
        rules = compare_head(aoa_config, source.directory.backend, source.manifest)
        mapping = None if rules is None else whole_mapping(rules, source.catalog, settings=source.settings)
        tensors.update(_choose(source.catalog, mapping, asked.start))
        return replace(describe_targets(tensors, 0), mapping=mapping)

    context = f"cannot load from {shown(path)}"
    Transfer(SoloCommunicator(), source, describe, AS_STORED, "load_merged_state_dict", context).run()
    return {name[len(asked.start) :]: tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class MergeOptions(FileOptions, ModelOptions):
    """The options of :func:`merge_sharded_state_dict`.

    Attributes:
        safetensor_prefix: The beginning of the files' names.
        skip_postfix_list: Endings of keys to leave out, such as ``["moment1_0", "beta1_pow_acc_0"]``.
    """

    safetensor_prefix: str = PREFIX
    skip_postfix_list: Sequence[str] = field(default=(), metadata=rule(compared=list))

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        name, skips = self.safetensor_prefix, self.skip_postfix_list
        if not isinstance(name, str) or not name or "/" in name:
            raise ValidationError([f"safetensor_prefix has to be the start of a file's name; got {name!r}"])
        if isinstance(skips, str) or not all(isinstance(each, str) and each for each in skips):
            raise ValidationError([f"skip_postfix_list has to be a list of ends of keys; got {skips!r}"])


@takes(
    MergeOptions,
    load_path=PATH,
    save_path="what is compared is the directory that it stands for",
    process_group=GROUP,
    offload=UNUSED,
    safetensors=UNUSED,
)
@observed("merge", "load_path")
def merge_sharded_state_dict(
    load_path: Location,
    save_path: Location,
    prefix: str | None = None,
    safetensor_prefix: str = PREFIX,
    skip_postfix_list: Sequence[str] = (),
    process_group: Any = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    safetensors: bool = True,
    **options: Any,
) -> PublishReport:
    """Write a checkpoint as safetensors files of whole tensors, by all ranks at once.

    Every rank of the group calls this, and writes about as many bytes as any other, 128 MiB of them at a time. The
    index comes last (of a single file, the file): until then no reader finds a model there. A run's extra state is left
    out. Optimizer states are written, unless ``skip_postfix_list`` has their endings.

    Args:
        load_path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives; every rank sees it.
        save_path: The directory for the files, which every rank sees. It is empty or does not exist yet.
        process_group: The ranks that take part; all ranks of the job by default.
        offload: Accepted for compatibility: tensors are always in host memory.
        safetensors: Accepted for compatibility.
        **options: Like all other arguments, of :class:`MergeOptions`.

    Returns:
        What was done.

    Raises:
        ValidationError: There is no such checkpoint, the output is in use, the statements do not fit, or safetensors
            cannot hold a tensor (on every rank, with the same text); nothing was written.
        CorruptCheckpointError: The checkpoint is damaged (on every rank, with the same text); what was written is
            removed.
        CheckpointError: A rank could not write (on every rank, with the same text); what was written is removed.
    """
    begin = time.perf_counter()
    asked = MergeOptions(
        prefix=prefix,
        safetensor_prefix=safetensor_prefix,
        skip_postfix_list=skip_postfix_list,
        unique_id=unique_id,
        aoa_config=aoa_config,
        **options,
    )
    comm, name = communicator_for(process_group), "merge_sharded_state_dict"
    with contextlib.ExitStack() as stack, quiet_loads():
        publication = Publication(comm, save_path, asked, name, file_prefix=safetensor_prefix, skips=skip_postfix_list)
        stack.enter_context(publication)

        def gather(describe_call: Callable[[], tuple[bytes, ...]], context: str) -> _StoredModel:
            model = _StoredModel(comm, load_path, asked, describe_call, context)
            stack.callback(model.closing.close)
            return model

        publication.agree(gather)
        publication.write()
        return publication.report(begin)


class _StoredModel(ModelState):
    """A model's tensors in a checkpoint, of which each rank reads what it writes."""

    def __init__(
        self,
        comm: Communicator,
        path: Location,
        options: MergeOptions,
        describe_call: Callable[[], tuple[bytes, ...]],
        context: str,
    ) -> None:
        def look() -> tuple[Files, bytes]:
            head, *more = describe_call()
            files = Files(path, options)
            self.closing.callback(files.closing.close)
            chosen = json.dumps(files.open()).encode()
            return files, join((head + chosen, *more))

        self.closing = contextlib.ExitStack()
        self._comm, self._path, self._options, self._context = comm, path, options, context
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.closing)
            self._files, answers = comm.together(look, context)
            self.messages = check_heads(answers, context, comm.ranks)
            stack.pop_all()
        self.catalog = self._files.catalog

    def rules(self, aoa_config: Any) -> Any:
        """Implement :meth:`ModelState.rules`."""
        return compare_head(aoa_config, self._files.directory.backend, self._files.manifest)

    def fill(self, describe: Callable[[], Targets]) -> int:
        def work() -> tuple[None, bytes]:
            files = Files(self._path, self._options, self._files.manifest)
            Transfer(SoloCommunicator(), files, describe, AS_STORED, "merge_sharded_state_dict", self._context).run()
            return None, b""

        self._comm.together(work, self._context)
        return 0


def _choose(source: Catalog, mapping: TensorMapping | None, start: str) -> dict[str, Any]:
    """Return a fresh tensor for each key that starts with a prefix, sorted by name."""
    there = tensor_infos(source, mapping, extra_state=mapping is None and bool(start))
    names = [key for key in sorted(there) if key.startswith(start)]
    if start and not names:
        got = f"{len(there)} keys, such as {', '.join(map(repr, sorted(there)[:3]))}" if there else "no keys"
        what = f"no key starts with {start!r}, the prefix and a dot"
        raise ValidationError([Problem(what, got=got, code="FC201", remedy="correct prefix")])
    _check_complete(source, names if mapping is None else mapping.source_names(names))
    check_axes({key: len(there[key].shape) for key in names})
    if mapping is not None and mapping.unfed:
        first = sorted(mapping.unfed)[0]
        logger.warning(f"nothing feeds {len(mapping.unfed)} keys such as {first!r} ({mapping.provenance.get(first)})")
    return {key: empty_on_host(there[key].shape, there[key].dtype) for key in names}


def empty_tensors(catalog: Catalog, names: Iterable[str]) -> dict[str, Any]:
    """Return a fresh tensor on the CPU for each of some keys of a checkpoint, of its whole shape."""
    there = tensor_infos(catalog, extra_state=True)
    names = list(names)
    _check_complete(catalog, names)
    return {name: empty_on_host(there[name].shape, there[name].dtype) for name in names if name in there}


def check_axes(axes: Mapping[str, int]) -> None:
    """Refuse shapes that numpy arrays can have and tensors of Paddle cannot."""
    problems: list[Problem | str] = [
        Problem(
            "a tensor of Paddle cannot have so many axes",
            key=key,
            expected=f"at most {_MAX_AXES}",
            got=count,
            code="FC205",
            remedy="give load_state_dict() an array of numpy as its target, or reshape it by an AOA statement",
        )
        for key, count in axes.items()
        if count > _MAX_AXES
    ]
    if problems:
        raise ValidationError(problems)


def _check_complete(catalog: Catalog, names: Iterable[str]) -> None:
    """Refuse tensors that are far from complete, before memory is allocated for a shape that is only declared."""
    there, declared = np.zeros(len(catalog.keys)), np.zeros(len(catalog.keys))
    np.add.at(there, catalog.key, catalog.size)
    # In floating point: a product of extents that no tensor has must not wrap around.
    declared[catalog.key] = catalog.global_shape.astype(np.float64).prod(axis=1)
    wanted = set(names)
    problems = [
        Problem(
            "the checkpoint does not hold all of a tensor",
            key=catalog.keys[key],
            expected=f"{declared[key]:.0f} elements",
            got=f"{there[key]:.0f}",
            code="FC105",
            remedy="load another checkpoint, or leave this key out by the AOA statement "
            f"'{quoted(catalog.keys[key])} -> _'",
        )
        for key in np.flatnonzero(there < declared).tolist()
        if catalog.keys[key] in wanted
    ]
    if problems:
        raise ValidationError(problems)
