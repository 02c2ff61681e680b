"""A receiver on the engine's machine, and what senders and strangers do to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import wait

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.rollout import receiver as module
from paddle_flexckpt.rollout.authenticated import SECRET, AuthenticatedConnection, find_secret
from paddle_flexckpt.rollout.receiver import Receiver, RemoteSink
from paddle_flexckpt.rollout.segment import (
    Region,
    SegmentNames,
    bytes_region,
    digest_of,
    find_segments,
    place_of_directory,
)

FIRST = SegmentNames("c", "aa", "", (), 64, True)
KEY = b"sixteen letters."


@pytest.fixture
def receiver(tmp_path):
    server = Receiver("127.0.0.1", 0, KEY, str(tmp_path))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.close()
    thread.join()


def test_several_senders_write_one_segment(receiver, tmp_path):
    sinks = [RemoteSink(receiver.address, KEY, FIRST) for _ in range(2)]
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
        sink = RemoteSink(receiver.address, KEY, replace(FIRST, token=token, recycled=recycled, kept=kept))
        sink.write(bytes_region(0, 1), np.frombuffer(token[:1].encode(), np.uint8))
        sink.finish()
    assert sorted(os.listdir(tmp_path)) == ["flexckpt-c-bb.safetensors", "flexckpt-c-cc.safetensors"]
    assert (tmp_path / "flexckpt-c-cc.safetensors").read_bytes()[:1] == b"c"


@pytest.mark.parametrize(
    ("change", "secret", "text"),
    [
        ({}, b"another of sixteen", "the secrets differ"),
        ({"channel": "../c"}, KEY, "names that no sender gives"),
        ({"token": "a/b"}, KEY, "names that no sender gives"),
        ({"nbytes": 1 << 50}, KEY, r"bytes of shared memory are needed.*FC402"),
        ({"recycled": "dd"}, KEY, r"started again since the last push.*FC951"),
    ],
)
def test_a_refusal_says_why(receiver, tmp_path, change, secret, text):
    with pytest.raises(CheckpointError, match=rf"the receiver at {receiver.address}: .*{text}") as caught:
        RemoteSink(receiver.address, secret, replace(FIRST, **change))
    assert str(caught.value).count("Remedy (") == 1
    assert os.listdir(tmp_path) == []


def test_what_leaves_the_segment_is_refused(receiver):
    for region, size in ((bytes_region(60, 5), 5), (Region(0, (3,), (40,), 1), 3)):
        sink = RemoteSink(receiver.address, KEY, FIRST)
        sink.write(region, np.zeros(size, np.uint8))
        with pytest.raises(CheckpointError, match="the receiver at"):
            sink.finish()


class Relay:
    """Passes on what both sides say, with one byte of one of them changed, or all of it kept."""

    def __init__(self, address: str, side: str = "", at: int = -1) -> None:
        self.side, self.at, self.said = side, at, {"sender": b"", "receiver": b""}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._run, args=(address,))]
        self._threads[0].start()

    def _run(self, address: str) -> None:
        sender, receiver = self._listener.accept()[0], socket.create_connection(address.split(":"))
        back = threading.Thread(target=self._pass, args=(receiver, sender, "receiver"))
        back.start()
        self._pass(sender, receiver, "sender")
        back.join()
        for each in (sender, receiver, self._listener):
            each.close()

    def _pass(self, source: socket.socket, target: socket.socket, side: str) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                before = len(self.said[side])
                self.said[side] += data
                if side == self.side and before <= self.at < before + len(data):
                    data[self.at - before] ^= 1
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        self._threads[0].join()


def push(address: str, secret: bytes = KEY) -> str:
    sink = RemoteSink(address, secret, FIRST)
    with contextlib.closing(sink):
        sink.write(bytes_region(0, 64), np.arange(64, dtype=np.uint8))
        sink.finish()
        return sink.seal()


@pytest.fixture
def said(receiver, tmp_path):
    """What both sides say in a push."""
    relay = Relay(receiver.address)
    digest = push(relay.address)
    relay.join()
    path = tmp_path / "flexckpt-c-aa.safetensors"
    assert digest == digest_of(np.fromfile(path, np.uint8))
    path.unlink()
    return relay.said


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_change_of_any_byte_is_an_error(receiver, tmp_path, said, side):
    """In greetings, proofs, names, regions, data, answers and the digest."""
    for at in range(0, len(said[side]), 19):
        relay = Relay(receiver.address, side, at)
        with pytest.raises(CheckpointError, match="the receiver at"):
            push(relay.address)
        relay.join()
        for path in tmp_path.iterdir():  # finished, as the receiver has got all, and the answer was changed
            assert side == "receiver"
            path.unlink()


def test_what_was_said_before_proves_nothing(receiver, tmp_path, said):
    with socket.create_connection(receiver.address.split(":")) as stranger:
        stranger.sendall(said["sender"])
        stranger.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: stranger.recv(1 << 16), b""))
    assert answer.endswith(b'{"error": "the secrets differ"}')
    assert os.listdir(tmp_path) == []
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        heard = []

        def answer_again():
            connection = impostor.accept()[0]
            with connection, contextlib.suppress(ConnectionResetError):
                connection.sendall(said["receiver"])
                while data := connection.recv(1 << 16):
                    heard.append(data)

        thread = threading.Thread(target=answer_again)
        thread.start()
        with pytest.raises(CheckpointError, match="the secrets differ"):
            push(f"127.0.0.1:{impostor.getsockname()[1]}")
        thread.join()
    assert len(b"".join(heard)) == 48, "a nonce and a proof, and no weights"


def test_the_other_protocol_is_named(receiver):
    with socket.create_connection(receiver.address.split(":")) as old:
        text = json.dumps({"protocol": 1, "answer": "0" * 64, "channel": "c", "token": "aa"}).encode()
        old.sendall(len(text).to_bytes(4, "little") + text)
        old.recv(16, socket.MSG_WAITALL)
        length = int.from_bytes(old.recv(4, socket.MSG_WAITALL), "little")
        assert json.loads(old.recv(length, socket.MSG_WAITALL)) == {"error": "another version of the library sends"}
    with socket.create_server(("127.0.0.1", 0)) as old:
        threading.Thread(target=lambda: old.accept()[0].sendall(b"0" * 16)).start()
        with pytest.raises(CheckpointError, match="another version of the library receives"):
            push(f"127.0.0.1:{old.getsockname()[1]}")


@pytest.mark.parametrize(
    ("region", "size"),
    [
        (bytes_region((1 << 63) - 4, 4), 4),
        (bytes_region(1 << 63, 4), 4),
        (bytes_region((1 << 64) - 4, 4), 4),
        (Region(0, (5,), (1 << 62,), 1), 5),
        (Region(0, (3, 3), (1 << 62, 1 << 62), 1), 9),
    ],
)
def test_a_region_far_away_is_refused_and_nothing_left(receiver, tmp_path, region, size):
    sink = RemoteSink(receiver.address, KEY, FIRST)
    sink.write(region, np.zeros(size, np.uint8))
    with pytest.raises(CheckpointError, match="the receiver at .*a region of"):
        sink.finish()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"[1]", b"{}", b'{"kept": 3}'])
def test_whatever_a_sender_says_nothing_is_left(receiver, tmp_path, text):
    with socket.create_connection(receiver.address.split(":")) as connection:
        peer = AuthenticatedConnection(connection, KEY, False, 60.0)
        peer.send(len(text).to_bytes(4, "little"))
        peer.send(text)
        with pytest.raises(ValueError, match="."):
            peer.read_object()
    assert os.listdir(tmp_path) == []
    push(receiver.address)


def test_a_finished_segment_is_not_opened_again(receiver, tmp_path):
    """Not by the receiver, and not by one that was started since; and an error does not remove it."""
    push(receiver.address)
    again = Receiver("127.0.0.1", 0, KEY, str(tmp_path))
    thread = threading.Thread(target=again.run)
    thread.start()
    for each in (receiver, again):
        with pytest.raises(CheckpointError, match="segment aa is finished"):
            RemoteSink(each.address, KEY, FIRST)
    again.close()
    thread.join()
    assert (tmp_path / "flexckpt-c-aa.safetensors").read_bytes() == bytes(range(64))
    for segment in find_segments(str(tmp_path)):
        assert segment.held


def test_strangers_that_say_nothing_keep_nobody_out(receiver, monkeypatch):
    monkeypatch.setattr(receiver, "_room", threading.Semaphore(4))
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.3)
    threads, most = threading.active_count(), 0
    with contextlib.ExitStack() as strangers:
        all_strangers = [
            strangers.enter_context(socket.create_connection(receiver.address.split(":"))) for _ in "." * 12
        ]
        while wait(all_strangers[-1:], 0.01) == []:  # it is greeted when others have left
            most = max(most, threading.active_count() - threads)
        push(receiver.address)
    assert 3 < most <= 8


def test_a_stranger_that_speaks_slowly_is_cut_off(receiver, monkeypatch):
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.3)
    with socket.create_connection(receiver.address.split(":")) as stranger:
        stranger.recv(16, socket.MSG_WAITALL)
        sent = 0
        while not wait([stranger], 0.05):
            stranger.sendall(b"F")
            sent += 1
    assert sent < 48


def test_a_sender_that_waits_for_others_is_not_cut_off(receiver, monkeypatch):
    # A busy machine may need a part of a second for the greeting itself.
    monkeypatch.setattr(module, "GREETING_SECONDS", 1.0)
    sink = RemoteSink(receiver.address, KEY, FIRST)
    assert wait([sink._socket], 2.0) == [], "the receiver has closed it"
    sink.write(bytes_region(0, 4), np.ones(4, np.uint8))
    sink.finish()


def test_a_sender_that_dies_ends_its_own_connection_alone(receiver):
    dying, living = (RemoteSink(receiver.address, KEY, FIRST) for _ in range(2))
    dying.write(bytes_region(0, 4), np.ones(4, np.uint8))
    dying.close()
    living.write(bytes_region(4, 4), np.ones(4, np.uint8))
    living.finish()


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\4\0\0\0null", b"[" * 100_000])
def test_strangers_do_no_harm(receiver, tmp_path, data):
    with socket.create_connection(receiver.address.split(":")) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    assert os.listdir(tmp_path) == []
    RemoteSink(receiver.address, KEY, FIRST).finish()


def test_a_secret_is_made_for_one_user_of_one_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        with pytest.raises(ValidationError, match=rf"needs a secret of .*16 bytes.* Remedy \(FC951\): set {SECRET}"):
            find_secret(address)
    assert os.listdir(tmp_path) == []
    made = find_secret("127.0.0.1:1", makes=True)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(made) == 64
    assert find_secret("[::1]:7") == find_secret("::1:7", makes=True) == made
    with pytest.raises(ValidationError, match="needs a secret"):
        find_secret("10.0.0.7:1", makes=True)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ValidationError, match="bytes; ~/.flexckpt_receive_secret cannot be used. Remedy"):
        find_secret("127.0.0.1:1", makes=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    path.chmod(0o640)
    with pytest.raises(ValidationError, match="needs a secret"):
        find_secret("127.0.0.1:1", makes=True)
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(ValidationError, match="needs a secret"):
        find_secret("127.0.0.1:1", makes=True)


def test_short_secrets_are_refused(monkeypatch):
    monkeypatch.setenv(SECRET, "fifteen letters")
    with pytest.raises(ValidationError, match="needs a secret of at least 16 bytes"):
        find_secret("127.0.0.1:1", makes=True)


def test_nobody_there_is_an_error_that_says_what_to_start():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CheckpointError, match=rf"{address}: .*start `flexckpt receive` on the engine's machine"):
        RemoteSink(address, KEY, FIRST)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "paddle_flexckpt", "receive", "--port", "0", "--directory", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, SECRET: KEY.decode()})
    try:
        line = process.stderr.readline()
        assert line.endswith(f"for {tmp_path}\n"), line
        sink = RemoteSink(line.split()[2], KEY, FIRST)
        sink.write(bytes_region(0, 4), np.ones(4, np.uint8))
        sink.finish()
        assert (tmp_path / "flexckpt-c-aa.safetensors").read_bytes()[:5] == b"\1\1\1\1\0"
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("how", ["disconnects", "sends nonsense"])
def test_a_segment_of_which_a_sender_fails_is_removed_at_once(receiver, tmp_path, how):
    sinks = [RemoteSink(receiver.address, KEY, FIRST) for _ in range(2)]
    kept = RemoteSink(receiver.address, KEY, replace(FIRST, token="bb", kept=("aa",), leads=False))
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
        RemoteSink(receiver.address, KEY, replace(FIRST, token=token, kept=kept)).finish()
    assert len(os.listdir(tmp_path)) == 2
    RemoteSink(receiver.address, KEY, replace(FIRST, token="", kept=("aa",), nbytes=0)).close()
    assert os.listdir(tmp_path) == ["flexckpt-c-aa.safetensors"]
