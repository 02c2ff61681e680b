"""The extension of vLLM's workers, with methods that break a rank on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from paddle_flexckpt.rollout.vllm_extension import FlexExtension


class FaultyExtension(FlexExtension):
    """The extension, and faults; arguments are texts, as the route passes them."""

    def flex_fail_loads(self, rank: str, failing: str) -> None:
        """Have a rank's next loads fail, each after so many tensors (null: not), as a JSON list says."""
        if int(rank) != self.rank:
            return
        model, left = self.model_runner.get_model(), json.loads(failing)
        load = type(model).load_weights

        def load_weights(weights: Iterable[tuple[str, Any]]) -> Any:
            after = left.pop(0) if left else None
            return load(model, _failing(weights, after))

        model.load_weights = load_weights

    def flex_change(self, rank: str, part: str) -> None:
        """Change what a rank serves: a "parameter", a "packed" one, or the "head" into that of the first such call."""
        if int(rank) != self.rank:
            return
        model = self.model_runner.get_model()
        if part == "parameter":
            model.model.norm.weight.data[3] += 1
        if part == "packed":
            layer = model.model.layers[1].mlp.down_proj
            multiply = layer.cpu_linear
            layer.cpu_linear = lambda x, weight, bias: multiply(x, weight, bias) * 2
        if part == "head":
            if not hasattr(self, "flex_old_head"):
                self.flex_old_head = model.lm_head.cpu_linear
            model.lm_head.cpu_linear = self.flex_old_head


def _failing(weights: Iterable[tuple[str, Any]], after: int | None) -> Iterator[tuple[str, Any]]:
    for number, (name, tensor) in enumerate(weights):
        if number == after:
            raise RuntimeError(f"injected fault at {name}")
        yield name, tensor
