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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from paddle_flexckpt.catalog import CheckpointError, EngineError, EngineLostError
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.rollout import engine_client
from paddle_flexckpt.rollout.engine_client import EngineClient, OvertakenError, failures, lost, refuse

Result = TypeVar("Result")
# How the engine calls the weights that it was started with.
BASE_LABEL = "default"
# The most attempts to have a version accepted, which is being served.
ACCEPTS = 3
# How long a switch waits for another one that lives.
PATIENCE_SECONDS = 600.0
# How often a switch that awaits some engines looks whether the others hear of it.
KEEP_SECONDS = engine_client.SILENCE_SECONDS / 4


def switch(engines: Sequence[EngineClient], version: str, path: str, digest: str = "") -> dict[str, Any]:
    """Have engines serve the weights of a segment, of this path and digest: on all their ranks, or on none.

    They stage while they serve. Then they are paused, and go on with the new version or with the one before. The switch
    owns them meanwhile. It waits for another that is at work, and takes over from one that is silent.

    Returns:
        ``released``: whether the segment of the version before may be written again; ``seconds`` by phase, of which
        engines were paused in ``pause``.

    Raises:
        EngineError: The engines serve the version they had.
        EngineLostError: One has to be started again; it is paused.
        OvertakenError: Another switch owns one of them now, and has it serve one version.
    """
    try:
        # All switches have one order, or each of two would wait for the other.
        ordered = sorted(engines, key=lambda engine: engine.url)
        for number, engine in enumerate(ordered):
            _each([engine], _own, ordered[:number])
        return _switch(engines, version, path, digest)
    except OvertakenError:
        with contextlib.suppress(CheckpointError):
            _each(engines, _step_back)
        raise
    finally:
        with contextlib.suppress(CheckpointError):
            _each(engines, EngineClient.release)


def _each(
    engines: Sequence[EngineClient], step: Callable[[EngineClient], Result], owned: Sequence[EngineClient] = ()
) -> list[Result]:
    """Do a step on all engines at once; raise the worst of their errors when all have ended.

    While some are awaited, the others that are owned, here and in ``owned``, do not fall silent.
    """
    with ThreadPoolExecutor(len(engines)) as pool:
        steps = {pool.submit(step, engine): engine for engine in engines}
        while wait(steps, KEEP_SECONDS).not_done:
            ended = [*owned, *(engine for each, engine in steps.items() if each.done() and not each.exception())]
            if ended:
                with contextlib.suppress(CheckpointError):  # the engine's next step meets it again
                    _each(ended, EngineClient.keep)
    errors = [error for error in (each.exception() for each in steps) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, (OvertakenError, EngineLostError)), reverse=True):
        raise error
    return [each.result() for each in steps]


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


def _step_back(engine: EngineClient) -> None:
    """Leave an engine to the switch that has overtaken this one on an engine; if it has ended, undo what came late."""
    try:
        engine.begin(engine.owner, engine.owner)
    except OvertakenError:
        engine.begin(_name(), "")
    _undo_halves(engine)
    _set_label(engine)


def _switch(engines: Sequence[EngineClient], version: str, path: str, digest: str) -> dict[str, Any]:
    begin, key = time.perf_counter(), key_of(version, path)
    _each(engines, _undo_halves)
    try:
        _each(engines, lambda engine: _stage(engine, version, path, digest))
    except EngineError:
        with contextlib.suppress(EngineError):
            _each(engines, lambda engine: engine.workers("flex_discard"))
        raise
    paused = time.perf_counter()
    try:
        _each(engines, EngineClient.pause)
    except EngineError:
        with contextlib.suppress(EngineError):
            _each(engines, EngineClient.resume)
        raise
    try:
        _each(engines, lambda engine: _commit(engine, version, key))
    except (EngineError, EngineLostError) as error:
        cause = error
        _each(engines, lambda engine: _roll_back(engine, cause))
        raise
    # The version is served from here on.
    released = all(_each(engines, lambda engine: _accept(engine, key)))
    try:
        _each(engines, EngineClient.resume)
    except EngineError as error:
        raise EngineError(
            f"all ranks have loaded version {version}, and an engine is still paused: {without_remedy(error)}. "
            "Remedy (FC952): push again, which resumes it"
        ) from error
    seconds = {"stage": paused - begin, "pause": time.perf_counter() - paused}
    return {"released": released, "seconds": seconds}


def _stage(engine: EngineClient, version: str, path: str, digest: str) -> None:
    staged = engine.workers("flex_stage", key_of(version, path), path, digest)
    remedy = "see the engine's log, and push again"
    if "does not fit" in failures(staged):
        remedy = "give names, shapes and dtypes of the engine's checkpoint by statements (aoa_config=), and push again"
    refuse(engine.url, f"version {version} was not staged", staged, remedy)


def _commit(engine: EngineClient, version: str, key: str) -> None:
    refuse(engine.url, f"version {version} was not loaded", engine.workers("flex_commit", key))
    engine.set_version(version)


def _accept(engine: EngineClient, key: str) -> bool:
    """Have a version accepted; return whether the memory of the one before is free: no rank that is silent frees it."""
    for attempt in range(ACCEPTS):
        with contextlib.suppress(EngineError):
            answers = engine.workers("flex_accept", key)
            # A second answer does not say what the first one, which was lost, would have said.
            return attempt == 0 and all(each["ok"] and each.get("released") is True for each in answers)
    return False


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


def _roll_back(engine: EngineClient, error: CheckpointError) -> None:
    """Have all ranks serve the version accepted last; raise EngineLostError if one cannot. The engine is paused."""
    try:
        refuse(engine.url, "flex_rollback", engine.workers("flex_rollback"))
        _set_label(engine)
        engine.resume()
    except EngineError as second:
        text = f"{without_remedy(error)}; and it could not be undone: {without_remedy(second)}"
        raise lost(engine.url, text) from error


def _set_label(engine: EngineClient) -> None:
    """Set the engine's label to the trainer's name for the version that all its ranks have."""
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

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        """Start it, in a session of its own, which signals for this job do not reach."""
        self._urls, self._timeout = list(urls), timeout
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(list(map(str, sys.path)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def begin(self, version: str, path: str, digest: str = "") -> None:
        """Send the request."""
        pipe = self._process.stdin
        if pipe is not None:
            # A line: the end of the pipe would not arrive while a process that was forked meanwhile holds it too.
            with contextlib.suppress(BrokenPipeError):  # the result says that the process has died
                request = {"urls": self._urls, "timeout": self._timeout, "switch": [version, path, digest]}
                pipe.write(json.dumps(request).encode() + b"\n")
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
                f"{', '.join(self._urls)}: the process that switches the engine was killed. Remedy (FC952): push "
                "again; the push undoes what is half done"
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
        engines = [EngineClient(url, asked["timeout"]) for url in asked["urls"]]
        outcome = switch(engines, *asked["switch"])
    except CheckpointError as error:
        outcome = {"error": str(error), "lost": isinstance(error, EngineLostError)}
    sys.stdout.write(json.dumps(outcome) + "\n")
