"""Messages between the two processes."""

from __future__ import annotations

import os
import socket

import pytest

from paddle_flexckpt.background.protocol import Channel


@pytest.fixture
def ends():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = [Channel(end) for end in pair]
    yield channels
    for channel in channels:
        channel.close()


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


def test_messages_arrive_in_order_each_with_its_own_descriptors(ends):
    ours, theirs = ends
    files = [os.memfd_create(name) for name in "abc"]
    ours.send({"n": 1, "text": "ä" * 5000})
    ours.send({"n": 2}, files[:2])
    ours.send({"n": 3}, files[2:])
    ours.send({"n": 4})
    got = [theirs.receive() for _ in range(4)]
    assert [message["n"] for message, _ in got] == [1, 2, 3, 4]
    assert got[0][0]["text"] == "ä" * 5000
    assert [len(descriptors) for _, descriptors in got] == [0, 2, 1, 0]
    received = [descriptor for _, descriptors in got for descriptor in descriptors]
    assert all(map(same_file, received, files))
    assert not any(map(os.get_inheritable, received))
    for descriptor in (*files, *received):
        os.close(descriptor)


def test_what_was_sent_before_the_end_is_received(ends):
    ours, theirs = ends
    theirs.send({"unread": True})
    ours.send({"n": 1})
    ours.close()
    assert theirs.receive() == ({"n": 1}, [])
    assert theirs.receive() is None
    with pytest.raises(ConnectionError):
        theirs.send({"n": 2})


def test_after_the_end_of_sending_messages_still_come(ends):
    ours, theirs = ends
    ours.end()
    assert theirs.receive() is None
    theirs.send({"n": 1})
    assert ours.receive() == ({"n": 1}, [])
    theirs.close()
    ours.end()
    assert ours.receive() is None


def test_a_message_that_breaks_off_is_none():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.sendall((100).to_bytes(8, "little") + b'{"half":')
    ours.close()
    channel = Channel(theirs)
    assert channel.receive() is None
    channel.close()


def test_nonsense_is_an_error():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(theirs)
    ours.sendall(b"\xff" * 8)
    with pytest.raises(ValueError, match="a message of"):
        channel.receive()
    ours.close()
    channel.close()
