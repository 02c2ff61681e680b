"""The ways of semi-automatic parallelism that the tests train, save and load in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Sizes:
    """Extents of the network, and with them of its parameters.

    Attributes:
        cube: first axis of the parameter of three axes, ``[cube, 2, features]``.
        features: of the input after that parameter.
        hidden: rows of the second linear layer.
        classes: the outputs.
    """

    cube: int
    features: int
    hidden: int
    classes: int


#: Every degree divides them.
EVEN = Sizes(cube=4, features=8, hidden=12, classes=8)
#: 4 divides none of them and 2 divides only those that "mp" cuts: upstream's matrix product takes no others.
UNEVEN = Sizes(cube=7, features=10, hidden=78, classes=7)
#: Neither 2 nor 4 divides most of them, and 6 over 4 ranks leaves the last one with nothing, as 3 does. Upstream gives
#: each rank the quotient rounded up, so 5 over 4 would leave the last one with less than nothing, and its operators
#: raise then; such a tensor can be made and resharded in the CPU world, but not be trained.
RAGGED = Sizes(cube=3, features=6, hidden=77, classes=7)
SIZES = {"even": EVEN, "uneven": UNEVEN, "ragged": RAGGED}


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Attributes:
        name: how tests call it.
        ranks: size of the world that it needs; with 1 every rank trains by itself, on dense tensors.
        mesh: extents of the mesh of processes.
        axes: names of its axes, "dp" (batches are cut over it) and "mp".
        mp: the linear layers and the parameter of three axes are cut over the axis "mp".
        stage: of ``shard_optimizer`` over the axis "dp", 0 to 3.
        fusion: parameters and gradients of stage 1 live in one buffer, of which each rank updates a slice.
        fully_shard: ``fsdp.fully_shard`` instead of ``shard_optimizer``, with or without fused buffers.
        half: parameters in bfloat16, with float32 masters; forward and backward in float32.
        ragged: Paddle can train it with the sizes ``RAGGED`` too, in the CPU world.
    """

    name: str
    ranks: int
    mesh: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    mp: bool = False
    stage: int = 0
    fusion: bool = False
    fully_shard: Literal["unfused", "fused"] | None = None
    half: bool = False
    ragged: bool = True

    @property
    def dense(self) -> bool:
        """Nothing is parallel."""
        return self.ranks == 1


def _data_parallel(ranks: int, name: str, **named) -> Strategy:
    return Strategy(f"dp{ranks}-{name}", ranks, (ranks,), ("dp",), **named)


def _two_by_two(name: str, **named) -> Strategy:
    return Strategy(f"dp2-mp2-{name}", 4, (2, 2), ("dp", "mp"), mp=True, ragged=False, **named)


STRATEGIES = (
    Strategy("single", 1),
    *(_data_parallel(n, f"stage{stage}", stage=stage) for n in (2, 4) for stage in range(4)),
    Strategy("mp2", 2, (2,), ("mp",), mp=True, ragged=False),
    *(_two_by_two(f"stage{stage}", stage=stage) for stage in range(4)),
    *(_data_parallel(n, "fusion", stage=1, fusion=True) for n in (2, 4)),
    _two_by_two("fusion", stage=1, fusion=True),
    *(_data_parallel(n, "fully-shard", fully_shard="unfused") for n in (2, 4)),
    *(_data_parallel(n, "fully-shard-fused", fully_shard="fused") for n in (2, 4)),
)
#: In half precision; beside the others, since what they save is of another dtype.
HALF = tuple(
    replace(strategy, name=f"{strategy.name}-half", half=True)
    for strategy in STRATEGIES
    if strategy.name in ("single", "dp2-stage1", "dp2-stage2", "dp2-stage3", "dp2-mp2-stage2")
)
BY_NAME = {strategy.name: strategy for strategy in (*STRATEGIES, *HALF)}


def of_ranks(ranks: int) -> tuple[Strategy, ...]:
    """The strategies that a world of so many ranks can train, each of them in parallel."""
    return tuple(strategy for strategy in STRATEGIES if strategy.ranks == ranks)
