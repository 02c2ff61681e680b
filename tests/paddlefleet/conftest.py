"""What one process needs to train in bfloat16 on a CPU; the ranks of a world have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_flexckpt.testing import cpu_world


@pytest.fixture(autouse=True, scope="package")
def on_a_cpu() -> Iterator[None]:
    cpu_world.install()
    yield
    cpu_world.uninstall()
