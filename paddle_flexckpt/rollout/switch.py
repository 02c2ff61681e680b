"""The switch of an engine to a staged version, in a process of its own.

Nothing may stop a switch halfway: if the trainer is killed meanwhile, this process finishes or undoes it. The trainer
starts it early, and sends the request when the segment is written; if it sends none, the process ends.

Tested in tests/rollout/test_switch.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from typing import Any

from paddle_flexckpt.catalog import CheckpointError, EngineError, EngineLostError
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.rollout import engine_client
from paddle_flexckpt.rollout.engine_client import EngineClient, OvertakenError, failures, lost, refuse

# How the engine calls the weights that it was started with.
BASE_LABEL = "default"
# The most attempts to have a version accepted, which is being served.
ACCEPTS = 3
# How long a switch waits for another one that lives.
PATIENCE_SECONDS = 600.0


def switch(engine: EngineClient, version: str, path: str) -> dict[str, Any]:
    """Have an engine serve the weights of a segment: on all its ranks, or on none.

    It stages while it serves. Then it is paused, and goes on with the new version or with the one before. The switch
    owns the engine meanwhile. It waits for another that is at work, and takes over from one that is silent.

    Args:
        engine: The engine.
        version: The version's name.
        path: The segment's path there.

    Returns:
        ``released``: whether the segment of the version before may be written again; ``seconds`` by phase, of which
        the engine was paused in ``pause``.

    Raises:
        EngineError: The engine serves the version it had.
        EngineLostError: It has to be started again; it is paused.
        OvertakenError: Another switch owns it now, and has it serve one version.
    """
    try:
        _own(engine)
        return _switch(engine, version, path)
    except OvertakenError:
        # A call of this switch may have arrived after the other one's end.
        with contextlib.suppress(CheckpointError):
            engine.begin(_name(), "")
            _undo_halves(engine)
            _set_label(engine)
        raise
    finally:
        with contextlib.suppress(CheckpointError):
            engine.begin("", engine.owner)


def _name() -> str:
    return f"{socket.gethostname()} (process {os.getpid()}, {secrets.token_hex(4)})"


def _own(engine: EngineClient) -> None:
    """Own the engine; wait while another switch does, as long as that one calls its workers."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        states = engine.status()
        before, silent = str(states[0].get("owner")), min(float(each.get("silent", 0)) for each in states)
        if not before or silent >= engine_client.SILENCE_SECONDS:
            with contextlib.suppress(OvertakenError):  # yet another one was faster
                return engine.begin(_name(), before)
        elif time.monotonic() >= end:
            raise EngineError(
                f"{engine.url}: {before} has been switching it for {PATIENCE_SECONDS:.0f} s. All ranks have one "
                "version. Remedy (FC952): wait until that push has ended, or end its process, and push again"
            )
        time.sleep(0.1)


def _switch(engine: EngineClient, version: str, path: str) -> dict[str, Any]:
    begin, released, key = time.perf_counter(), False, key_of(version, path)
    _undo_halves(engine)
    staged = engine.workers("flex_stage", key, path)
    if failures(staged):
        with contextlib.suppress(EngineError):
            engine.workers("flex_discard")
    remedy = "see the engine's log, and push again"
    if "does not fit" in failures(staged):
        remedy = "give names, shapes and dtypes of the engine's checkpoint by statements (aoa_config=), and push again"
    refuse(engine.url, f"version {version} was not staged", staged, remedy)
    paused = time.perf_counter()
    try:
        engine.pause()
        try:
            refuse(engine.url, f"version {version} was not loaded", engine.workers("flex_commit", key))
            engine.set_version(version)
        except EngineError as error:
            _roll_back(engine, error)
            raise
    except (EngineLostError, OvertakenError):
        raise
    except BaseException:
        with contextlib.suppress(EngineError):
            engine.resume()
        raise
    # The version is served from here on; ranks that do not answer keep the memory of the one before.
    for attempt in range(ACCEPTS):
        with contextlib.suppress(EngineError):
            answers = engine.workers("flex_accept", key)
            # A second answer does not say what the first one, which was lost, would have said.
            released = attempt == 0 and all(each["ok"] and each.get("released") is True for each in answers)
            break
    try:
        engine.resume()
    except EngineError as error:
        raise EngineError(
            f"{engine.url}: all ranks have loaded version {version}, and the engine is still paused: "
            f"{without_remedy(error)}. Remedy (FC952): push again, which resumes it"
        ) from error
    seconds = {"stage": paused - begin, "pause": time.perf_counter() - paused}
    return {"released": released, "seconds": seconds}


def key_of(version: str, path: str) -> str:
    """Return the name of a version among workers: pushes of one version's name are of several segments."""
    return f"{version}@{os.path.basename(path)}"


def _undo_halves(engine: EngineClient) -> None:
    """Finish or undo what a dead switch has left: a version on some ranks, or one that was not accepted, or a pause."""
    states = engine.status()
    versions = {str(each.get("version")) for each in states}
    accepted = {str(each.get("accepted")) for each in states}
    if versions != accepted or len(versions) > 1:
        # Some ranks have accepted it already, or the engine serves it: then its cache is of this version, too.
        is_served = len(versions) == 1 and (versions < accepted or not engine.is_paused())
        engine.pause()
        if is_served:
            engine.workers("flex_accept", *versions)
            _check_agreed(engine)
        else:
            _roll_back(engine, EngineError("an earlier switch was cut off"))
    if engine.is_paused():
        engine.resume()


def _roll_back(engine: EngineClient, error: EngineError) -> None:
    """Have all ranks return to the version accepted last; raise EngineLostError if one cannot."""
    try:
        refuse(engine.url, "flex_rollback", engine.workers("flex_rollback"))
        _set_label(engine)
    except EngineError as second:
        text = f"{without_remedy(error)}; and it could not be undone: {without_remedy(second)}"
        raise lost(engine.url, text) from error


def _set_label(engine: EngineClient) -> None:
    """Tell the engine the version that all its ranks have, by the name that its trainer gave it."""
    name, _, segment = _check_agreed(engine).partition("@")
    engine.set_version(name if segment else BASE_LABEL)


def _check_agreed(engine: EngineClient) -> str:
    """Return the one version that all ranks hold and have accepted; raise EngineLostError if they differ."""
    held = {str(each.get(name)) for each in engine.status() for name in ("version", "accepted")}
    if len(held) > 1:
        raise lost(engine.url, "its ranks have different versions")
    return held.pop()


# Signals to the job's process group do not stop it; it is not started by -m, as the job may have changed its path.
_BOOT = """
import json, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[1])
from paddle_flexckpt.rollout.switch import main
main()
"""


class SwitchProcess:
    """A process that waits for a request to switch, and carries it out."""

    def __init__(self, url: str, timeout: float) -> None:
        """Start it, in a session of its own, which signals for this job do not reach."""
        self._request = {"url": url, "timeout": timeout}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(list(map(str, sys.path)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def begin(self, version: str, path: str) -> None:
        """Send the request."""
        pipe = self._process.stdin
        if pipe is not None:
            # A line: the end of the pipe would not arrive while a process that was forked meanwhile holds it too.
            with contextlib.suppress(BrokenPipeError):  # the result says that the process has died
                pipe.write(json.dumps({**self._request, "version": version, "path": path}).encode() + b"\n")
                pipe.close()

    def is_done(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Wait for the end, and return what :func:`switch` has returned; raises what it has raised."""
        text = b"" if self._process.stdout is None else self._process.stdout.readline()
        self._process.wait()
        try:
            outcome = json.loads(text)
        except ValueError as error:
            raise EngineError(
                f"{self._request['url']}: the process that switches the engine was killed. Remedy (FC952): push again; "
                "the push undoes what is half done"
            ) from error
        if "error" in outcome:
            raise (EngineLostError if outcome["lost"] else EngineError)(outcome["error"])
        return dict(outcome)

    def stop(self) -> None:
        """End the process, if it has no request."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> None:
    """Read a request, carry it out, and print the outcome."""
    text = sys.stdin.readline()
    if not text:
        return
    asked = json.loads(text)
    try:
        outcome = switch(EngineClient(asked["url"], asked["timeout"]), asked["version"], asked["path"])
    except CheckpointError as error:
        outcome = {"error": str(error), "lost": isinstance(error, EngineLostError)}
    sys.stdout.write(json.dumps(outcome) + "\n")
