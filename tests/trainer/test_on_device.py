"""The trainer in half precision on two simulated devices: stages 1 to 3 and V2 resume what each other has saved."""

from __future__ import annotations

import pytest

pytest.importorskip("paddlenlp")

from tests.device import plugin
from tests.trainer.launching import launch
from tests.trainer.matrix import differences, tensors
from tests.trainer.strategies import ON_DEVICE

#: Of about 4; gradients of half precision are rounded before they are added up over ranks.
LOSS = 2e-2


@pytest.mark.skipif(bool(plugin.missing_tools()), reason=plugin.missing_tools())
def test_each_strategy_resumes_what_another_has_saved(tmp_path):
    names = list(ON_DEVICE)
    jobs = [{"name": name, "strategy": name} for name in names]
    # Paddle's DataParallel, the first, cannot be made again once fleet has been initialised.
    pairs = [*zip(names, names[1:]), (names[-1], names[1])]
    for a, b in pairs:
        resume, loaded = (str(tmp_path / each) for each in (f"{a}/checkpoint-3", f"{a} to {b}/loaded"))
        flags = ["--save_strategy", "no"]
        jobs.append({"name": f"{a} to {b}", "strategy": b, "resume": resume, "loaded": loaded, "flags": flags})
    for number, job in enumerate(jobs, 1):
        job.update(number=number, model="llama heads", output_dir=str(tmp_path / job["name"]))
    variables = {**plugin.environment(devices=2), "REHEARSED_DEVICE": plugin.DEVICE_TYPE}
    results = launch(names[0], jobs, tmp_path / "logs", strategies=ON_DEVICE, variables=variables)
    assert {name: result["traceback"] for name, result in results.items() if "error" in result} == {}
    expected = results[names[0]]["losses"]
    for a, b in pairs:
        before, after = (
            tensors(tmp_path / a / "checkpoint-3/flex_checkpoint"),
            tensors(tmp_path / f"{a} to {b}/loaded"),
        )
        assert str(before["llama.norm.weight"].dtype) != "float32"
        assert str(before["llama.norm.weight.w_0"].dtype) == "float32"
        assert differences(before, after) == []
        losses = results[f"{a} to {b}"]["losses"]
        assert sorted(losses) == ["4", "5", "6"]
        assert all(abs(losses[step] - expected[step]) <= LOSS for step in losses)
