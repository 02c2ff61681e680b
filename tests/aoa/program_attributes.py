"""Random attributes of single variables, with what becomes of the variable."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from tests.aoa.oracle import MASTER, Tensor, treat
from tests.aoa.program_writer import COMPLEX, FLOATS, INTEGERS, UNSIGNED, WIDER, Handle, Writer, divisors


class Attributes(Writer):
    """Makes chains of attributes."""

    def castable(self, handle: Handle) -> list[str]:
        """The dtypes to which a cast is defined."""
        if self.values_kind == "bits":
            return []
        if handle.dtype in COMPLEX:
            return list(COMPLEX)
        # Infinity among the special numbers is an error where a dtype has none.
        options = [name for name in FLOATS if self.values_kind != "specials" or name != "float8_e4m3fn"] + [*COMPLEX]
        if self.values_kind == "numbers" and handle.tame:
            options += ["bool", "int8", "int16", "int32", "int64", *([] if self.signed else UNSIGNED)]
        return [name for name in options if name != handle.dtype]

    def can_compute(self, handle: Handle) -> bool:
        return handle.dtype in FLOATS and self.values_kind != "bits" and set(self.states) <= {MASTER}

    def step(self, handle: Handle, uniform: bool, repeats: bool, lands: bool, fills: bool) -> tuple[list[str], Handle]:
        """One attribute of a single variable, and what the variable is then.

        Args:
            handle: The variable.
            uniform: It stands for several of different extents: only what fits all of them.
            repeats: ``repeat`` may be used.
            lands: What is made is a destination key, and this is its last step that changes shapes.
            fills: ``pad`` and growing may be used.
        """
        shape, n = handle.shape, len(handle.shape)
        exact = self.program.invertible
        options = ["permute"] if exact or self.states else ["permute", "dtype", "scale", "scale"]
        if self.states:
            options += ["dtype"] + (["scale"] if set(self.states) <= {MASTER} else [])
        if exact:
            options.append("src_dtype")
        if not uniform:
            options += ["reshape"] if exact else ["reshape", "slice", "resize", "pad"]
            options += ["repeat"] if repeats and not exact else []
            options += ["auto"] if lands and not exact else []
        option = self.pick(options)
        attributes: list[str] = []
        if option == "permute":
            order = self.rng.sample(range(n), n)
            shown = [axis - n if self.maybe(0.2) else axis for axis in order]
            text = "[]" if self.maybe(0.2) else str(shown)
            attributes = [f'permute="{text}"']
        elif option == "dtype" and (names := self.castable(handle)):
            self.program.moves_only = False
            name = self.pick(names)
            attributes = [f'dtype="{name}"']
            if self.maybe(0.3):
                attributes = [f'src_dtype="{handle.dtype}"', f'dst_dtype="{name}"']
                self.rng.shuffle(attributes)
            handle = replace(handle, dtype=name)
        elif option == "src_dtype" and handle.dtype in WIDER and self.values_kind == "numbers":
            self.program.moves_only = False
            name = self.pick(WIDER[handle.dtype])
            attributes = [f'src_dtype="{handle.dtype}"', f'dst_dtype="{name}"']
            handle = replace(handle, dtype=name)
        elif option == "scale" and self.can_compute(handle):
            self.program.moves_only = False
            attributes = [f"scale={self.pick(['0.5', '2', '-1', '0.1', '1e-3', '3.7'])}"]
            handle = replace(handle, tame=False)
        elif option == "reshape":
            wanted = self.other_shape(shape)
            shown = list(wanted)
            if shown and self.maybe(0.3):
                shown[self.pick(range(len(shown)))] = -1
            attributes = [f'reshape="{shown}"']
            if lands and not exact and self.maybe(0.2):
                return ['reshape="auto"'], replace(handle, shape=wanted)
        elif option == "slice" and n:
            attributes = [f'slice="[{self.slices(shape)}]"']
        elif option == "repeat" and n and math.prod(shape) <= 100:
            axis = self.pick(range(n))
            attributes = [f"repeat={self.pick([2, 3])}", f"axis={axis - n if self.maybe(0.3) else axis}"]
            if self.maybe(0.5):
                attributes.append(f"block={self.pick(divisors(shape[axis]))}")
        elif option in ("resize", "pad", "auto") and n:
            return self.resized(handle, option, lands, fills)
        if not attributes:
            return [], handle
        parsed = [(key, value.strip('"')) for key, value in (each.split("=", 1) for each in attributes)]
        parsed = [(k, int(v) if k in ("repeat", "axis", "block") else v) for k, v in parsed]
        parsed = [(k, v) for k, v in parsed if k in ("permute", "reshape", "slice", "repeat", "axis", "block")]
        sample = treat(Tensor(np.empty(shape, dtype=np.int8)), parsed, None, "model").array
        return attributes, replace(handle, shape=sample.shape)

    def resized(self, handle: Handle, option: str, lands: bool, fills: bool) -> tuple[list[str], Handle]:
        shape = handle.shape
        grows = fills and not self.states and math.prod(shape) <= 100
        wanted = [max(1, extent + self.pick([-2, -1, 0, 0, 1, 2] if grows else [-2, -1, 0])) for extent in shape]
        keep = lands and self.maybe(0.3)
        attributes: list[str] = []
        if option == "auto":
            attributes = ['resize="auto"']
        elif option == "pad":
            if not grows:
                return [], handle
            pads = [[self.pick([0, 0, 1, 2]), self.pick([0, 1])] for _ in shape]
            wanted = [low + extent + high for extent, (low, high) in zip(shape, pads)]
            attributes = [f'pad="{pads}"']
        else:
            shown = [-1 if w == e and self.maybe(0.5) else w for w, e in zip(wanted, shape)]
            attributes = [f'resize="{shown}"']
        if any(w > e for w, e in zip(wanted, shape)) or option == "pad":
            if not keep:
                self.program.moves_only = False
            value = '"keep"' if keep else self.fill(handle.dtype)
            attributes.insert(self.pick([0, len(attributes)]), f"fill={value}")
        return attributes, replace(handle, shape=tuple(wanted))

    def fill(self, dtype: str) -> str:
        """A number that the dtype has."""
        if dtype in INTEGERS or dtype == "bool":
            return self.pick(["0", "0", "1"])
        return self.pick(["0", "0.0", "1", "0.5", "2.5", "-1.0" if self.signed else "1e1"])

    def slices(self, shape: tuple[int, ...]) -> str:
        parts = []
        for extent in shape[: self.pick([1, len(shape), len(shape)])]:
            low = self.pick(range(extent))
            high = self.pick(range(low + 1, extent + 1))
            choice = self.rng.random()
            if choice < 0.2:
                parts.append(":")
            elif choice < 0.35 and len(shape) > 1:
                parts.append(str(low - extent if self.maybe(0.3) else low))
            else:
                shown_low = low - extent if self.maybe(0.2) else low
                shown_high = high - extent if high < extent and self.maybe(0.3) else high
                parts.append(f"{shown_low}:{shown_high}")
        return ", ".join(parts)

    def other_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Another shape of as many elements: often by joining or splitting axes."""
        extents = list(shape)
        for _ in range(self.pick([1, 1, 2])):
            if len(extents) > 1 and self.maybe(0.5):
                at = self.pick(range(len(extents) - 1))
                extents[at : at + 2] = [extents[at] * extents[at + 1]]
            elif extents and len(extents) < 5:
                at = self.pick(range(len(extents)))
                part = self.pick(divisors(extents[at]))
                extents[at : at + 1] = [part, extents[at] // part]
        if self.maybe(0.15):
            self.rng.shuffle(extents)
        return tuple(extents)

    def chain(
        self,
        handle: Handle,
        most: int,
        uniform: bool = False,
        repeats: bool = False,
        lands: bool = False,
        fills: bool = True,
    ) -> tuple[list[str], Handle]:
        """Up to ``most`` attributes of single variables; at most one of them takes ``fill``, ``axis`` or ``block``."""
        attributes: list[str] = []
        for _ in range(self.pick(range(most + 1))):
            used = " ".join(attributes)
            special = not re.search(r"repeat|fill|resize|pad", used)
            if re.search(r'"auto"|"keep"', used):
                break
            more, after = self.step(handle, uniform, repeats and special, lands and special, fills and special)
            if any(each.split("=")[0] in used for each in more):
                continue  # once per statement, for the reader's sake
            attributes += more
            handle = after
        return attributes, handle
