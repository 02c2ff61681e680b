"""Every example of the documentation is run by a test, or stands below with the reason why it is not.

A block is run by the test file that takes it: by ``code_block("docs/guide.md", "part of it")`` and the like of
tests/documents.py, with constants, so that it is found here without running anything.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.documents import ROOT, Block, blocks

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "patches/*.md", "examples/*/*.md", "paddle_flexckpt/**/*.py")
    for path in ROOT.glob(pattern)
)
TAKERS = {
    "code_block": "python",
    "output_block": "",
    "shell_block": "bash",
    "text_block": "text",
    "json_block": "json",
    "diff_block": "diff",
    "docstring_block": "docstring",
}

_TRAINER = "a pattern, with `...`; `make test-trainer` and `make test-paddleformers` launch such jobs"
_EXAMPLE = "what the commands print; tests/trainer/test_example.py runs them with PaddleNLP"
#: By document and a part of the block, the reason why it is not run.
NOT_RUN = {
    ("docs/design.md", "all have written"): "a drawing",
    ("docs/design.md", "worlds of worker processes"): "a drawing",
    ("README.md", "make demo "): "CI runs `make test`; tests/test_demo.py runs what `make demo` does",
    ("README.md", "pip install . "): "needs a package index; `make dist` installs so",
    ("README.md", "--save_checkpoint_format"): _TRAINER,
    ("docs/devices.md", "--devices 2"): "needs devices; tests/device/test_device_check.py simulates them",
    ("docs/index.md", "pip install "): "needs a package index; `make dist` installs so",
    ("docs/manager.md", "step_00000050.removing"): "a listing; tests/manager/test_step_directories.py has these names",
    ("docs/migration.md", "convert SRC DST"): "a pattern; tests/cli/test_migration.py looks its options up",
    ("docs/model_rules.md", "hf_rules(type(model)"): "needs PaddleNLP; tests/trainer/test_model_rules.py calls it",
    ("docs/rollout.md", 'WeightChannel("http://engine'): "needs vLLM; tests/rollout/test_channel.py pushes so",
    ("docs/rollout.md", "to_engine_names"): "a pattern; tests/distributed/test_fastdeploy_snapshots.py publishes so",
    ("docs/rollout.md", "--worker-extension-cls"): "needs vLLM; tests/rollout/vllm_server.py starts it so",
    ("docs/rollout.md", "flexckpt receive"): "never ends; tests/rollout/test_receiver.py runs it",
    ("docs/rollout.md", "receiver="): "needs two machines; tests/rollout/test_channel.py pushes so to a receiver",
    ("docs/trainer.md", "--pipeline_parallel_degree 2 ..."): _TRAINER,
    ("docs/trainer.md", "flex_checkpoint.json"): "a listing; tests/trainer/test_directories.py has these names",
    ("docs/trainer-paddlefleet.md", "--nproc_per_node 8"): _TRAINER,
    ("docs/trainer-paddleformers.md", "--pipeline_model_parallel_size"): _TRAINER,
    ("docs/tutorial_fleet.md", "sleep 30"): "tests/manager/test_tutorial.py does so without the sleep",
    ("examples/paddlenlp/README.md", "saved 198 tensors"): _EXAMPLE,
    ("examples/paddlenlp/README.md", "not restored: rng"): _EXAMPLE,
    ("examples/paddlenlp/README.md", "key       "): _EXAMPLE,
    ("examples/paddlenlp/README.md", "exported 39 tensors"): _EXAMPLE,
    ("paddle_flexckpt/aoa/model_rules.py", "VARIANT"): "a sketch; tests/aoa/test_model_rules.py reads real ones",
}


def taken() -> dict[Block, set[str]]:
    """Return by block the test files that take it."""
    found: dict[Block, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "from tests.documents import" not in text or path.name == Path(__file__).name:
            continue
        for call in ast.walk(ast.parse(text)):
            name = getattr(getattr(call, "func", None), "id", "")
            if isinstance(call, ast.Call) and name in (*TAKERS, "every_block"):
                file, part = (ast.literal_eval(argument) for argument in call.args)
                language = TAKERS.get(name, part)
                there = [each for each in blocks(file) if each.language == language]
                for block in there if name == "every_block" else [each for each in there if part in each.text]:
                    found[block].add(str(path.relative_to(ROOT)))
    return found


def test_every_example_is_run_or_has_a_reason():
    run = taken()
    explained = defaultdict(list)
    for (file, part), reason in NOT_RUN.items():
        matches = [block for block in blocks(file) if part in block.text]
        assert len(matches) == 1, f"{file}: {len(matches)} blocks with {part!r}"
        explained[matches[0]].append(reason)
    everything = [block for file in DOCUMENTS for block in blocks(file)]
    assert len(everything) > 90
    nobody = [str(block) for block in everything if block not in run and block not in explained]
    assert not nobody, "no test takes these examples (tests/documents.py):\n" + "\n".join(nobody)
    both = [str(block) for block in everything if block in run and block in explained]
    assert not both, "these are run; their reasons may go:\n" + "\n".join(both)
