"""Random programs that assign names again, and a check that their inverse gives the source back, or is refused.

All tensors are square or halves of squares, so that a statement that is lost or done twice is seen in the values alone.
"""

from __future__ import annotations

from random import Random

import numpy as np

from paddle_flexckpt.aoa import AoaError, compile_program
from paddle_flexckpt.aoa.invert import invert
from tests.aoa.oracle import Oracle, OracleError, Source
from tests.aoa.small import Arrays, catalog, numbered, room, run

SINGLE = ("a", "b", "c", "d", "e")
LAYERS = ("l.0", "l.1", "l.2")
STATE = "moment1_0"
FAMILY = (
    "l.$L{t} -> l.$L",
    "l.$L{t} -> l.${{L+1}}",
    "l.${{L+1}}{t} -> l.$L",
    "l.$L{t} -> m.$L",
    "m.$L{t} -> l.$L",
    "l.$L{t} -> l.${{L*2}}",
    "l.$L -> l.$L, fused_ffn",
)


def random_texts(rng: Random) -> list[str]:
    """Two to six statements."""

    def name() -> str:
        return rng.choice([*SINGLE, *SINGLE, *LAYERS, "m.0"])

    def turned() -> str:
        return rng.choice(["", "", "^T"])

    def two() -> tuple[str, str]:
        first = name()
        return first, rng.choice([each for each in (*SINGLE, *LAYERS) if each != first])

    makers = {
        lambda: f"{name()}{turned()} -> {name()}": 8,
        lambda: f'{name()} -> {name()}, permute="[1, 0]"': 2,
        lambda: "{}{t}, {}{u} -> {}, {}".format(*two(), *two(), t=turned(), u=turned()): 4,
        lambda: "{} -> {}, {}, axis=0".format(name(), *two()): 2,
        lambda: '{}, {} -> {}, axis=0, sizes="equal"'.format(*two(), name()): 2,
        lambda: "{} -> {}, {}, copy".format(name(), *two()): 1,
        lambda: rng.choice(FAMILY).format(t=turned()): 4,
        lambda: f"{name()} -> {name()}, scale=2.0": 0.5,
        lambda: f"{name()} -> _": 0.3,
        lambda: f"{name()}{turned()} -> {name()}, optional": 0.5,
        lambda: f'{name()} -> {name()}, states="{STATE}"' + rng.choice(["", ', permute="[1, 0]"']): 1,
        lambda: f"{name()}.{STATE}{turned()} -> {name()}.{STATE}": 0.5,
    }
    return [rng.choices(list(makers), list(makers.values()))[0]() for _ in range(rng.randint(2, 6))]


def kept_source(texts: list[str], source: Arrays) -> Arrays:
    """The source without what a statement overwrites before one reads it, which no text can tell."""
    oracle = Oracle({key: Source(array) for key, array in source.items()}, {})
    for text in texts:
        oracle.run(text)
    read: set[str] = set()
    made: set[str] = set()
    for operation in oracle.operations:
        states = operation.statement.get("states")
        worlds = ["", f".{STATE}"] if states is None else [f".{STATE}"]
        left, right = ({f"{n}{w}" for n in side for w in worlds} for side in (operation.left, operation.right))
        read |= left - made
        made |= right - read
    return {key: array for key, array in source.items() if key not in made}


def check_undone(seed: int) -> str:
    """Undoes a random program.

    Returns:
        ``"undone"``, ``"refused"`` (its inverse), or ``"invalid"`` (the program).

    Raises:
        AssertionError: What the inverse makes of the program's results is not the source.
    """
    rng = Random(seed)
    texts = random_texts(rng)
    keys = [*SINGLE, *LAYERS]
    if rng.random() < 0.4:
        keys += [f"{key}.{STATE}" for key in keys]
    source = {key: numbered(4, 4, start=100 * i) for i, key in enumerate(keys)}
    try:
        source = kept_source(texts, kept_source(texts, source))
        outputs = compile_program({"aoa_statements": texts}, catalog(source), None)
        shapes = {key: outputs.tensors[key].shape for key in outputs.outputs}
        made = run(texts, source, {key: room(*shape) for key, shape in shapes.items()})
        if set(kept_source(texts, source)) != set(source):
            return "invalid"
    except (AoaError, OracleError, LookupError, ValueError, TypeError, AttributeError):
        return "invalid"
    try:
        inverse = invert({"aoa_statements": texts})["aoa_statements"]
    except AoaError:
        return "refused"
    shown = f"seed {seed}: {texts} made {sorted(made)}; inverse {inverse}"
    try:
        back = run(inverse, made, {key: room(*array.shape) for key, array in source.items()})
    except AoaError:
        return "refused"
    except LookupError as error:
        if "scale" in str(texts) and STATE in str(error):
            return "refused"  # such a step leaves no states
        raise AssertionError(f"{shown}: {error}") from error
    wrong = [key for key, array in source.items() if back[key].tobytes() != np.ascontiguousarray(array).tobytes()]
    if wrong:
        raise AssertionError(f"{shown}: {wrong} differ")
    return "undone"
