"""A receiver on the engine's machine, and what senders and strangers do to it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import wait

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.rollout import receiver as module
from paddle_flexckpt.rollout.receiver import SECRET, Receiver, RemoteSink
from paddle_flexckpt.rollout.segment import Region, SegmentNames, bytes_region, place_of_directory

FIRST = SegmentNames("c", "aa", "", (), 64, True)


@pytest.fixture
def receiver(tmp_path):
    server = Receiver("127.0.0.1", 0, b"s", str(tmp_path))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.close()
    thread.join()


def test_several_senders_write_one_segment(receiver, tmp_path):
    sinks = [RemoteSink(receiver.address, b"s", FIRST) for _ in range(2)]
    assert {sink.place for sink in sinks} == {place_of_directory(str(tmp_path))}
    assert {sink.path for sink in sinks} == {str(tmp_path / "flexckpt-c-aa.safetensors")}
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    sinks[0].write(Region(0, (2, 2), (16, 4), 4), np.ascontiguousarray(values[:, :2]))
    sinks[1].write(Region(8, (2, 2), (16, 4), 4), np.ascontiguousarray(values[:, 2:]))
    sinks[1].write(bytes_region(32, 32), np.full(32, 5, np.uint8))
    for sink in sinks:
        sink.finish()
    found = (tmp_path / "flexckpt-c-aa.safetensors").read_bytes()
    assert found == values.tobytes() + b"\5" * 32


def test_memory_is_used_again(receiver, tmp_path):
    for token, recycled, kept in (("aa", "", ()), ("bb", "", ("aa",)), ("cc", "aa", ("bb",))):
        sink = RemoteSink(receiver.address, b"s", replace(FIRST, token=token, recycled=recycled, kept=kept))
        sink.write(bytes_region(0, 1), np.frombuffer(token[:1].encode(), np.uint8))
        sink.finish()
    assert sorted(os.listdir(tmp_path)) == ["flexckpt-c-bb.safetensors", "flexckpt-c-cc.safetensors"]
    assert (tmp_path / "flexckpt-c-cc.safetensors").read_bytes()[:1] == b"c"


@pytest.mark.parametrize(
    ("change", "secret", "text"),
    [
        ({}, b"other", "the secrets differ"),
        ({"channel": "../c"}, b"s", "names that no sender gives"),
        ({"token": "a/b"}, b"s", "names that no sender gives"),
        ({"nbytes": 1 << 50}, b"s", r"bytes of shared memory are needed.*FC402"),
        ({"recycled": "dd"}, b"s", r"started again since the last push.*FC951"),
    ],
)
def test_a_refusal_says_why(receiver, tmp_path, change, secret, text):
    with pytest.raises(CheckpointError, match=rf"the receiver at {receiver.address}: .*{text}") as caught:
        RemoteSink(receiver.address, secret, replace(FIRST, **change))
    assert str(caught.value).count("Remedy (") == 1
    assert os.listdir(tmp_path) == []


def test_what_leaves_the_segment_is_refused(receiver):
    for region, size in ((bytes_region(60, 5), 5), (Region(0, (3,), (40,), 1), 3)):
        sink = RemoteSink(receiver.address, b"s", FIRST)
        sink.write(region, np.zeros(size, np.uint8))
        with pytest.raises(CheckpointError, match="the receiver at"):
            sink.finish()


def test_changed_bytes_are_refused(receiver):
    sink = RemoteSink(receiver.address, b"s", FIRST)
    head = module._FRAME.pack(1, 1, 0, bytes(16)) + struct.pack("<2q", 4, 1)
    sink._connection.sendall(head + b"1234")
    with pytest.raises(CheckpointError, match="bytes changed on their way"):
        sink.finish()


def test_a_sender_that_waits_for_others_is_not_cut_off(receiver, monkeypatch):
    # A busy machine may need a part of a second for the greeting itself.
    monkeypatch.setattr(module, "GREETING_SECONDS", 1.0)
    sink = RemoteSink(receiver.address, b"s", FIRST)
    assert wait([sink._connection], 2.0) == [], "the receiver has closed it"
    sink.write(bytes_region(0, 4), np.ones(4, np.uint8))
    sink.finish()


def test_a_sender_that_dies_ends_its_own_connection_alone(receiver):
    dying, living = (RemoteSink(receiver.address, b"s", FIRST) for _ in range(2))
    dying.write(bytes_region(0, 4), np.ones(4, np.uint8))
    dying.close()
    living.write(bytes_region(4, 4), np.ones(4, np.uint8))
    living.finish()


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\4\0\0\0null", b"\2\0\0\0{}"])
def test_strangers_do_no_harm(receiver, tmp_path, data):
    with socket.create_connection(receiver.address.split(":")) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    assert os.listdir(tmp_path) == []
    RemoteSink(receiver.address, b"s", FIRST).finish()


def test_without_a_secret_only_this_machine_is_served(tmp_path):
    with pytest.raises(ValidationError, match=rf"needs a secret. Remedy \(FC951\): set {SECRET}"):
        Receiver("0.0.0.0", 0, b"", str(tmp_path))
    Receiver("127.0.0.1", 0, b"", str(tmp_path))._server.server_close()


def test_nobody_there_is_an_error_that_says_what_to_start():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CheckpointError, match=rf"{address}: .*start `flexckpt receive` on the engine's machine"):
        RemoteSink(address, b"s", FIRST)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "paddle_flexckpt", "receive", "--port", "0", "--directory", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, SECRET: "s"})
    try:
        line = process.stderr.readline()
        assert line.endswith(f"for {tmp_path}\n"), line
        sink = RemoteSink(line.split()[2], b"s", FIRST)
        sink.write(bytes_region(0, 4), np.ones(4, np.uint8))
        sink.finish()
        assert (tmp_path / "flexckpt-c-aa.safetensors").read_bytes()[:5] == b"\1\1\1\1\0"
    finally:
        process.terminate()
        process.communicate()


def test_a_message_is_no_object(receiver):
    with socket.create_connection(receiver.address.split(":")) as stranger:
        stranger.recv(16)
        text = json.dumps([1]).encode()
        stranger.sendall(len(text).to_bytes(4, "little") + text)
        assert b"a message that is no object" in stranger.recv(1 << 16)


@pytest.mark.parametrize("how", ["disconnects", "sends nonsense"])
def test_a_segment_of_which_a_sender_fails_is_removed_at_once(receiver, tmp_path, how):
    sinks = [RemoteSink(receiver.address, b"s", FIRST) for _ in range(2)]
    kept = RemoteSink(receiver.address, b"s", replace(FIRST, token="bb", kept=("aa",), leads=False))
    kept.finish()
    sinks[0].write(bytes_region(0, 64), np.zeros(64, np.uint8))
    sinks[0].finish()
    assert len(os.listdir(tmp_path)) == 2
    if how == "sends nonsense":
        sinks[1].write(bytes_region(60, 5), np.zeros(5, np.uint8))
        with pytest.raises(CheckpointError):
            sinks[1].finish()
    sinks[1].close()
    while len(os.listdir(tmp_path)) == 2:
        pass
    assert os.listdir(tmp_path) == ["flexckpt-c-bb.safetensors"]


def test_segments_are_removed_by_request(receiver, tmp_path):
    for token, kept in (("aa", ()), ("bb", ("aa",))):
        RemoteSink(receiver.address, b"s", replace(FIRST, token=token, kept=kept)).finish()
    assert len(os.listdir(tmp_path)) == 2
    RemoteSink(receiver.address, b"s", replace(FIRST, token="", kept=("aa",), nbytes=0)).close()
    assert os.listdir(tmp_path) == ["flexckpt-c-aa.safetensors"]
