"""Random statements that compute, and those about fused parameters, single states, and nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.aoa.oracle import MASTER, SCALAR_STATES, Target
from tests.aoa.program_moves import Moves
from tests.aoa.program_writer import FLOATS, Cut, Handle, divisors


class Steps(Moves):
    """Makes statements of all other kinds."""

    def total(self) -> None:
        left = self.some_handle(self.can_compute, dtype=self.pick(FLOATS) if not self.states else None)
        if not self.can_compute(left):
            return
        others = self.companions(
            left, lambda h: h.shape == left.shape and self.can_compute(h), lambda: (left.shape, self.pick(FLOATS))
        )
        if self.states:
            others = [h for h in others if h.dtype == left.dtype]
        lefts = [left, *others]
        if len(lefts) < 2:
            return
        self.program.moves_only = False
        attributes = ["average"] if self.maybe(0.4) else ["sum"]
        if attributes == ["sum"] and self.maybe(0.6):
            attributes.append(f'weights="{[self.pick([0.3, 0.7, 1, -1, 0.5, 2]) for _ in lefts]}"')
        value, kind, flag, choice = replace(left, tame=False), attributes[0], self.maybe(0.15), self.rng.random()
        if flag:
            value = replace(value, shape=value.shape[::-1])
        if choice < 0.15:
            attributes, value = ['permute="[]"', *attributes], replace(value, shape=value.shape[::-1])
        elif choice < 0.3 and not self.states:
            attributes, value = ['dtype="float16"', *attributes], replace(value, dtype="float16")
        elif choice < 0.4:
            attributes = ["scale=1.5", *attributes]
        more, value = self.chain(value, 1, fills=False)
        if any(each.split("=")[0] in " ".join(attributes) for each in more):
            return
        right = self.right_handles(left, [(value.shape, value.dtype, value.tame)])
        self.say(kind, lefts, right, [*attributes, *more], [flag] * len(lefts))

    def lora(self) -> None:
        left = self.some_handle(lambda h: len(h.shape) == 2 and self.can_compute(h), self.shape(2), self.pick(FLOATS))
        if len(left.shape) != 2 or not self.can_compute(left) or self.states:
            return
        rank = self.pick([1, 2, 3])
        a = self.source((left.shape[0], rank), self.pick([left.dtype, "float32"]), left.ids)
        b = self.source((rank, left.shape[1]), self.pick([left.dtype, "float32", "bfloat16"]), left.ids)
        self.program.moves_only = False
        value = replace(left, tame=False)
        more, value = self.chain(value, 1, fills=False)
        if any("scale" in each for each in more):
            more, value = [], replace(left, tame=False)
        right = self.right_handles(left, [(value.shape, value.dtype, value.tame)])
        self.say("lora_merge", [left, a, b], right, ["lora_merge", f"scale={self.pick(['2.0', '0.3', '1'])}", *more])

    def dequantise(self) -> None:
        if self.states or self.values_kind == "bits":
            return
        ids = self.ids()
        if self.maybe(0.5):
            shape = self.shape(2)
            block = [self.pick([1, 2, 3, 4]), self.pick([1, 2, 3])]
            w = self.source(shape, self.pick(["float8_e4m3fn", "float8_e5m2"]), ids)
            s = self.source(tuple(-(-n // b) for n, b in zip(shape, block)), self.pick(["float32", "bfloat16"]), ids)
            attributes = ['dequant="fp8"', f'block="{block}"']
            made = shape
        else:
            lead, groups, n = self.shape(self.pick([0, 1, 2])), self.pick([1, 2, 3]), self.pick([1, 2, 4])
            w = self.raw_source((*lead, groups, n), ids, 256)
            s = self.raw_source((*lead, groups), ids, 255)
            attributes = ['dequant="mxfp4"']
            made = (*lead, groups * 2 * n)
        self.program.moves_only = False
        more, value = self.chain(Handle("", ids, made, "float32", tame=False), 2, fills=False)
        right = self.right_handles(w, [(value.shape, value.dtype, False)])
        self.say("dequant", [w, s], right, [*attributes, *more])

    def raw_source(self, shape: tuple[int, ...], ids: tuple, below: int) -> Handle:
        handle = Handle(self.template("s", len(ids[0])), ids, shape, "uint8", True, is_source=True)
        for name in handle.names:
            self.add_source(name, self.numbers.randint(0, below, shape).astype(np.uint8), None)
        self.pool.append(handle)
        return handle

    def fused(self) -> None:
        """All forms of the three tags, between any numbers of tensor-parallel parts."""
        tag = self.pick(["fused_qkv", "fused_qkv_old", "fused_ffn"])
        # Uneven heads; the numbers of parts divide the groups.
        groups = self.pick([1, 2, 4])
        heads, width = groups * self.pick([1, 2, 3]), self.pick([1, 2])
        source_parts, target_parts = self.pick(divisors(groups)), self.pick(divisors(groups))
        lengths = [groups * width] * 2 if tag == "fused_ffn" else [heads * width, groups * width, groups * width]
        axis = self.pick([0, 1, 1, 1])
        other = self.pick([1, 2, 3])
        attributes = [tag] + ([] if axis == 1 else [f"axis={axis}"])
        bare = axis == 0 and self.maybe(0.5)  # a bias

        def shape(length: int) -> tuple[int, ...]:
            return (length,) if bare else (length, other) if axis == 0 else (other, length)

        if tag != "fused_ffn":
            attributes += [f"num_heads={heads}", f"num_key_value_groups={groups}"]
        dtype, ids, form = self.dtype(), self.ids(), self.pick(["split", "merge", "again"])
        if tag == "fused_qkv" and form == "again":
            form = "split"
        total = shape(sum(lengths))
        if form == "merge":
            flags = [self.maybe(0.2)] * len(lengths)
            lefts = [self.source(shape(n)[::-1] if f else shape(n), dtype, ids) for n, f in zip(lengths, flags)]
        else:
            flags, cut = [False], None if tag == "fused_qkv" else Cut(axis, source_parts)
            lefts = [self.source(total, dtype, ids, cut)]
        value = replace(lefts[0], shape=total)
        after: list[str] = []
        if self.maybe(0.2) and not self.program.invertible and (names := self.castable(value)):
            name = self.pick(names)
            after, value, self.program.moves_only = [f'dtype="{name}"'], replace(value, dtype=name), False
        if form == "split":
            rights = self.right_handles(lefts[0], [(shape(n), value.dtype, True) for n in lengths])
        else:
            right = Handle(self.template("d", len(ids[0])), ids, total, value.dtype, True, fixed=True)
            cut = None if tag == "fused_qkv" else Cut(axis, target_parts)
            for name in right.names:
                self.program.destination[name] = Target(total, value.dtype, cut.parts if cut else 1)
                if cut:
                    self.program.target_cuts[name] = cut
            rights = [right]
        self.say(tag, lefts, rights, [*attributes, *after], flags)

    def remove(self) -> None:
        options = [h for h in self.pool if h.is_source and not set(h.names) & self.used]
        left = (
            self.pick(options) if options and self.maybe(0.5) else self.source(self.shape(), self.dtype(), self.ids())
        )
        if any(name in self.program.destination for name in left.names):
            return
        self.removed.update(left.names)
        self.say("remove", [left], [], [])
        self.pool = [h for h in self.pool if h.template != left.template]

    def nothing(self) -> None:
        """Destination keys that are kept or filled."""
        shape, dtype = self.shape(), self.dtype()
        right = Handle(self.template("d", len((ids := self.ids())[0])), ids, shape, dtype, fixed=True)
        for name in right.names:
            self.program.destination[name] = Target(shape, dtype)
        fill = self.maybe(0.5) and not self.states
        if fill:
            self.program.moves_only = False
        self.say("fill" if fill else "keep", [], [right], [f"fill={self.fill(dtype)}"] if fill else [])

    def optional(self) -> None:
        self.missing += 1
        name = self.pick(["missing.{}", "missing.{}.$LAYER_ID.w", "missing{}.*"]).format(self.missing)
        right = "t_never.$LAYER_ID" if "$" in name else "t_never"
        self.write("optional", [name], [right], ["optional"] if "*" not in name else ["stack", "axis=0", "optional"])

    def partly_optional(self) -> None:
        """A family of which some members lack a partner: those are left out."""
        layers = tuple((i,) for i in sorted(self.rng.sample(range(6), 3)))
        shape, dtype = self.shape(1), self.dtype()
        whole = self.source(shape, dtype, layers)
        part = self.source(shape, dtype, layers[: self.pick([1, 2])])
        base, n = f"d{self.number()}", shape[0]
        for each in part.ids:
            self.program.destination[f"{base}.{each[0]}"] = Target((2 * n,), dtype)
        names = [whole.template.format("$L"), part.template.format("$L")]
        self.write("optional", names, [f"{base}.$L"], ["axis=0", "optional"])
        self.used.update([*whole.names, *part.names])

    def explicit_state(self) -> None:
        """A statement about one state alone, by its name or by ``states=``."""
        states = [state for state in self.states if state not in SCALAR_STATES]
        if not states:
            return
        state = self.pick(states)
        shape, dtype = self.shape(self.pick([1, 2])), self.dtype()
        left = self.source(shape, dtype)
        kind = "float32" if state == MASTER else self.state_dtype
        lands = [h for h in self.pool if h.single and h.names[0] in self.program.destination and not h.is_source]
        if lands and self.maybe(0.6):
            name = self.pick(lands).template
            shape = self.program.destination[name].shape
            left = self.source(shape, dtype)
        else:
            name = f"d{self.number()}"
            if self.maybe(0.5):
                self.write("rename", [self.quoted(left.template)], [name], [])
                self.program.destination[name] = Target(shape, dtype)
                self.note(Handle(name, ((),), shape, dtype))
        self.program.destination[f"{name}.{state}"] = Target(shape, kind)
        if self.maybe(0.5):
            self.write("states", [self.quoted(left.template)], [self.quoted(name)], [f'states="{state}"'])
        else:
            pair = [self.quoted(f"{left.template}.{state}"), self.quoted(f"{name}.{state}")]
            self.write("states", pair[:1], pair[1:], [])
        self.used.add(left.template)
        # Whether what follows from a parameter reads what is said about its state is nowhere said: nothing reads it.
        self.pool = [handle for handle in self.pool if handle.template != name]
