"""The inverse of a program: the statements that give the source back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from paddle_flexckpt.aoa.casts import COMPLEX, is_exact
from paddle_flexckpt.aoa.compile import run_program
from paddle_flexckpt.aoa.config import AoaConfig, read_config
from paddle_flexckpt.aoa.errors import AoaError, Place, StatementError, describe_problem
from paddle_flexckpt.aoa.invert_boxes import NoInverse, inverse_of_boxes
from paddle_flexckpt.aoa.lexer import quoted
from paddle_flexckpt.aoa.mapping import TensorInfo
from paddle_flexckpt.aoa.names import Placeholder, parse_name
from paddle_flexckpt.aoa.parser import Statement, parse, parse_program
from paddle_flexckpt.aoa.primitives import Primitive, is_temporary, primitives, without_end
from paddle_flexckpt.aoa.program import Program
from paddle_flexckpt.aoa.rule import instantiate
from paddle_flexckpt.aoa.sides import Side
from paddle_flexckpt.catalog import Catalog

_NEVER = {
    "slice": "a slice leaves elements out",
    "scale": "a product is rounded",
    "sum": "a sum does not tell its terms",
    "average": "a mean does not tell its terms",
    "lora_merge": "a merged weight does not tell its factors",
    "dequant": "what is dequantised does not tell its scales",
}
Infos = tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]
# A name (as _form gives it) and how many times it has been assigned; 0 is the source key.
_Version = tuple[str, int]


class _NotInvertible(ValueError):
    pass


def invert(aoa_config: AoaConfig, source: Catalog | None = None, target: Catalog | None = None) -> dict[str, Any]:
    """The configuration that undoes another: loading with one and saving with the other gives the source back.

    Args:
        aoa_config: The statements.
        source: The source of the statements, where it is known: sizes and dtypes that the statements do not tell are
            taken from it.
        target: Their destination, where it is known: it tells which names are there afterwards.

    Returns:
        ``{"aoa_statements": [...]}``; applied to what the statements make of a source, it gives exactly the source.

    Raises:
        AoaError: There is no exact inverse; the error names the statement.
    """
    config = read_config(aoa_config)
    statements = parse_program(config.statements)
    if source is not None:
        # What is wrong with the statements themselves is told in the user's own words, before they are taken apart.
        run_program(aoa_config, source, target)
    if config.reverse:
        statements = inverted(statements, False, target, source)
    try:
        return {"aoa_statements": _texts(statements, True, source, target)}
    except AoaError:
        if source is None or target is None:
            raise
        try:
            found = inverse_of_boxes([statement.place.text for statement in statements], source, target)
        except NoInverse:
            found = None
        if found is None:
            raise
        return {"aoa_statements": found}


def inverted(
    statements: Sequence[Statement], exact: bool, source: Catalog | None = None, target: Catalog | None = None
) -> list[Statement]:
    """The inverse statements.

    Args:
        statements: A program.
        source: Its source, as in :func:`invert`.
        target: Its destination, likewise.
        exact: Whether what loses something is an error; else rounding casts are reversed by the opposite cast, and
            what was removed stays as it is in the destination (``aoa_config_reverse``).

    Raises:
        AoaError: A statement has no inverse.
    """
    texts = _texts(statements, exact, source, target)
    return [statement for number, text in enumerate(texts, 1) for statement in parse(text, number)]


def _texts(statements: Sequence[Statement], exact: bool, source: Catalog | None, target: Catalog | None) -> list[str]:
    steps: list[Primitive] = []
    problems = []
    for number, statement in enumerate(statements):
        try:
            steps += primitives(statement, number)
        except StatementError as error:
            problems.append(describe_problem(str(error), statement.place.at(error.column)))
    if problems:
        raise AoaError(problems)
    program = None
    if source is not None:
        try:
            program = _carried_out(steps, source, target)
        except AoaError:
            # Where an inverse is asked for in order to load a part of the source, the source as it is given lacks
            # keys. The statements alone have to do then; what they leave open is an error.
            if exact:
                raise
    return _Inversion(steps, exact, program, None if target is None else set(target.keys)).run()


def _carried_out(steps: Sequence[Primitive], source: Catalog, target: Catalog | None) -> Program:
    """The program after all steps, with what it met on the way."""
    names: set[str] = set() if target is None else set(target.keys)
    destination = None if target is None else Side(target, source.keys)
    program = Program(Side(source, names), destination, keeps_history=True)
    # What stands before the last attribute of a statement takes "auto" from the same destination key.
    program.destination_name = without_end
    program.run([statement for number, step in enumerate(steps) for statement in parse(step.text(), number)])
    return program


@cache
def _form(name: str) -> str:
    """A name whatever its placeholders are called: ``a.$L.w`` and ``a.${LAYER_ID-1}.w`` stand for the same names."""
    return "".join(part if isinstance(part, str) else "$" for part in parse_name(name).parts)


class _Inversion:
    """One pass over the steps in reverse order, with every assignment of a name as a version of its own."""

    def __init__(
        self, steps: Sequence[Primitive], exact: bool, program: Program | None, outputs: set[str] | None
    ) -> None:
        self._steps = steps
        self._exact = exact
        self._program = program
        self._outputs = outputs
        self._texts: list[str] = []
        # What the inverse program adds to the name of a version that it has already got.
        self._known: dict[_Version, str] = {}
        self._why: dict[_Version, tuple[Place, str]] = {}
        self._last: dict[str, int] = {}
        self._removed: set[_Version] = set()
        self._reads: list[list[_Version]] = []
        self._writes: list[list[_Version]] = []
        for step in steps:
            self._reads.append([(_form(name), self._last.get(_form(name), 0)) for name in step.left if name != "_"])
            if step.kind == "remove":
                self._removed.update(self._reads[-1])
            for name in step.right:
                self._last[_form(name)] = self._last.get(_form(name), 0) + 1
            self._writes.append([(_form(name), self._last[_form(name)]) for name in step.right if name != "_"])

    def run(self) -> list[str]:
        """The inverse program.

        Raises:
            AoaError: There is none.
        """
        consumed = {version for versions in self._reads for version in versions}
        for number, versions in enumerate(self._writes):
            for position, version in enumerate(versions):
                if self._is_last(version) and (
                    version not in consumed if self._outputs is None else self._is_output(number, position)
                ):
                    self._known[version] = ""
        for number in range(len(self._steps) - 1, -1, -1):
            self._invert(number)
        problems = []
        first = {v: n for step, versions in zip(self._steps, self._reads) for n, v in zip(step.left, versions)}
        for version, name in first.items():
            if version[1] == 0 and version not in self._known and not self._is_default(name):
                place, why = self._why.get(version, (Place(0, ""), "nothing gives it back"))
                problems.append(describe_problem(f"has no exact inverse: {name!r} cannot be had back, as {why}", place))
        problems += self._lost()
        if problems:
            raise AoaError(problems)
        return self._texts

    def _is_last(self, version: _Version) -> bool:
        return self._last[version[0]] == version[1] and not is_temporary(version[0])

    def _is_output(self, number: int, position: int) -> bool:
        """Whether the destination has all keys that a step's right name stood for."""
        outputs, name = self._outputs or set(), self._steps[number].right[position]
        if "$" not in name and "*" not in name:
            return name in outputs
        if self._program is None:
            return True
        assigned = self._program.history.get(number, ())
        return all(outputs.issuperset(names if "*" in name else [names[position]]) for names in assigned)

    def _is_default(self, name: str) -> bool:
        """Whether a source key is in the destination under its own name, untouched."""
        return self._outputs is not None and _form(name) not in self._last and name in self._outputs

    def _lost(self) -> list[str]:
        """Source keys that no step reads and that the destination does not have under their own names."""
        if self._program is None:
            return []
        program = self._program
        read = {name for names in program.read_ever.values() for name in names}
        lost = [
            name
            for name in program.source.states
            if name not in read
            and (name in program.values or (self._outputs is not None and name not in self._outputs))
        ]
        return [f"there is no exact inverse: no statement uses source key {name!r}, which gets lost" for name in lost]

    def _invert(self, number: int) -> None:
        step, reads, writes = self._steps[number], self._reads[number], self._writes[number]
        if step.kind == "add":
            self._texts += [f"{quoted(n)} -> _" for n, v in zip(step.right, writes) if self._known.get(v) == ""]
            return
        if all(version in self._known for version in reads):
            return
        try:
            if step.kind == "remove":
                if self._exact:
                    raise _NotInvertible("it is removed")
                self._texts += [f"_ -> {quoted(name)}" for name in step.left]
                self._known.update(dict.fromkeys(reads, ""))
                return
            have = self._have(step, writes)
            ends = [self._ending(version) for version in reads]
            want = [name + end for name, end in zip(step.left, ends)]
            self._texts += self._inverse(number, have, want)
        except _NotInvertible as error:
            for version in reads:
                self._why.setdefault(version, (step.place, str(error)))
            return
        for version, end in zip(reads, ends):
            self._known.setdefault(version, end)

    def _inverse(self, number: int, have: Sequence[str], want: Sequence[str]) -> list[str]:
        """The texts of one step; one set for each combination of ids where shapes or dtypes differ between them."""
        step = self._steps[number]
        found = {} if self._program is None else self._program.infos.get(number, {})
        if len(set(found.values())) < 2:
            return _inverse(step, have, want, next(iter(found.values()), None), self._exact)
        ids = sorted({name for text in (*step.left, *step.right) for name in parse_name(text).placeholders})
        texts = []
        for values, infos in found.items():
            numbers = dict(zip(ids, values))
            lists = [[instantiate(name, numbers) for name in names] for names in (have, want)]
            texts += _inverse(step, lists[0], lists[1], infos, self._exact)
        return texts

    def _have(self, step: Primitive, writes: list[_Version]) -> list[str]:
        """What the inverse program reads for a step's right names; of equal copies one is enough."""
        if step.kind == "copy":
            for name, version in zip(step.right, writes):
                with contextlib.suppress(_NotInvertible):
                    return [name + self._available(version, name)]
        return [name + self._available(version, name) for name, version in zip(step.right, writes)]

    def _available(self, version: _Version, name: str) -> str:
        """What the inverse program adds to a name to read a version of it."""
        if version not in self._known:
            if self._outputs is None and self._is_last(version) and version not in self._removed:
                self._known[version] = ""
            else:
                _, why = self._why.get(version, (None, f"{name!r} is not in the destination"))
                raise _NotInvertible(why)
        return self._known[version]

    def _ending(self, version: _Version) -> str:
        """What the inverse program adds to a name where it makes a version of it."""
        if version in self._known:
            # It is known by another way; what is made here again is not used.
            return f"_again{len(self._texts)}"
        return f"_version{version[1]}" if version[1] else ""


def _inverse(
    step: Primitive,
    have: Sequence[str],
    want: Sequence[str],
    infos: Infos | None,
    exact: bool,
) -> list[str]:
    """Texts that make the left names of a step from its right ones."""
    if step.kind in _NEVER:
        raise _NotInvertible(_NEVER[step.kind])
    _check_ids(step)
    if step.kind == "copy":
        return [_text(step, have[:1], want)]
    if step.kind == "rename" or step.kind in ("fused_qkv", "fused_qkv_old", "fused_ffn"):
        return [_text(step, have, want, *step.attributes)]
    if step.kind in ("stack", "unstack"):
        tag = "unstack" if step.kind == "stack" else "stack"
        return [_text(step, have, want, tag, f"axis={step.values['axis']}")]
    if step.kind == "axis":
        axis = f"axis={step.values['axis']}"
        if len(want) == 1 and not any("*" in name for name in want):
            return [_text(step, have, want, axis)]
        return [_text(step, have, want, axis, _sizes(step, infos, want))]
    if step.kind == "permute":
        axes = _inverse_permutation(step.values["permute"])
        if not axes:
            return [_text(step, have, want).replace(" -> ", "^T -> ", 1)]
        return [_text(step, have, want, f'permute="{axes}"')]
    if step.kind in ("dtype", "dst_dtype"):
        return [_text(step, have, want, *_cast(step, infos, exact))]
    if step.kind == "pad":
        pairs: Any = step.values["pad"]
        items = ", ".join(f"{before}:{-after if after else ''}" for before, after in pairs)
        return [_text(step, have, want, f'slice="[{items}]"')]
    if infos is None:
        if step.kind == "reshape" and have:
            return [_text(step, have, want, 'reshape="auto"')]
        raise _NotInvertible(f"{step.kind} does not tell the shape that there was; give invert() the source")
    old, new = infos[0][0].shape, infos[1][0].shape
    if step.kind == "reshape":
        return [_text(step, have, want, f'reshape="{list(old)}"')]
    if step.kind == "resize":
        if any(b < a for a, b in zip(old, new)):
            raise _NotInvertible("resize cuts elements off")
        return [_text(step, have, want, f'resize="{list(old)}"')]
    return _first_copies(step, have, want, old)


def _text(step: Primitive, left: Sequence[str], right: Sequence[str], *attributes: str) -> str:
    names = [", ".join(map(quoted, side)) for side in (left, right)]
    return ", ".join([" -> ".join(names), *attributes, *step.suffix])


def _check_ids(step: Primitive) -> None:
    """The ids of an inverse statement come from the right names: they have to tell them."""
    for name in step.right:
        for part in parse_name(name).parts:
            if isinstance(part, Placeholder) and not part.is_solvable:
                raise _NotInvertible(f"the id {part.name} cannot be told from {name!r}")


def _sizes(step: Primitive, infos: Infos | None, want: Sequence[str]) -> str:
    if "sizes" in step.values:
        return next(text for text in step.attributes if text.startswith("sizes="))
    if infos is None or len(infos[0]) != len(want):
        return 'sizes="auto"'
    axis: Any = step.values["axis"]
    return f'sizes="{[info.shape[axis] for info in infos[0]]}"'


def _inverse_permutation(axes: Any) -> list[int]:
    if not axes:
        return []
    positive = [axis % len(axes) for axis in axes]
    return [positive.index(axis) for axis in range(len(positive))]


def _cast(step: Primitive, infos: Infos | None, exact: bool) -> tuple[str, ...]:
    after: Any = step.values[step.kind]
    before: Any = step.values.get("src_dtype") if infos is None else infos[0][0].dtype
    if before is None:
        raise _NotInvertible(
            f'dtype="{after}" does not tell the dtype that there was. Remedy: write src_dtype="...", '
            f'dst_dtype="{after}"'
        )
    if after in COMPLEX and before not in COMPLEX:
        raise _NotInvertible(f"there is no cast from {after} to {before}")
    if exact and not is_exact(before, after):
        raise _NotInvertible(f"a cast from {before} to {after} loses digits")
    return f'src_dtype="{after}"', f'dst_dtype="{before}"'


def _first_copies(step: Primitive, have: Sequence[str], want: Sequence[str], old: tuple[int, ...]) -> list[str]:
    """The first of the copies that ``repeat`` made."""
    axis: Any = step.values["axis"]
    axis %= len(old)
    block: Any = step.values.get("block") or old[axis]
    times: Any = step.values["repeat"]
    if not block or old[axis] % block:
        raise _NotInvertible("repeat of an empty tensor")
    blocks = [*old[:axis], old[axis] // block, times * block, *old[axis + 1 :]]
    items = ", ".join([":"] * (axis + 1) + [f"0:{block}"])
    one = f"{want[0]}_blocks"
    two = f"{want[0]}_first"
    return [
        _text(step, have, [one], f'reshape="{blocks}"'),
        _text(step, [one], [two], f'slice="[{items}]"'),
        _text(step, [two], want, f'reshape="{list(old)}"'),
    ]
