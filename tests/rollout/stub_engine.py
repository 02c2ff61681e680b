"""A server that answers as vLLM's routes do, for so many ranks, each an ``EngineWorker`` with a model of numpy arrays.

A completion's text has a word for the prompt and one for each token: the digest of the weights with which it was
computed. Prompts are cached as a prefix cache does, so a stale cache shows. Unlike the engine it refuses a commit and a
roll-back while it is not paused. Tested in tests/rollout/test_stub_engine.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import xxhash

from paddle_flexckpt.rollout.engine_worker import EngineWorker, answer
from tests.rollout.numpy_engine import Arrays, NumpyEngine, workers

_METHODS = {
    f"flex_{name}" for name in ("status", "begin", "stage", "commit", "rollback", "accept", "discard", "digests")
}


class Dropped(Exception):
    """The connection is to be closed without an answer."""


class StubEngine:
    """An engine with its server.

    Attributes:
        engines: The model of each rank, where faults of loads are put.
        url: The server's address.
        calls: The routes that were called, in order; for ``/collective_rpc`` the method.
        faults: For a call, as in ``calls``, what happens at the next ones: ``"drop before"`` and ``"drop after"`` close
            the connection, without or with the call's effect, a number is the status of an error, and a function is
            called first.
        paused: The mode of the pause, or None.
        weight_version: As ``/weight_info`` answers.
        developer: Whether it was started with ``VLLM_SERVER_DEV_MODE=1``; without, it has few routes.
        steps: The number of tokens that may still be computed, for requests that take a while; None: any number.
        served: The number of tokens that were computed.
    """

    def __init__(self, directory: str, arrays: Arrays, ranks: int = 1) -> None:
        self._directory, self._arrays, self._ranks = directory, arrays, ranks
        self.calls: list[str] = []
        self.faults: dict[str, list[str | int | Callable[[], None]]] = defaultdict(list)
        self.developer = True
        self.steps: int | None = None
        self._changed = threading.Condition()
        self.restart()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def restart(self) -> None:
        """Begin anew, with the weights of the directory."""
        self.engines: list[NumpyEngine]
        self.workers: list[EngineWorker]
        self.engines, self.workers = workers(self._directory, self._arrays, self._ranks)
        self.paused: str | None = None
        self.weight_version = "default"
        self.served = self._running = 0
        self._aborted = 0
        self._prompts: dict[tuple[int, ...], str] = {}

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def digest(self) -> str:
        """What a token is now: the weights of all ranks."""
        return xxhash.xxh3_64_hexdigest("".join(engine.digest() for engine in self.engines).encode())

    def holds(self, arrays: Arrays) -> bool:
        """Whether all ranks serve exactly these weights."""
        return all(engine.holds(arrays) for engine in self.engines)

    def allow(self, tokens: int) -> None:
        """Let so many more tokens be computed."""
        with self._changed:
            self.steps = (self.steps or 0) + tokens
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds, which changes with a pause, a token or a request."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=60)

    def handle(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Answer a call."""
        call = body.get("method", "") if path == "/collective_rpc" and isinstance(body, dict) else path
        self.calls.append(call)
        fault = self.faults[call].pop(0) if self.faults[call] else None
        if callable(fault):
            fault()
        if fault == "drop before":
            raise Dropped
        if isinstance(fault, int):
            return _error(fault, "injected fault")
        route = f"_{method.lower()}_{path.strip('/').replace('/', '_')}"
        always = path in ("/health", "/v1/completions", "/v1/models")
        if not hasattr(self, route) or not (always or self.developer):
            return 404, {"detail": "Not Found"}
        result = getattr(self, route)(query, body)
        if fault == "drop after":
            raise Dropped
        return result

    def _get_health(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, None

    def _get_v1_models(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": "m", "object": "model", "root": self._directory}]}

    def _get_get_world_size(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"world_size": self._ranks}

    def _post_pause(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return 422, {"detail": [{"msg": "Input should be 'abort', 'wait' or 'keep'"}]}
        with self._changed:
            self.paused = mode
            self._aborted += self._running if mode == "abort" else 0
            self._changed.notify_all()
            if mode != "keep":
                self._changed.wait_for(lambda: not self._running)
                self._prompts.clear()
        return 200, {"status": "paused"}

    def _post_resume(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        with self._changed:
            self.paused = None
            self._changed.notify_all()
        return 200, {"status": "resumed"}

    def _get_is_paused(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"is_paused": self.paused is not None}

    def _post_reset_prefix_cache(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        with self._changed:
            # Blocks of requests under way are in use, unless these are computed anew.
            free = not self._running or query.get("reset_running_requests") == "true"
            if free:
                self._prompts.clear()
        return 200, {"success": free}

    def _post_update_weight_version(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": self.weight_version}

    def _get_weight_info(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.weight_version}

    def _post_collective_rpc(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if body.get("method") not in _METHODS:
            return _error(500, f"Call to collective_rpc method failed: no attribute {body.get('method')!r}")
        name = body["method"].removeprefix("flex_")
        with self._changed:
            is_owner = body.get("kwargs", {}).get("owner", "") == self.workers[0].status()["owner"]
            if name in ("commit", "rollback") and self.paused is None and is_owner:
                return _error(500, f"{name} of an engine that is not paused")
            results = [
                answer(rank, getattr(worker, name), body.get("args", []), body.get("kwargs", {}))
                for rank, worker in enumerate(self.workers)
            ]
        return 200, {"results": results}

    def _post_v1_completions(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        with self._changed:
            self._running += 1
            self._changed.notify_all()
            aborted = self._aborted
        try:
            words = [self._prompt(tuple(body["prompt"]), aborted)]
            for _ in range(body.get("max_tokens", 1)):
                words.append(self._token(aborted))
            reason = "length"
        except InterruptedError:
            words, reason = [], "abort"
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        return 200, {"choices": [{"text": " ".join(words), "finish_reason": reason}], "model": "m"}

    def _prompt(self, prompt: tuple[int, ...], aborted: int) -> str:
        with self._changed:
            self._await_turn(aborted, lambda: True)
            return self._prompts.setdefault(prompt, self.digest())

    def _token(self, aborted: int) -> str:
        with self._changed:
            self._await_turn(aborted, lambda: self.steps != 0)
            self.steps = None if self.steps is None else self.steps - 1
            self.served += 1
            self._changed.notify_all()
            return self.digest()

    def _await_turn(self, aborted: int, may_run: Callable[[], bool]) -> None:
        """Wait until the engine takes a step for a request: not while it is paused."""
        self._changed.wait_for(lambda: self._aborted != aborted or (self.paused in (None, "wait") and may_run()))
        if self._aborted != aborted:
            raise InterruptedError

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

            def _answer(self) -> None:
                parts = urlsplit(self.path)
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                try:
                    status, content = stub.handle(self.command, parts.path, query, json.loads(data or b"null"))
                except Dropped:
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return
                except Exception as error:
                    status, content = _error(500, f"{type(error).__name__}: {error}")
                text = b"" if content is None else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = _answer

        return Handler


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}}
