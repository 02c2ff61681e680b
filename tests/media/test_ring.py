"""A ring of buffers: that its stages overlap, that memory is bounded, and that nothing is left running."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paddle_flexckpt.media.ring import BufferRing


def numbers(count, seen=None):
    """A ``fill`` that puts 0, 1, 2 ... into buffers; ``seen`` gets each buffer's identity."""
    left = iter(range(count))

    def fill(buffer):
        number = next(left, None)
        if number is not None:
            buffer[:] = number
            if seen is not None:
                seen.append(id(buffer))
        return number

    return fill


def running():
    return [each for each in threading.enumerate() if each.name == "flexckpt-ring"]


def test_everything_comes_in_order_through_few_buffers():
    seen, buffers = [], [np.empty(4, np.uint8) for _ in range(3)]
    with BufferRing(buffers, numbers(100, seen)) as ring:
        for expected in range(100):
            buffer, item = ring.take()
            assert item == expected
            assert (buffer == expected).all()
            ring.give_back(buffer)
        assert ring.take() is None
        assert ring.take() is None
    assert set(seen) <= set(map(id, buffers))
    assert not running()


def test_the_next_is_filled_while_one_is_used_and_no_more_than_there_are_buffers():
    filled = [threading.Event() for _ in range(6)]
    count = iter(range(6))

    def fill(buffer):
        number = next(count)
        filled[number].set()
        return number

    with BufferRing([np.empty(1, np.uint8) for _ in range(3)], fill) as ring:
        first, _ = ring.take()
        # The caller still uses the first: the others are filled meanwhile.
        assert filled[2].wait(30)
        assert not filled[3].is_set()
        ring.give_back(first)
        assert filled[3].wait(30)
        assert not filled[4].is_set()


def test_an_error_of_filling_is_raised_after_what_was_filled_before_it():
    def fill(buffer):
        buffer[0] += 1
        if buffer[0] == 2:
            raise OSError("the device is gone")
        return int(buffer[0])

    with BufferRing([np.zeros(1, np.uint8)], fill) as ring:
        buffer, item = ring.take()
        assert item == 1
        ring.give_back(buffer)
        for _ in range(2):
            with pytest.raises(OSError, match="the device is gone"):
                ring.take()
    assert not running()


def test_the_next_has_begun_before_the_one_before_is_finished_and_they_come_in_order():
    begun = [threading.Event() for _ in range(9)]

    def finish(number):
        begun[number].set()
        assert number == 7 or begun[number + 1].wait(30), "nothing is under way beside it"

    with BufferRing([np.empty(1, np.uint8) for _ in range(3)], numbers(8), finish) as ring:
        for expected in range(8):
            buffer, item = ring.take()
            assert (item, int(buffer[0])) == (expected, expected)
            ring.give_back(buffer)
        assert ring.take() is None
    assert not running()


def test_an_error_of_finishing_is_raised_in_its_turn():
    second = threading.Event()

    def finish(number):
        if number == 1:
            second.set()
            raise OSError("the link is down")
        assert second.wait(30)

    with BufferRing([np.empty(1, np.uint8) for _ in range(4)], numbers(9), finish) as ring:
        assert ring.take()[1] == 0
        for _ in range(2):
            with pytest.raises(OSError, match="the link is down"):
                ring.take()
    assert not running()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_caller_that_stops_leaves_no_thread(error):
    def use():
        with BufferRing([np.empty(1, np.uint8) for _ in range(2)], numbers(1000)) as ring:
            ring.take()
            raise error

    with pytest.raises(error):
        use()
    assert not running()


def test_what_is_not_begun_has_no_thread():
    with BufferRing([np.empty(1, np.uint8)], numbers(1)):
        assert not running()
