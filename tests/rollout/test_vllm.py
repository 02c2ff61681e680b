"""vLLM serves the weights of a segment as if it had been started with them, whatever fails on the way.

``make test-rollout`` runs this, with an environment of its own. Two engines start with two sets of weights, and each is
compared with the other after a push.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from paddle_flexckpt.rollout.segment import SegmentDirectory, SegmentNames, channel_of
from tests.documents import ROOT, every_block
from tests.ramdisk import memory_directory
from tests.rollout.engine_calls import RefusedError, call, push, rpc, switch, well
from tests.rollout.models import make_model
from tests.rollout.trainers import STRATEGIES
from tests.rollout.trainers import push as push_of_trainer
from tests.rollout.vllm_server import VllmServer, completion, token_ids

pytestmark = pytest.mark.skipif(
    not os.environ.get("FLEXCKPT_VLLM_PYTHON"), reason="FLEXCKPT_VLLM_PYTHON names no interpreter with vLLM"
)
_SLOW = [
    pytest.param((ranks, family, dtype), marks=pytest.mark.slow)
    for ranks in (1, 2)
    for family in ("llama", "qwen2")
    for dtype in ("float32", "bfloat16")
    if (ranks, family, dtype) != (2, "qwen2", "bfloat16")
]


class Pair(NamedTuple):
    """Two engines, started with the weights of two files, of which copies are segments."""

    first: VllmServer
    second: VllmServer
    old: str
    new: str
    ranks: int
    family: str
    dtype: str


@pytest.fixture(scope="module", params=[(2, "qwen2", "bfloat16"), *_SLOW], ids=lambda each: "-".join(map(str, each)))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ranks, family, dtype = request.param
    options = ["--weight-transfer-config", json.dumps({"backend": "flexckpt"})] if ranks == 1 else []
    with memory_directory() as path:
        files = [make_model(path / str(seed), family, dtype, seed) for seed in (1, 2)]
        segments = [shutil.copy(file, path / f"{seed}.safetensors") for seed, file in enumerate(files)]
        servers = [VllmServer(str(Path(file).parent), dtype, ranks, *options) for file in files]
        try:
            first, second = [server.wait() for server in servers]
            yield Pair(first, second, *map(str, segments), ranks, family, dtype)
        finally:
            for server in servers:
                server.stop()
                SegmentDirectory().clear(SegmentNames(channel_of(server.url), "", "", (), 0, True))


def digests(version: str, file: str) -> str:
    """A request that compares all tensors of a file, whole."""
    regions = []
    for name, array in load_file(file).items():
        array = array.reshape(-1)
        regions.append([name, 0, [array.size], [1], xxhash.xxh3_128_hexdigest(array.view(np.uint8))])
    return json.dumps({"version": version, "regions": regions})


def same(pair: Pair, server: VllmServer, version: str, file: str) -> None:
    """Check that all ranks hold a file's tensors, as received and live."""
    count = len(load_file(file))
    for each in well(rpc(server.url, "flex_digests", digests(version, file))):
        assert (each["compared"], each["different"]) == (count, 0)
        assert (each["live_compared"], each["live_different"], each["live_unreadable_names"]) == (count, 0, {})


def test_the_first_push_fails_on_a_rank(pair: Pair) -> None:
    before, url = pair.first.logprobs(), pair.first.url
    assert {each["version"] for each in rpc(url, "flex_status")} == {"base"}
    same(pair, pair.first, "base", pair.old)
    for rank in range(pair.ranks):
        rpc(url, "flex_fail_loads", str(rank), "[5]")
        with pytest.raises(RefusedError, match=f"^rank {rank}: RuntimeError: injected fault at [^;]*$"):
            push(url, "1", pair.new)
        assert pair.first.logprobs() == before
        same(pair, pair.first, "base", pair.old)


def test_log_probabilities_equal_those_of_a_fresh_engine(pair: Pair) -> None:
    old, new = pair.first.logprobs(), pair.second.logprobs()
    assert old != new
    for version, segment, expected in (("1", pair.new, new), ("2", pair.old, old), ("3", pair.new, new)):
        accepted = push(pair.first.url, version, segment)
        assert [each["released"] for each in accepted] == [True] * pair.ranks
        assert pair.first.logprobs() == expected
        assert call(pair.first.url, "/weight_info", method="GET")[1] == {"weight_version": version}
        same(pair, pair.first, version, segment)
    push(pair.second.url, "1", pair.old)
    assert pair.second.logprobs() == old
    push(pair.second.url, "2", pair.new)


def test_a_later_push_fails_on_a_rank(pair: Pair) -> None:
    push(pair.first.url, "10", pair.old)
    before = pair.first.logprobs()
    for rank in range(pair.ranks):
        for after in (0, 11):
            rpc(pair.first.url, "flex_fail_loads", str(rank), json.dumps([after]))
            with pytest.raises(RefusedError, match=f"^rank {rank}: RuntimeError: injected fault at "):
                push(pair.first.url, "11", pair.new)
            assert pair.first.logprobs() == before
            same(pair, pair.first, "10", pair.old)


def test_a_segment_that_does_not_fit_touches_nothing(pair: Pair, tmp_path: Path) -> None:
    push(pair.first.url, "20", pair.old)
    before = pair.first.logprobs()
    tensors = load_file(pair.new)
    name = "model.layers.1.self_attn.k_proj.weight"
    lacking = {key: array for key, array in tensors.items() if key != name}
    for changed, text in ((lacking, "no such tensor"), ({**tensors, name: tensors[name][:-1]}, r"\w+ \[127, 256\]")):
        save_file(changed, tmp_path / "bad")
        with pytest.raises(RefusedError, match=rf"{name}.*; got {text}(;|$)"):
            push(pair.first.url, "21", str(tmp_path / "bad"))
    assert not any(each["ok"] for each in rpc(pair.first.url, "flex_stage"))
    assert not any(each["ok"] for each in rpc(pair.first.url, "flex_commit", "22"))
    assert pair.first.logprobs() == before


def test_a_request_under_way_goes_on_with_the_new_weights(pair: Pair) -> None:
    push(pair.first.url, "30", pair.old)
    push(pair.second.url, "30", pair.new)
    tokens = 1900  # the switch takes place long before the last of them, also on a busy machine
    before = token_ids(pair.first.complete(tokens=tokens, logprobs=0))
    got: list[int] = []
    begun = threading.Event()

    def ask() -> None:
        body = json.dumps(completion(tokens=tokens, logprobs=0, stream=True)).encode()
        request = urllib.request.Request(f"{pair.first.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    got.extend(token_ids(json.loads(line[6:])["choices"][0]))
                    begun.set()

    well(rpc(pair.first.url, "flex_stage", "31", pair.new))
    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(300)
    switch(pair.first.url, "31")
    thread.join()
    assert len(got) == tokens
    kept = next(i for i, (a, b) in enumerate(zip(got, before)) if a != b)
    assert kept > 0
    prompt = completion()["prompt"]
    # The first tokens by the new weights may be those by the old ones.
    assert any(
        got[at:] == token_ids(pair.second.complete(prompt + got[:at], tokens - at, logprobs=0))
        for at in range(kept, max(kept - 4, 0), -1)
    )


def test_live_parameters_are_compared(pair: Pair) -> None:
    url, last = pair.first.url, str(pair.ranks - 1)
    push(url, "40", pair.old)
    rpc(url, "flex_change", last, "head")
    cases = [("parameter", ["model.norm.weight"]), ("packed", ["model.layers.1.mlp.down_proj.weight"])]
    if pair.family == "qwen2":
        cases.append(("head", ["lm_head.weight, as packed"]))
    for number, (part, names) in enumerate(cases):
        push(url, f"{41 + number}", pair.new)
        rpc(url, "flex_change", last, part)
        results = well(rpc(url, "flex_digests", digests(f"{41 + number}", pair.new)))
        assert [each["different"] for each in results] == [0] * pair.ranks
        assert [each["live_different_names"] for each in results] == [[]] * (pair.ranks - 1) + [names]


def test_the_weight_transfer_engine_of_one_rank(pair: Pair) -> None:
    if pair.ranks > 1:
        pytest.skip("it serves engines of one rank")
    url = pair.first.url
    push(url, "50", pair.old)
    old, new = pair.first.logprobs(), pair.second.logprobs()
    assert call(url, "/init_weight_transfer_engine", {"init_info": {"protocol": 3}})[0] == 200

    def update(version: str, segment: str) -> int:
        assert call(url, "/pause?mode=keep")[0] == 200
        assert call(url, "/start_weight_update")[0] == 200
        status, _ = call(url, "/update_weights", {"update_info": {"version": version, "path": segment}})
        if status == 200:
            assert call(url, "/finish_weight_update", {"weight_version": version})[0] == 200
        assert call(url, "/reset_prefix_cache?reset_running_requests=true")[1] == {"success": True}
        assert call(url, "/resume")[0] == 200
        return status

    assert update("51", pair.new) == 200
    assert pair.first.logprobs() == new
    rpc(url, "flex_fail_loads", "0", "[7]")
    assert update("52", pair.old) == 500
    assert pair.first.logprobs() == new
    assert update("52", "/nothing") == 500
    assert update("52", pair.old) == 200
    assert pair.first.logprobs() == old
    assert call(url, "/weight_info", method="GET")[1] == {"weight_version": "52"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_push_equals_a_fresh_engine_on_the_export(pair: Pair, world: Any, tmp_path: Path, strategy: str) -> None:
    size, _ = STRATEGIES[strategy]
    push(pair.first.url, f"{strategy} from a segment", pair.old)
    old, new = pair.first.logprobs(), pair.second.logprobs()
    for file, expected in ((pair.old, old), (pair.new, new)):
        source, exported = tmp_path / f"from {Path(file).stem}", tmp_path / f"to {Path(file).stem}"
        source.mkdir()
        shutil.copy(file, source / "model.safetensors")
        results = world(size).run(
            push_of_trainer,
            strategy=strategy,
            family=pair.family,
            dtype=pair.dtype,
            source=str(source),
            url=pair.first.url,
            version=f"{strategy} {Path(file).stem}",
            exported=str(exported),
        )
        assert pair.first.logprobs() == expected
        tensors, written = load_file(file), {}
        for each in exported.glob("*.safetensors"):
            written.update(load_file(each))
        assert all(np.array_equal(written[name], array) for name, array in tensors.items())
        assert len(written) == len(tensors)
        assert sum(each["written"] for each in results) == sum(array.nbytes for array in tensors.values())
        assert all(each["equal"] for each in results)
        assert (results[0]["live"], results[0]["unreadable"]) == (pair.ranks * len(tensors), {})


def test_a_roll_back_that_fails_demands_a_restart(pair: Pair) -> None:
    """The last test: the engine is of no use afterwards."""
    url = pair.first.url
    push(url, "60", pair.old)
    rank = pair.ranks - 1
    rpc(url, "flex_fail_loads", str(rank), "[5, 3]")
    well(rpc(url, "flex_stage", "61", pair.new))
    assert call(url, "/pause?mode=keep")[0] == 200
    assert [each["ok"] for each in rpc(url, "flex_commit", "61")] == [other != rank for other in range(pair.ranks)]
    assert [each["ok"] for each in rpc(url, "flex_rollback")] == [other != rank for other in range(pair.ranks)]
    assert [each["needs_restart"] for each in rpc(url, "flex_status")] == [other == rank for other in range(pair.ranks)]
    with pytest.raises(RefusedError, match="restart the engine"):
        well(rpc(url, "flex_stage", "62", pair.old))
    # It still answers: nothing is left without memory. Parameters that the load did not reach may make NaN of all.
    call(url, "/resume")
    status, answer = call(url, "/v1/completions", completion(logprobs=0))
    assert status == 200 or "Out of range float values" in answer["error"]["message"], answer


@pytest.mark.slow
def test_the_weight_transfer_engine_refuses_two_ranks() -> None:
    with memory_directory() as path:
        file = make_model(path / "1", "llama", "float32", 1)
        config = json.dumps({"backend": "flexckpt"})
        server = VllmServer(str(Path(file).parent), "float32", 2, "--weight-transfer-config", config)
        try:
            assert "serves one worker, and this engine has 2" in server.wait_for_end()
        finally:
            server.stop()


@pytest.mark.slow
def test_the_example_prints_what_its_page_says(world: Any, tmp_path: Path) -> None:
    commands = [text for text in every_block("examples/serving/README.md", "bash") if "train.py" in text]
    export, train = (text.split("train.py ")[1].split() for text in commands)
    (wanted,) = every_block("examples/serving/README.md", "")
    world(4).run(run_example, arguments=export, directory=str(tmp_path))
    server = VllmServer(str(tmp_path / "policy"), "float32", 1, "--skip-tokenizer-init", "--max-model-len", "128")
    try:
        arguments = [train[0], server.wait().url]
        printed = world(4).run(run_example, arguments=arguments, directory=str(tmp_path))
    finally:
        server.stop()
    assert printed[0] == wanted
    assert not any(printed[1:])


def run_example(arguments: list[str], directory: str) -> str:
    """What the example prints on this rank."""
    path = ROOT / "examples" / "serving" / "train.py"
    before, argv, printed = os.getcwd(), sys.argv, io.StringIO()
    os.chdir(directory)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(path.read_text("utf-8"), str(path), "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        sys.argv = argv
        sys.path.remove(str(path.parent))
        sys.modules.pop("model", None)
    return printed.getvalue()
