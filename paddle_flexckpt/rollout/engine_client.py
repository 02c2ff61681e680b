"""The HTTP interface of a serving engine: calls of its workers, pause and resume, version.

Tested in tests/rollout/test_engine_client.py.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.catalog import EngineError, EngineLostError

PROTOCOL = 1
TIMEOUT_SECONDS = 600.0


class EngineClient:
    """The routes of a vLLM server in development mode (``VLLM_SERVER_DEV_MODE=1``)."""

    def __init__(self, url: str, timeout: float = TIMEOUT_SECONDS) -> None:
        """Take the server's URL, and the seconds that a call may take. Nothing is sent yet."""
        self.url, self._timeout = url.rstrip("/"), timeout
        # A proxy of the environment is for the world outside; engines are within the cluster.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Call a method of the extension on all workers; return their answers, by rank.

        Raises:
            EngineError: The engine cannot be reached, or its workers have no such method.
        """
        body = {"method": method, "args": list(arguments), "timeout": self._timeout}
        results = self._request("POST", "/collective_rpc", body).get("results")
        if not isinstance(results, list) or not results or not all(isinstance(each, dict) for each in results):
            raise EngineError(f"{self.url}: {method} has answered {results!r}, and not an object for each worker")
        if not all(isinstance(each.get("ok"), bool) for each in results):
            raise EngineError(f"{self.url}: {method} has answered {results!r}: that is no answer of our extension")
        return results

    def status(self, *directory: str) -> list[dict[str, Any]]:
        """Return the state of all workers; ``directory``: that of segments, for its identity.

        Raises:
            EngineError: The engine cannot be reached, or its workers have not our extension, or another version of it.
            EngineLostError: A worker demands that the engine be started again.
        """
        states = self.workers("flex_status", *directory)
        refuse(self.url, "flex_status", states)
        protocols = sorted({str(each.get("protocol")) for each in states})
        if protocols != [str(PROTOCOL)]:
            raise EngineError(
                f"{self.url}: the engine's extension has protocol {', '.join(protocols)}, and this library {PROTOCOL}. "
                "Remedy (FC952): install the same version of paddle_flexckpt in both environments"
            )
        if any(each.get("data_parallel_size", 1) != 1 for each in states):
            raise EngineError(
                f"{self.url}: the server has several data-parallel engines, and passes on the answers of the first "
                "alone. Remedy (FC952): start a server for each, with a channel of its own"
            )
        if any(each.get("needs_restart") for each in states):
            raise lost(self.url, "an earlier update could neither be finished nor undone")
        return states

    def pause(self) -> None:
        """Have the engine stop computing; requests under way stay, and go on when it resumes."""
        self._request("POST", "/pause?mode=keep")

    def resume(self) -> None:
        """Have the engine compute again."""
        self._request("POST", "/resume")

    def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return bool(self._request("GET", "/is_paused").get("is_paused"))

    def set_version(self, version: str) -> None:
        """Drop what was computed with earlier weights, and tell the engine the version of these."""
        if self._request("POST", "/reset_prefix_cache?reset_running_requests=true").get("success") is False:
            raise EngineError(f"{self.url}: the engine did not drop its prefix cache")
        self._request("POST", "/update_weight_version", {"new_version": version})

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
