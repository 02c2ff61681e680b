"""The parallelism of a semi-automatic job: a mesh of ranks, and the placements of its tensors.

Tested in tests/planning/test_meshes.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle_flexckpt.catalog.errors import Problem, ValidationError

# How dist.shard_optimizer spreads states; "fusion" is stage 1 with tensor fusion, which needs an axis called "dp".
MESH_STAGES = ("stage1", "stage2", "stage3", "fusion")
_PLACEMENT = re.compile(
    r"(?P<whole>r(eplicate)?(\(\))?)|s(hard)?\(?(dim=)?(?P<cut>\d+)\)?|@(?P<only>\d+)", re.IGNORECASE
)
_FORM = "R, S<axis of the tensor> or @<index of the mesh axis>, one for each axis of the mesh"
CONTEXT = "cannot read a mesh"


class Placement(NamedTuple):
    """A tensor's placement on one axis of a mesh; by default each rank has all of the tensor.

    Attributes:
        cut: The axis of the tensor that it cuts.
        only: The index of the mesh axis whose ranks alone have the tensor (a stage of a pipeline).
    """

    cut: int | None = None
    only: int | None = None

    def __str__(self) -> str:
        """Return the text that :func:`parse_placements` reads."""
        return f"S{self.cut}" if self.cut is not None else "R" if self.only is None else f"@{self.only}"


Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks, ``0`` to ``ranks - 1`` in row-major order, with the placements of tensors.

    Attributes:
        shape: Its extents.
        axes: Names of its axes.
        placements: Globs of names, and the placements of tensors of these names; the first that fits counts. Others
            are cut by an axis called tp or mp as tensor parallelism cuts them, are placed by layer along one called pp,
            and are whole along all others.
        sharding: How the optimizer's states are spread, one of :data:`MESH_STAGES`; empty: as their parameters.
        sharding_axis: The axis over which states are spread.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    placements: tuple[tuple[str, Placements], ...] = ()
    sharding: str = ""
    sharding_axis: str = ""

    def __post_init__(self) -> None:
        """Check that all fits together."""
        problems: list[Problem | str] = []
        if not self.shape or len(self.shape) != len(self.axes) or min(self.shape) < 1:
            what, got = "a mesh has a positive extent and a name for each axis", f"{self.shape} and {self.axes}"
            problems.append(Problem(what, expected="such as mesh=2x4:dp,mp", got=got))
        if len(set(self.axes)) < len(self.axes) or not all(axis.isidentifier() for axis in self.axes):
            problems.append(Problem("axes of a mesh have different names", expected="such as dp,mp", got=self.axes))
        if self.sharding and self.sharding not in MESH_STAGES:
            expected = f"sharding=STAGE:AXIS, one of {MESH_STAGES}"
            problems.append(Problem("unknown kind of sharding on a mesh", expected=expected, got=self.sharding))
        elif self.sharding and self.sharding_axis not in self.axes:
            what = "states are sharded over an axis that the mesh has not"
            problems.append(Problem(what, expected=f"one of {self.axes}", got=self.sharding_axis))
        elif self.sharding == "fusion" and self.sharding_axis != "dp":
            what = "tensor fusion shards over the axis that is called dp"
            problems.append(Problem(what, expected="sharding=fusion:dp", got=f"fusion:{self.sharding_axis}"))
        for glob, placed in self.placements if not problems else ():
            problems += self._misplaced(glob, placed)
        if problems:
            raise ValidationError(problems, CONTEXT)

    def _misplaced(self, glob: str, placed: Placements) -> list[Problem | str]:
        if len(placed) > len(self.shape):
            what = "more placements than the mesh has axes"
            return [Problem(what, key=glob, expected=f"at most {len(self.shape)}", got=_joined(placed))]
        return [
            Problem("a mesh axis has no such index", key=glob, expected=f"{axis} from @0 to @{extent - 1}", got=each)
            for each, axis, extent in zip(placed, self.axes, self.shape)
            if each.only is not None and each.only >= extent
        ]

    def __str__(self) -> str:
        """Return the text that :func:`parse_mesh` reads."""
        parts = [f"mesh={'x'.join(map(str, self.shape))}:{','.join(self.axes)}"]
        if self.sharding:
            parts.append(f"sharding={self.sharding}:{self.sharding_axis}")
        return ";".join([*parts, *(f"{glob}={_joined(placed)}" for glob, placed in self.placements)])

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return math.prod(self.shape)

    def place(self, rank: Any) -> tuple[Any, ...]:
        """Return the place of a rank on each axis, or of many ranks, as arrays."""
        place = []
        for extent in reversed(self.shape):
            rank, index = divmod(rank, extent)
            place.append(index)
        return tuple(reversed(place))


def _joined(placed: Placements) -> str:
    return ",".join(map(str, placed))


def is_mesh(text: str) -> bool:
    """Return whether a text describes a mesh."""
    return text.lstrip().startswith("mesh")


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of a text such as ``"mesh=2x4:dp,mp;sharding=stage1:dp;*.q_proj.weight=R,S1"``.

    Raises:
        ValidationError: An entry is malformed or there twice, or entries do not fit together.
    """
    entries: dict[str, Any] = {"placements": {}}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not value:
            expected = "mesh=EXTENTS:AXES, sharding=STAGE:AXIS or GLOB=PLACEMENTS"
            raise ValidationError([Problem("unknown entry of a mesh", key=entry, expected=expected)], CONTEXT)
        known = entries if name in ("mesh", "sharding") else entries["placements"]
        if name in known:
            raise ValidationError([Problem("an entry is there twice", key=entry)], CONTEXT)
        known[name] = value
    extents, colon, axes = entries.get("mesh", "").partition(":")
    if not colon or not all(extent.strip().isdecimal() for extent in extents.split("x")):
        expected = "mesh=EXTENTS:AXES, such as mesh=2x4:dp,mp"
        wrong = Problem("no extents and axes", key=f"mesh={entries.get('mesh', '')}", expected=expected)
        raise ValidationError([wrong], CONTEXT)
    entries["mesh"] = {"shape": [int(extent) for extent in extents.split("x")], "dim_names": axes.split(",")}
    return mesh_of(entries)


def mesh_of(entries: Mapping[str, Any]) -> Mesh:
    """Return the mesh of a mapping, as a JSON file has it.

    Its keys are ``mesh`` (``shape`` and ``dim_names``, as of ``dist.ProcessMesh``), ``sharding`` (``"stage1:dp"``) and
    ``placements``: globs of names, and for each a list such as ``["Replicate()", "Shard(dim=1)"]``, or its text.

    Raises:
        ValidationError: The mapping is something else.
    """
    problems: list[Problem | str] = [
        Problem("unknown entry of a mesh", key=name, expected="mesh, sharding, placements")
        for name in entries
        if name not in ("mesh", "sharding", "placements")
    ]
    mesh, placements, sharding = entries.get("mesh"), entries.get("placements", {}), entries.get("sharding", "")
    shape = mesh.get("shape") if isinstance(mesh, Mapping) else None
    names = mesh.get("dim_names") if isinstance(mesh, Mapping) else None
    if not isinstance(shape, list) or not isinstance(names, list) or any(type(each) is not int for each in shape):
        expected = '{"shape": [2, 4], "dim_names": ["dp", "mp"]}'
        problems.append(Problem("a mesh without its shape and names", key="mesh", expected=expected, got=mesh))
    if not isinstance(placements, Mapping):
        expected = '{"GLOB": ["Replicate()", "Shard(dim=0)"]}'
        problems.append(Problem("placements are no mapping", key="placements", expected=expected, got=placements))
    if not isinstance(sharding, str) or (sharding and ":" not in sharding):
        expected = f"STAGE:AXIS, one of {MESH_STAGES}"
        problems.append(Problem("sharding without its axis", key="sharding", expected=expected, got=sharding))
    if problems or not isinstance(shape, list) or not isinstance(names, list):
        raise ValidationError(problems, CONTEXT)
    stage, _, axis = (part.strip() for part in sharding.partition(":"))
    placed = tuple((glob, parse_placements(glob, each)) for glob, each in placements.items())
    return Mesh(tuple(shape), tuple(str(name).strip() for name in names), placed, stage, axis)


def parse_placements(glob: str, entries: str | Sequence[str]) -> Placements:
    """Return the placements of a text such as ``"R,S1"``, or of a list of Paddle's texts for placements.

    Raises:
        ValidationError: One is malformed, or a Partial.
    """
    found, problems = [], []
    for each in entries.split(",") if isinstance(entries, str) else entries:
        match = _PLACEMENT.fullmatch(str(each).strip())
        if match is not None:
            cut, only = match["cut"], match["only"]
            found.append(Placement(None if cut is None else int(cut), None if only is None else int(only)))
        elif str(each).strip().lower().startswith("p"):
            what, remedy = "a Partial is a term of a sum, which is not stored", "give the placements after its reshard"
            problems.append(Problem(what, key=glob, got=each, code="FC802", remedy=remedy))
        else:
            problems.append(Problem("unknown placement", key=glob, expected=_FORM, got=each))
    if problems:
        raise ValidationError(problems, CONTEXT)
    return tuple(found)
