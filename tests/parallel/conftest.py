"""The mixins are installed for each test and taken back after it."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc


@pytest.fixture(autouse=True)
def installed():
    paddle.seed(7)
    fc.install()
    # Names of parameters count up per process; a test should see the same ones whatever ran before it.
    with paddle.utils.unique_name.guard():
        yield
    fc.uninstall()
