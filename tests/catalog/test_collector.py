"""The collector is suspended for the time of a with statement, and stays off if it was."""

from __future__ import annotations

import gc

import pytest

from paddle_flexckpt.catalog.collector import without_collector


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_it_runs_again_afterwards():
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collector():
        raise KeyError
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_so():
    gc.disable()
    with without_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()
