"""Calls to an engine's routes, and a push by the protocol, for tests of the engine's side."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


class RefusedError(Exception):
    """A rank of the engine refused or failed."""


def call(url: str, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    """The status and the decoded answer of a call."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            status, text = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text else None


def rpc(url: str, method: str, *arguments: str) -> list[dict[str, Any]]:
    """The answers of all ranks, whatever they are."""
    status, answer = call(url, "/collective_rpc", {"method": method, "args": list(arguments)})
    assert status == 200, answer
    return answer["results"]


def well(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, if all ranks are well."""
    bad = [f"rank {each['rank']}: {each['error']}" for each in results if not each["ok"]]
    if bad:
        raise RefusedError("; ".join(bad))
    return results


def push(url: str, version: str, path: str) -> list[dict[str, Any]]:
    """Give the engine a version, with the roll-back on all ranks; return the answers of accept."""
    well(rpc(url, "flex_stage", version, path))
    return switch(url, version)


def switch(url: str, version: str) -> list[dict[str, Any]]:
    """Have the engine serve a version that is staged; return the answers of accept."""
    assert call(url, "/pause?mode=keep")[0] == 200
    try:
        try:
            well(rpc(url, "flex_commit", version))
        except RefusedError:
            well(rpc(url, "flex_rollback"))
            raise
        accepted = well(rpc(url, "flex_accept", version))
        assert call(url, "/reset_prefix_cache?reset_running_requests=true")[1] == {"success": True}
        assert call(url, "/update_weight_version", {"new_version": version})[0] == 200
        return accepted
    finally:
        call(url, "/resume")
