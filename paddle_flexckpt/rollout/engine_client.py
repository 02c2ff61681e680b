"""The HTTP interface of a serving engine: calls of its workers, pause and resume, version.

Tested in tests/rollout/test_engine_client.py.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.catalog import CheckpointError, EngineError, EngineLostError

PROTOCOL = 3
TIMEOUT_SECONDS = 600.0
# An owner that calls nothing for so long counts as dead. One that lives asks again after half of it.
SILENCE_SECONDS = 10.0
# How long an owner that ends waits for an answer: one that is silent is overtaken anyway.
RELEASE_SECONDS = 5.0


class OvertakenError(CheckpointError):
    """An error of a switch that owns its engine no more, and may change nothing there."""


class EngineClient:
    """The routes of a vLLM server in development mode (``VLLM_SERVER_DEV_MODE=1``).

    Attributes:
        url: The server.
        owner: The name under which this client changes the engine; "" if it has none.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT_SECONDS) -> None:
        """Take the server's URL, and the seconds that a call may take. Nothing is sent yet."""
        self.url, self.owner, self._timeout, self._heard = url.rstrip("/"), "", timeout, 0.0
        self._fits = False  # the extension has our protocol
        # A proxy of the environment is for the world outside; engines are within the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def workers(self, method: str, *arguments: str, owner: str | None = None) -> list[dict[str, Any]]:
        """Call a method of the extension on all workers; return their answers, by rank.

        Raises:
            EngineError: The engine cannot be reached, or its workers have no such method, or another protocol.
            OvertakenError: Another one than ``owner`` (by default this client's) owns the engine.
            EngineLostError: The answers are those of another call.
        """
        named, owner = {"call": secrets.token_hex(8)}, self.owner if owner is None else owner
        return self._ask(method, arguments, {**named, "owner": owner} if owner else named)

    def _ask(self, method: str, arguments: Sequence[str], named: dict[str, str]) -> list[dict[str, Any]]:
        begin = time.monotonic()
        # The engine gets no timeout: after one it would give late answers to later calls.
        results = self._request(
            "POST", "/collective_rpc", {"method": method, "args": list(arguments), "kwargs": named}
        ).get("results")
        if not isinstance(results, list) or not results or not all(isinstance(each, dict) for each in results):
            raise EngineError(f"{self.url}: {method} has answered {results!r}, and not an object for each worker")
        if not all(isinstance(each.get("ok"), bool) for each in results):
            raise EngineError(f"{self.url}: {method} has answered {results!r}: that is no answer of our extension")
        if any("call" not in each for each in results):
            raise self._misfit(results)
        if any(each["call"] != named.get("call", "") for each in results):
            with contextlib.suppress(EngineError):
                self._request("POST", "/pause?mode=keep")
            raise lost(self.url, f"{method} was given the answers of another call, so the engine has lost count")
        if any(str(each.get("error")).startswith("OwnerError:") for each in results):
            raise OvertakenError(
                f"{self.url}: {method}: {failures(results)}. All ranks have one version. Remedy (FC952): let one "
                "trainer at a time push to this engine, and push again"
            )
        self._heard = begin
        return results

    def status(self, *directory: str) -> list[dict[str, Any]]:
        """Return the state of all workers; ``directory``: that of segments, for its identity.

        Raises:
            EngineError: The engine cannot be reached, or its workers have not our extension, or another version of it.
            EngineLostError: A worker demands that the engine be started again.
        """
        # The workers of protocol 1 take no named arguments: they raise, and the engine loses count.
        states = self._ask("flex_status", directory, {"call": secrets.token_hex(8)} if self._fits else {})
        refuse(self.url, "flex_status", states)
        self._fits = all(each.get("protocol") == PROTOCOL for each in states)
        if not self._fits:
            raise self._misfit(states)
        if any(each.get("data_parallel_size", 1) != 1 for each in states):
            raise EngineError(
                f"{self.url}: the server has several data-parallel engines, and passes on the answers of the first "
                "alone. Remedy (FC952): start a server for each, and give the channel all their URLs"
            )
        if any(each.get("needs_restart") for each in states):
            raise lost(self.url, "an earlier update could neither be finished nor undone")
        return states

    def _misfit(self, answers: Sequence[dict[str, Any]]) -> EngineError:
        protocols = sorted({str(each.get("protocol", 1)) for each in answers})
        return EngineError(
            f"{self.url}: the engine's extension has protocol {', '.join(protocols)}, and this library {PROTOCOL}. "
            "Remedy (FC952): install the same version of paddle_flexckpt in both environments"
        )

    def begin(self, owner: str, before: str) -> None:
        """Own the engine under a name, in place of another owner: the workers refuse that one's calls from now on.

        Raises:
            OvertakenError: Yet another one owns it.
        """
        self.owner = owner
        self.workers("flex_begin", owner, owner=before)

    def keep(self) -> None:
        """Renew the ownership, if no call has reached the workers for some time: a silent owner counts as dead."""
        if self.owner and time.monotonic() - self._heard > SILENCE_SECONDS / 2:
            self.begin(self.owner, self.owner)

    def release(self) -> None:
        """Own the engine no more. An engine that does not answer is not waited for long."""
        owner, self.owner = self.owner, ""
        if owner:
            EngineClient(self.url, min(self._timeout, RELEASE_SECONDS)).begin("", owner)

    def pause(self) -> None:
        """Have the engine stop computing; requests under way stay, and go on when it resumes."""
        self._change("/pause?mode=keep")

    def resume(self) -> None:
        """Have the engine compute again."""
        self._change("/resume")

    def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return bool(self._request("GET", "/is_paused").get("is_paused"))

    def set_version(self, version: str) -> None:
        """Drop what was computed with earlier weights, and tell the engine the version of these."""
        if self._change("/reset_prefix_cache?reset_running_requests=true").get("success") is False:
            raise EngineError(f"{self.url}: the engine did not drop its prefix cache")
        self._change("/update_weight_version", {"new_version": version})

    def _change(self, route: str, body: Any = None) -> dict[str, Any]:
        """Call a route that asks for no owner; if this client has slept, it asks first whether it still is."""
        self.keep()
        return self._request("POST", route, body)

    def _request(self, method: str, route: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + route, data, {"Content-Type": "application/json"} if data else {}, method=method
        )
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            hint = (
                ". Remedy (FC952): start the engine as docs/rollout.md says: VLLM_SERVER_DEV_MODE=1 and "
                "--worker-extension-cls"
            )
            raise EngineError(f"{self.url}{route}: {error.code} {_message(error.read())}{hint}") from error
        except (OSError, ValueError) as error:
            raise EngineError(
                f"{self.url}{route}: {error}. Remedy (FC952): see that the engine runs at this URL, and push again"
            ) from error
        try:
            value = json.loads(text) if text else {}
        except ValueError:
            value = {}
        return value if isinstance(value, dict) else {}


def _message(text: bytes) -> str:
    """Return the message of an error's body."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300].decode(errors="replace")


def failures(answers: Sequence[dict[str, Any]]) -> str:
    """Return what went wrong on which worker; "" if nothing did."""
    return "; ".join(f"engine rank {each.get('rank', '?')}: {each.get('error')}" for each in answers if not each["ok"])


def refuse(
    url: str, call: str, answers: Sequence[dict[str, Any]], remedy: str = "see the engine's log, and push again"
) -> None:
    """Raise EngineError, with a remedy, if a worker's answer is an error."""
    failed = failures(answers)
    if failed:
        raise EngineError(f"{url}: {call}: {failed}. The engine serves the version it had. Remedy (FC952): {remedy}")


def lost(url: str, text: str) -> EngineLostError:
    """Return the error of an engine whose weights are not known."""
    return EngineLostError(
        f"{url}: {text}. The engine is paused, and must not serve. Remedy (FC953): start the engine again, and push "
        "again"
    )
