"""What says how quantized weights become weights; the test puts one here."""

from __future__ import annotations

from typing import Any

made: list[Any] = []


def build_hf_dequant_load_transform(checkpoint_path: str, quan_config: Any = None) -> Any:
    made.append((checkpoint_path, quan_config))
    return quan_config
