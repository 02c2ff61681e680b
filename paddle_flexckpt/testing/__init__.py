"""Run real multi-process, hybrid-parallel Paddle training on a machine without a GPU.

Three things live here. :mod:`~paddle_flexckpt.testing.cpu_world` lends Paddle what its CPU build lacks (it patches
Paddle in the calling process, and only when ``install()`` is called). :class:`~paddle_flexckpt.testing.world.World`
keeps N worker processes alive and runs functions in them, so that one start (seconds) serves many layouts (a tenth of
a second each). :mod:`~paddle_flexckpt.testing.device_check` proves the library on a real accelerator.

Nothing else in ``paddle_flexckpt`` imports this package. Importing it neither imports Paddle nor patches anything.
"""

from paddle_flexckpt.testing.world import World, WorldError

__all__ = ["World", "WorldError"]
