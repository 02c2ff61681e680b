"""Random valid AOA programs, with the source they read and the destination they feed, from one integer seed.

Every statement is run by the oracle as soon as it is made, so that the shapes and dtypes of all names are known.
"""

from __future__ import annotations

import math

import numpy as np

from tests.aoa.oracle import SCALAR_STATES, Target
from tests.aoa.program_steps import Steps
from tests.aoa.program_writer import MAX_ELEMENTS, Handle, Program


class Generator(Steps):
    """Makes one program."""

    def run(self) -> Program:
        """The program."""
        kinds = {
            self.rename: 6,
            self.pairwise: 1,
            self.swap: 1,
            self.cut: 3,
            self.join: 3,
            self.stack: 1.5,
            self.unstack: 1,
            self.star: 1,
            self.star_right: 0.5,
            self.fused: 1.5,
            self.remove: 0.5,
            self.optional: 0.3,
        }
        if not self.program.invertible:
            kinds.update({self.copies: 1, self.nothing: 0.7, self.partly_optional: 0.3, self.lora: 0.8})
            kinds.update({self.total: 1.5, self.dequantise: 0.8})
            if self.states:
                kinds[self.explicit_state] = 1.5
        else:
            del kinds[self.remove], kinds[self.optional]
        for _ in range(self.pick([1, 1, 2, 2, 3])):
            self.source(self.shape(), self.dtype(), self.ids())
        wanted = self.pick([1, 1, 2, 3, 4, 5, 7, 10])
        makers, weights = list(kinds), list(kinds.values())
        for _ in range(3 * wanted):
            if self.program.statements >= wanted:
                break
            self.pending = {}
            self.rng.choices(makers, weights)[0]()
            if not self.program.invertible:  # there every variable has to reach the destination
                self.pool = [h for h in self.pool if math.prod(h.shape) <= MAX_ELEMENTS]
        self.finish()
        return self.program

    def finish(self) -> None:
        """Completes the destination and joins some texts."""
        program, self.pending = self.program, {}
        if program.invertible:
            for handle in list(self.pool):
                if not handle.is_source and handle.names[0] not in program.destination:
                    right = Handle(
                        self.template("d", len(handle.ids[0])), handle.ids, handle.shape, handle.dtype, handle.tame
                    )
                    for name in right.names:
                        program.destination[name] = Target(handle.shape, handle.dtype)
                    self.say("rename", [handle], [right], [])
        for handle in self.pool:
            wanted = program.invertible or self.maybe(0.4)
            for name in handle.names if handle.is_source and wanted else []:
                if name not in self.oracle.assigned and name not in self.removed:
                    program.destination[name] = Target(handle.shape, handle.dtype)
        if not program.destination:
            handle = self.source(self.shape(), self.dtype())
            program.destination[handle.names[0]] = Target(handle.shape, handle.dtype)
        self.add_states()
        program.texts = self.written_together(program.texts)

    def add_states(self) -> None:
        destination = self.program.destination
        for state in self.states:
            following = self.oracle.states(state)
            for name in list(destination):
                key, value = f"{name}.{state}", following.get(name)
                if key in destination or not self.maybe(0.8):
                    continue
                if name in self.oracle.assigned or value is not None:
                    if value is not None:
                        destination[key] = Target(value.array.shape, str(value.array.dtype))
                elif key in self.program.source:
                    array = self.program.source[key].array
                    destination[key] = Target(array.shape, str(array.dtype))
                if key in destination and state not in SCALAR_STATES and name in self.program.target_cuts:
                    self.program.target_cuts[key] = self.program.target_cuts[name]

    def written_together(self, texts: list[str]) -> list[str]:
        """Some statements in one text, some with comments."""
        joined: list[str] = []
        for text in texts:
            if self.maybe(0.05):
                text = f'# about -> this, "that"\n{text} # and that'
            if joined and self.maybe(0.1):
                joined[-1] += self.pick(["\n", "\n\n  "] if "#" in joined[-1] else ["\n", " ", "\n\n  "]) + text
            else:
                joined.append(text)
        return joined


def make_program(seed: int) -> Program:
    """A random valid program.

    Args:
        seed: The same seed makes the same program.
    """
    with np.errstate(all="ignore"):
        return Generator(seed).run()
