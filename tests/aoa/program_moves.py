"""Random statements that move elements: renames, cuts, joins, stacks, copies, families."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tests.aoa.oracle import Target, Tensor, treat
from tests.aoa.program_attributes import Attributes
from tests.aoa.program_writer import Handle, divisors


class Moves(Attributes):
    """Makes statements that move."""

    def rename(self) -> None:
        left = self.some_handle()
        flag = self.maybe(0.25)
        value = replace(left, shape=left.shape[::-1]) if flag else left
        lands = self.maybe(0.6)
        attributes, value = self.chain(value, 3, repeats=True, lands=lands)
        if not attributes and self.maybe(0.1):
            attributes = ["axis=0"]
        fixed = any("auto" in each or "keep" in each for each in attributes)
        right = self.right_handles(left, [(value.shape, value.dtype, value.tame)], must_land=lands)
        if fixed:
            if right[0].template in [h.template for h in self.pool]:
                return  # an assignment that is the last one has to keep the destination's shape
            right = [replace(right[0], fixed=True)]
        self.say("rename", [left], right, attributes, [flag])

    def pairwise(self) -> None:
        first = self.some_handle()
        others = self.companions(first, lambda h: True, lambda: (self.shape(), self.dtype()))
        lefts = [first, *(other for other in others if other.template != first.template)]
        lefts = list({h.template: h for h in lefts}.values())
        if len(lefts) < 2:
            return
        flags = [self.maybe(0.3) for _ in lefts]
        attributes: list[str] = []
        if self.maybe(0.3) and all(self.can_compute(h) for h in lefts) and not self.program.invertible:
            attributes, self.program.moves_only = ["scale=0.25"], False
        infos = [(h.shape[::-1] if f else h.shape, h.dtype, h.tame and not attributes) for h, f in zip(lefts, flags)]
        self.say("pairwise", lefts, self.right_handles(first, infos), attributes, flags)

    def swap(self) -> None:
        options = [h for h in self.pool if h.single and not h.fixed]
        if len(options) < 2:
            return
        lefts = self.rng.sample(options, self.pick([2, 2, 3]) if len(options) > 2 else 2)
        turned = [*lefts[1:], lefts[0]]
        rights = [replace(h, template=name.template, is_source=False) for h, name in zip(lefts, turned)]
        for each in rights:
            if each.template in self.program.destination or self.maybe(0.5) or self.program.invertible:
                self.program.destination[each.template] = Target(each.shape, each.dtype)
        self.say("swap", lefts, rights, [])

    def copies(self) -> None:
        left = self.some_handle()
        attributes, value = self.chain(left, 1, fills=False)
        attributes.append("copy")
        more, value = self.chain(value, 1, fills=False)
        if any(each.split("=")[0] in " ".join(attributes) for each in more):
            return
        rights = self.right_handles(left, [(value.shape, value.dtype, value.tame)] * self.pick([2, 2, 3]))
        self.say("copy", [left], rights, attributes + more)

    def cut(self) -> None:
        left = self.some_handle(lambda h: len(h.shape) > 0 and max(h.shape) > 1, self.shape(2))
        flag = self.maybe(0.15)
        before, value = self.chain(replace(left, shape=left.shape[::-1]) if flag else left, 1, fills=False)
        axes = [axis for axis, extent in enumerate(value.shape) if extent > 1]
        if not axes:
            return
        axis = self.pick(axes)
        extent, n = value.shape[axis], len(value.shape)
        attributes = [f"axis={axis - n if self.maybe(0.3) else axis}"]
        equal = [d for d in divisors(extent) if d > 1 and d <= 8]
        as_array = False
        fixed = False
        if self.maybe(0.5) and equal:
            count = self.pick(equal)
            sizes = [extent // count] * count
            as_array = left.single and not flag and self.maybe(0.3)
        else:
            edges = sorted(self.rng.sample(range(1, extent), min(extent - 1, self.pick([1, 1, 2, 3]))))
            sizes = [b - a for a, b in zip([0, *edges], [*edges, extent])]
            shown = list(sizes)
            if self.maybe(0.3):
                shown[self.pick(range(len(shown)))] = -1
            fixed = self.maybe(0.25)
            attributes.append('sizes="auto"' if fixed else f'sizes="{shown}"')
        after, uniform = [], len(set(sizes)) > 1
        pieces = [replace(value, shape=(*value.shape[:axis], s, *value.shape[axis + 1 :])) for s in sizes]
        if not fixed:
            after, last = self.chain(pieces[0], 1, uniform=uniform, fills=False)
            if any(each.split("=")[0] in " ".join(before) for each in after):
                after, last = [], pieces[0]
            parsed = [(k, v.strip('"')) for k, v in (each.split("=", 1) for each in after)]
            parsed = [(k, v) for k, v in parsed if k in ("permute", "reshape", "slice", "resize")]
            pieces = [
                replace(last, shape=treat(Tensor(np.empty(p.shape, np.int8)), parsed, p.shape, "model").array.shape)
                for p in pieces
            ]
        if as_array:
            self.cut_to_array(left, pieces, [*before, *attributes, *after])
            return
        infos = [(p.shape, p.dtype, p.tame) for p in pieces]
        before_again = {h.template for h in self.pool}
        rights = self.right_handles(left, infos, must_land=fixed)
        if fixed:
            if any(h.template in before_again for h in rights):
                return
            rights = [replace(h, fixed=True) for h in rights]
        self.say("cut", [left], rights, [*before, *attributes, *after], [flag])

    def cut_to_array(self, left: Handle, pieces: list[Handle], attributes: list[str]) -> None:
        """The right names as a range: ``q[0:3]``."""
        base, start = f"q{self.number()}", self.pick([0, 0, 2])
        rights = [replace(p, template=f"{base}_{start + i}", ids=((),), is_source=False) for i, p in enumerate(pieces)]
        for each in rights:
            if self.maybe(0.5) or self.program.invertible:
                self.program.destination[each.template] = Target(each.shape, each.dtype)
        text = f"{base}[{start}:{start + len(pieces)}]"
        self.write("array", [self.quoted(left.template.replace("$", "\\$"))], [text], attributes)
        self.used.add(left.template)
        if self.program.invertible:
            self.pool.remove(left)
        for each in rights:
            self.note(each)
        if not self.program.invertible and self.maybe(0.5):
            value = rights[0]
            shape = (len(rights), *value.shape)
            out = self.right_handles(value, [(shape, value.dtype, value.tame)])
            self.write("array", [text], [self.quoted(out[0].template.replace("$", "\\$"))], ["stack", "axis=0"])
            self.note(out[0])

    def join(self) -> None:
        left = self.some_handle(lambda h: len(h.shape) > 0 and math.prod(h.shape) < 150, self.shape(2))
        flag = self.maybe(0.15)

        def turned(shape: tuple[int, ...]) -> tuple[int, ...]:
            return shape[::-1] if flag else shape

        value = replace(left, shape=turned(left.shape))
        n = len(value.shape)
        axis = self.pick(range(n))
        before, after_axis = value.shape[:axis], value.shape[axis + 1 :]

        def fits(h: Handle) -> bool:
            shape = turned(h.shape)
            same = len(shape) == n and (shape[:axis], shape[axis + 1 :]) == (before, after_axis)
            return same and h.dtype == left.dtype and math.prod(shape) < 150

        def fresh() -> tuple:
            return turned((*before, self.pick([1, 2, 3]), *after_axis)), left.dtype

        lefts = [left, *self.companions(left, fits, fresh)]
        extent = sum(turned(h.shape)[axis] for h in lefts)
        first: list[str] = []
        value = replace(value, tame=all(h.tame for h in lefts))
        if self.maybe(0.2) and not self.program.invertible and (names := self.castable(value)):
            first, value, self.program.moves_only = [f'dtype="{names[0]}"'], replace(value, dtype=names[0]), False
        value = replace(value, shape=(*before, extent, *after_axis))
        last, value = self.chain(value, 1, fills=False) if not first else ([], value)
        right = self.right_handles(left, [(value.shape, value.dtype, value.tame)])
        attributes = [*first, f"axis={axis - n if self.maybe(0.3) else axis}", *last]
        self.say("join", lefts, right, attributes, [flag] * len(lefts))

    def stack(self) -> None:
        left = self.some_handle(lambda h: len(h.shape) < 4 and math.prod(h.shape) < 150, self.shape(self.pick([1, 2])))
        lefts = [
            left,
            *self.companions(
                left, lambda h: (h.shape, h.dtype) == (left.shape, left.dtype), lambda: (left.shape, left.dtype)
            ),
        ]
        flag = self.maybe(0.15)
        value = replace(left, shape=left.shape[::-1] if flag else left.shape, tame=all(h.tame for h in lefts))
        before, value = self.chain(value, 1, fills=False)
        if len(value.shape) > 4:
            return
        axis = self.pick(range(len(value.shape) + 1))
        shape = (*value.shape[:axis], len(lefts), *value.shape[axis:])
        shown = axis - len(shape) if self.maybe(0.3) else axis
        right = self.right_handles(left, [(shape, value.dtype, value.tame)])
        self.say("stack", lefts, right, [*before, "stack", f"axis={shown}"], [flag] * len(lefts))

    def unstack(self) -> None:
        left = self.some_handle(lambda h: len(h.shape) > 0 and min(h.shape) <= 6, self.shape(2))
        axes = [axis for axis, extent in enumerate(left.shape) if extent <= 6]
        if not axes:
            return
        axis = self.pick(axes)
        shape = (*left.shape[:axis], *left.shape[axis + 1 :])
        rights = self.right_handles(left, [(shape, left.dtype, left.tame)] * left.shape[axis])
        shown = axis - len(left.shape) if self.maybe(0.3) else axis
        self.say("unstack", [left], rights, ["unstack", f"axis={shown}"])

    def star(self) -> None:
        """Families under one name: of all ids, or of all experts of every layer."""
        deep = self.maybe(0.4)
        ids = self.ids()
        while len(ids[0]) != (2 if deep else 1):
            ids = self.ids()
        shape = self.shape(self.pick([1, 2]))
        family = self.source(shape, self.dtype(), ids)
        if deep:
            inner = "*"
            names = [family.template.format("$LAYER_ID", inner)]
            layers = sorted({each[0] for each in ids})
            counts = {layer: sum(each[0] == layer for each in ids) for layer in layers}
            if len(set(counts.values())) > 1:
                # The experts of one layer are more than another's: one statement, different shapes.
                base = f"d{self.number()}"
                for layer in layers:
                    self.program.destination[f"{base}.{layer}.w"] = Target((counts[layer], *shape), family.dtype)
                self.write("ragged", [f"{names[0]}"], [f"{base}.$LAYER_ID.w"], ["stack", "axis=0"])
                self.used.update(family.names)
                if self.program.invertible:
                    self.pool.remove(family)
                return
            out_ids: tuple = tuple((layer,) for layer in layers)
            count = counts[layers[0]]
        else:
            names, out_ids, count = [family.template.format("*")], ((),), len(ids)
        axis = self.pick(range(len(shape)))
        stacks = self.maybe(0.5) or count == 1
        joined = (count, *shape) if stacks else (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])
        like = replace(family, ids=out_ids)
        out = self.right_handles(like, [(joined, family.dtype, family.tame)])[0]
        right = out.template.replace("$", "\\$").format(*["$LAYER_ID"] * len(out_ids[0]))
        attributes = ["stack", "axis=0"] if stacks else [f"axis={axis}"]
        self.write("star", names, [self.quoted(right)], attributes)
        self.used.update(family.names)
        if self.program.invertible:
            self.pool.remove(family)
        self.note(out)

    def star_right(self) -> None:
        left = self.some_handle(lambda h: h.single and len(h.shape) > 0, self.shape(2))
        if not left.single or not left.shape or left.shape[0] > 8:
            return
        base = f"d{self.number()}"
        numbers = sorted(self.rng.sample(range(30), left.shape[0]))
        for number in numbers:
            self.program.destination[f"{base}.{number}.w"] = Target(left.shape[1:], left.dtype)
        right = Handle(f"{base}.{{}}.w", tuple((n,) for n in numbers), left.shape[1:], left.dtype, left.tame)
        self.write("star", [self.quoted(left.template)], [f"{base}.*.w"], ["unstack", "axis=0"])
        self.used.add(left.template)
        if self.program.invertible:
            self.pool.remove(left)
        self.note(right)
