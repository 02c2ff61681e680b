"""A server of vLLM on CPUs, in an environment of its own, which ``FLEXCKPT_VLLM_PYTHON`` names."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import urllib.error
from pathlib import Path
from typing import Any

from tests.rollout.engine_calls import call

ROOT = Path(__file__).parents[2]
# As rollout-engine's recipe: nothing is fetched, and no thread is bound to a core.
_SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_PROMPT = [5, 17, 99, 42, 7, 300, 211, 8, 9, 450, 33, 12]


class VllmServer:
    """A server, from its start to its end.

    Attributes:
        url: Its address.
        log: The lines that it has printed.
    """

    def __init__(self, model: str, dtype: str, ranks: int, *options: str) -> None:
        """Start it; it is not ready yet."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(os.environ["FLEXCKPT_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
            *("--tensor-parallel-size", str(ranks), "--enforce-eager", "--max-model-len", "2048"),
            *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--gpu-memory-utilization", "0.1"),
            *("--worker-extension-cls", "tests.rollout.faulty_extension.FaultyExtension", *options),
        ]
        self.log: list[str] = []
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **_SETTINGS, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if "Application startup complete" in line:
                self._ready.set()
        self._ready.set()

    def wait(self) -> VllmServer:
        """Wait until it is ready."""
        assert self._ready.wait(600), "".join(self.log[-50:])
        for _ in range(100):  # it listens soon after it says so
            with contextlib.suppress(urllib.error.URLError):
                assert call(self.url, "/health", method="GET")[0] == 200
                return self
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        raise AssertionError("".join(self.log[-50:]))

    def wait_for_end(self) -> str:
        """Wait until it has ended by itself; return what it has printed."""
        self._process.wait(600)
        self._reader.join(60)
        return "".join(self.log)

    def stop(self) -> None:
        """End it, with its workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)

    def complete(self, prompt: list[int] = _PROMPT, tokens: int = 8, **options: Any) -> dict[str, Any]:
        """A greedy completion."""
        status, answer = call(self.url, "/v1/completions", completion(prompt, tokens, **options))
        assert status == 200, answer
        return answer["choices"][0]

    def logprobs(self) -> str:
        """The log-probabilities of a prompt and of a completion, all bits of them."""
        choice = self.complete(logprobs=5, prompt_logprobs=5)
        return json.dumps([choice["prompt_logprobs"], choice["logprobs"]], sort_keys=True)


def completion(prompt: list[int] = _PROMPT, tokens: int = 8, **options: Any) -> dict[str, Any]:
    """The body of a request for a greedy completion."""
    same = {"model": "m", "temperature": 0, "ignore_eos": True, "return_tokens_as_token_ids": True}
    return {**same, "prompt": prompt, "max_tokens": tokens, **options}


def token_ids(choice: dict[str, Any]) -> list[int]:
    """The tokens of a completion that was asked for with ``logprobs``."""
    return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
