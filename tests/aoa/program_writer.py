"""A program in the making: choices, names, source keys, and statements that are written and run at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from tests.aoa.oracle import MASTER, SCALAR_STATES, Oracle, Source, Target, Tensor

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = ("int8", "int16", "int32", "int64", *UNSIGNED)
FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
# Casts that lose nothing.
WIDER = {
    "float8_e4m3fn": ("float16", "bfloat16", "float32"),
    "float8_e5m2": ("float16", "bfloat16", "float32"),
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "int8": ("int16", "int32", "float32"),
    "uint8": ("int16", "int64", "float32"),
    "int32": ("int64", "float64"),
    "bool": ("uint8", "float32"),
    "complex64": ("complex128",),
}
ITEMSIZE = {name: np.dtype(name).itemsize for name in DTYPES}
MAX_ELEMENTS = 400
WEIRD_NAMES = ("{}.weight", "x/{}-w", "a b {}", "copy", "m:{}@0", "^T{}", "层.{}", "p$q{}")


FORMULAS = {
    1: ("+1", lambda i: i + 1),
    2: ("*2+1", lambda i: i * 2 + 1),
    3: ("+10", lambda i: i + 10),
}


@dataclass(frozen=True)
class Handle:
    """One or more variables alike, one for every combination of ids.

    Attributes:
        template: Their name, with ``{}`` for every id.
        ids: Combinations of ids; ``((),)`` for a single variable.
        shape: Shape of each.
        dtype: Dtype of each.
        tame: The values are small and finite, so that any cast is defined.
        is_source: It is (still) a key of the source.
        fixed: It must not be assigned again.
    """

    template: str
    ids: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: str
    tame: bool = True
    is_source: bool = False
    fixed: bool = False

    @property
    def names(self) -> list[str]:
        return [self.template.format(*each) for each in self.ids]

    @property
    def single(self) -> bool:
        return self.ids == ((),)


@dataclass(frozen=True)
class Cut:
    """How a key has to be cut, because a statement about fused parameters says so."""

    axis: int
    parts: int


@dataclass
class Program:
    """A program with everything around it.

    Attributes:
        seed: What it was made from.
        texts: Texts of statements.
        statements: Number of statements.
        source: Source keys.
        destination: Destination keys.
        source_cuts: Prescribed cuts of source keys.
        target_cuts: Prescribed cuts of destination keys.
        moves_only: No statement computes, fills or casts anything.
        invertible: Every source element reaches the destination, and nothing but exact steps is done to it.
        kinds: Which kinds of statements it has.
    """

    seed: int
    texts: list[str] = field(default_factory=list)
    statements: int = 0
    source: dict[str, Source] = field(default_factory=dict)
    destination: dict[str, Target] = field(default_factory=dict)
    source_cuts: dict[str, Cut] = field(default_factory=dict)
    target_cuts: dict[str, Cut] = field(default_factory=dict)
    moves_only: bool = True
    invertible: bool = False
    kinds: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The program in full, for a report of a failure."""
        lines = [f"seed {self.seed} ({', '.join(self.kinds)})", "statements:"]
        lines += [f"  {text!r}" for text in self.texts]
        lines.append("source:")
        lines += [f"  {k!r}: {s.array.dtype}{list(s.array.shape)} parts {s.parts}" for k, s in self.source.items()]
        lines.append("destination:")
        lines += [f"  {k!r}: {t.dtype}{list(t.shape)} parts {t.parts}" for k, t in self.destination.items()]
        return "\n".join(lines)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class Writer:
    """Writes statements, runs each with the oracle, and keeps account of all variables."""

    def __init__(self, seed: int) -> None:
        self.rng, self.numbers = Random(seed), np.random.RandomState(seed % 2**32)
        self.program = Program(seed)
        self.oracle = Oracle(self.program.source, self.program.destination)
        self.pool: list[Handle] = []
        self.used: set[str] = set()
        self.removed: set[str] = set()
        self.missing = 0
        self.weird: set[str] = set()
        # Destination keys of a statement that is not written yet, and may never be.
        self.pending: dict[str, Target] = {}
        self.counter = 0
        choice = self.rng.random()
        # What a source may hold decides what may be done to it: see `values`.
        self.values_kind = "bits" if choice < 0.3 else "numbers" if choice < 0.8 else "specials"
        self.signed = self.rng.random() < 0.5
        self.program.invertible = self.rng.random() < 0.15
        self.states: tuple[str, ...] = ()
        if self.rng.random() < 0.2 and not self.program.invertible:
            self.states = self.rng.choice(
                [
                    ("moment1_0",),
                    ("w_0",),
                    ("w_0", "moment1_0", "moment2_0", "beta1_pow_acc_0"),
                    ("moment1_0", "beta1_pow_acc_0"),
                ]
            )
        self.state_dtype = self.rng.choice(["float32", "float32", "bfloat16"])

    # ------------------------------------------------------------------------------------------------------- choices

    def maybe(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, options: Sequence):
        return self.rng.choice(options)

    def number(self) -> int:
        self.counter += 1
        return self.counter

    def shape(self, ndim: int | None = None) -> tuple[int, ...]:
        ndim = self.pick([0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4]) if ndim is None else ndim
        extents = [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8] if ndim < 3 else [1, 2, 2, 3, 4]
        return tuple(self.pick(extents) for _ in range(ndim))

    def dtype(self) -> str:
        if self.states:
            return self.pick(["float32", "bfloat16", "float16"])
        return self.pick(FLOATS) if self.maybe(0.7) else self.pick(DTYPES)

    def values(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Contents of a source key: any bits, small numbers, or numbers among which some are special."""
        count, kind = math.prod(shape), np.dtype(dtype)
        if self.values_kind == "bits":
            raw = self.numbers.randint(0, 256, count * kind.itemsize, dtype=np.uint8)
            return (raw % 2 if dtype == "bool" else raw).view(kind).reshape(shape)
        if dtype == "bool":
            return (self.numbers.randint(0, 2, count) > 0).reshape(shape)
        if dtype in INTEGERS:
            low = -100 if self.signed and dtype not in UNSIGNED else 0
            return self.numbers.randint(low, 101, count).astype(kind).reshape(shape)
        floats = self.numbers.random_sample(count) * (200 if self.signed else 100) - (100 if self.signed else 0)
        if self.values_kind == "specials":
            floats = np.where(self.numbers.random_sample(count) < 0.5, floats * 1e-3, floats)
            special = self.numbers.random_sample(count) < 0.15
            floats[special] = self.numbers.choice([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-8], special.sum())
        if dtype in COMPLEX:
            floats = floats + 1j * floats[::-1]
        return floats.astype(kind).reshape(shape)

    # --------------------------------------------------------------------------------------------------------- names

    def template(self, prefix: str, holes: int, plain: bool = False) -> str:
        n = self.number()
        if holes == 0:
            if not plain and self.maybe(0.08):
                name = self.pick(WEIRD_NAMES).format(n).replace("{}", "")
                if name not in self.weird:
                    self.weird.add(name)
                    return name
            return self.pick([f"{prefix}{n}", f"{prefix}.{n}.weight", f"m.{prefix}{n}.w"])
        if holes == 1:
            return self.pick([f"{prefix}{n}.{{}}.w", f"{prefix}{n}.layers.{{}}", f"m.{prefix}{n}_{{}}.bias"])
        return self.pick([f"{prefix}{n}.{{}}.experts.{{}}.w", f"{prefix}{n}.l{{}}.e{{}}"])

    def source(
        self, shape: tuple[int, ...], dtype: str, ids: tuple = ((),), cut: Cut | None = None, tame: bool = True
    ) -> Handle:
        """New source keys."""
        handle = Handle(self.template("s", len(ids[0])), ids, shape, dtype, tame, is_source=True)
        for name in handle.names:
            self.add_source(name, self.values(dtype, shape), cut)
            for state in self.states:
                scalar = state in SCALAR_STATES
                kind = "float32" if state == MASTER or scalar else self.state_dtype
                array = np.full(1, 0.25, np.float32) if scalar else self.values(kind, shape)
                self.add_source(f"{name}.{state}", array, None if scalar else cut)
        self.pool.append(handle)
        return handle

    def add_source(self, name: str, array: np.ndarray, cut: Cut | None) -> None:
        self.program.source[name] = Source(array, cut.parts if cut else 1)
        if cut:
            self.program.source_cuts[name] = cut
        self.oracle.variables[name] = Tensor(array)

    def ids(self) -> tuple:
        """Combinations of ids of a new family of source keys."""
        choice = self.rng.random()
        if choice < 0.7:
            return ((),)
        layers = sorted(self.rng.sample(range(12), self.pick([1, 2, 2, 3])))
        if choice < 0.85:
            return tuple((layer,) for layer in layers)
        return tuple((layer, expert) for layer in layers for expert in range(self.pick([1, 2, 3])))

    def some_handle(self, accept: Callable[[Handle], bool] = lambda handle: True, shape=None, dtype=None) -> Handle:
        """A variable to read: one of those that there are, or a new source key."""
        options = [handle for handle in self.pool if accept(handle)]
        if options and self.maybe(0.75):
            return self.pick(options)
        shape = self.shape() if shape is None else shape
        return self.source(shape, self.dtype() if dtype is None else dtype, self.ids())

    def companions(self, first: Handle, accept: Callable[[Handle], bool], make: Callable[[], tuple]) -> list[Handle]:
        """One or two more variables with the same ids; ``make`` gives (shape, dtype) of a new one."""
        others = []
        for _ in range(self.pick([1, 1, 2])):
            options = [h for h in self.pool if h.ids == first.ids and h.template != first.template and accept(h)]
            options = [h for h in options if h not in others]
            if options and self.maybe(0.7):
                others.append(self.pick(options))
            elif self.maybe(0.2) and accept(first) and not self.program.invertible:
                others.append(first)  # a variable may be read twice
            else:
                others.append(self.source(*make(), ids=first.ids))
        return others

    # ----------------------------------------------------------------------------------------------------- statements

    def quoted(self, name: str) -> str:
        bare = re.sub(r"\$\{.*?\}", "$L", name)
        if re.fullmatch(r"[A-Za-z_$*][\w.$*]*", bare, re.ASCII) and name != "copy" and not self.maybe(0.03):
            return name
        return f'"{name}"'

    def right_handles(
        self, first: Handle, infos: Sequence[tuple[tuple[int, ...], str, bool]], must_land: bool = False
    ) -> list[Handle]:
        """Names to assign values of the given (shape, dtype, tame), with the ids of ``first``."""
        handles: list[Handle] = []
        taken: set[str] = set()
        for shape, dtype, tame in infos:
            lands = must_land or self.maybe(0.55)
            template = self.template("d" if lands else "t", len(first.ids[0]))
            if first.single and self.maybe(0.12) and not self.program.invertible:
                again = [h for h in self.pool if h.single and not h.fixed and h.template not in taken]
                if again and not self.states:
                    template = self.pick(again).template
            taken.add(template)
            handle = Handle(template, first.ids, shape, dtype, tame)
            if lands or template in self.program.destination:
                self.pending.update((name, Target(shape, dtype)) for name in handle.names)
            handles.append(handle)
        return handles

    def land(self) -> None:
        """Adds the destination keys of a statement that is written now."""
        self.program.destination.update(self.pending)
        self.pending = {}

    def say(
        self,
        kind: str,
        left: Sequence[Handle],
        right: Sequence[Handle],
        attributes: Sequence[str],
        transposed: Sequence[bool] = (),
    ) -> None:
        """Writes a statement, runs it, and notes what there is now."""
        self.land()
        named = [*left, *right]
        holes = max((len(handle.ids[0]) for handle in named), default=0)
        ids = named[0].ids if named else ((),)
        layer, formulas = self.pick(["LAYER_ID", "L", "MY_LAYER"]), [None, None]
        if holes == 1 and left and all(each[0] > 0 for each in ids) and self.maybe(0.2):
            layer, formulas[0] = "LAYER_ID_OFFSET", lambda i: i - 1
        elif holes and left and not self.program.invertible and self.maybe(0.25):
            formulas[0] = self.pick([1, 2, 3])  # an index into FORMULAS, applied on the right
        spelled = [layer, self.pick(["EXPERT_ID", "E"])][:holes]
        shift = FORMULAS[formulas[0]] if isinstance(formulas[0], int) else None

        def text_of(handle: Handle, on_right: bool) -> str:
            marks = [f"${name}" for name in spelled]
            if shift and on_right:
                marks[0] = "${" + layer + shift[0] + "}"
            return self.quoted(handle.template.replace("$", "\\$").format(*marks))

        def shifted(handle: Handle) -> Handle:
            if shift is None and layer != "LAYER_ID_OFFSET":
                return handle
            move = shift[1] if shift else formulas[0]
            old = handle.names
            moved = replace(handle, ids=tuple((move(each[0]), *each[1:]) for each in handle.ids))
            if set(old) & set(self.program.destination):
                targets = [self.program.destination.pop(name) for name in old]
                cuts = [self.program.target_cuts.pop(name, None) for name in old]
                for name, target, cut in zip(moved.names, targets, cuts):
                    self.program.destination[name] = target
                    if cut:
                        self.program.target_cuts[name] = cut
            return moved

        if left and holes:
            right = [shifted(handle) for handle in right]
        flags = list(transposed) or [False] * len(left)
        lefts = [text_of(h, False) + ("^T" if flag else "") for h, flag in zip(left, flags)] or ["_"]
        # The text of the right side is made from templates, so it does not know that ids were shifted.
        rights = [text_of(h, True) for h in right] or ["_"]
        self.write(kind, lefts, rights, attributes)
        self.used.update(name for handle in left for name in handle.names)
        if self.program.invertible:
            self.pool = [handle for handle in self.pool if handle not in left]
        for handle in right:
            self.note(handle)

    def write(self, kind: str, lefts: Sequence[str], rights: Sequence[str], attributes: Sequence[str]) -> None:
        self.land()
        comma, arrow = self.pick([", ", ", ", ",", " , "]), self.pick([" -> ", " -> ", "->"])
        text = f"{comma.join(lefts)}{arrow}{comma.join([*rights, *attributes])}"
        self.program.texts.append(text)
        self.program.statements += 1
        self.program.kinds.append(kind)
        self.oracle.run(text)

    def note(self, handle: Handle) -> None:
        """Takes note of an assignment; what the oracle found has to be what the generator expects."""
        value = self.oracle.variables[handle.names[0]]
        if value is not None and (value.array.shape != handle.shape or value.array.dtype != np.dtype(handle.dtype)):
            raise AssertionError(f"{handle} is {value.array.dtype}{value.array.shape}\n{self.program.describe()}")
        self.pool = [each for each in self.pool if each.template != handle.template]
        kept = any(
            self.oracle.variables[name] is not None and self.oracle.variables[name].keep is not None
            for name in handle.names
        )
        lands = handle.names[0] in self.program.destination
        if not kept and not (self.program.invertible and lands):
            self.pool.append(handle)
