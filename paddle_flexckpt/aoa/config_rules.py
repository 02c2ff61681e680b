"""Choose the rules for a model by its configuration, the ``config.json`` beside Hugging Face's weights.

Tested in tests/aoa/test_config_rules.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from paddle_flexckpt.aoa.model_rules import describe_model_rules, model_rules, rule_names
from paddle_flexckpt.aoa.statement_errors import AoaError

# Families by their name in configurations, where that differs from the family's own.
_MODEL_TYPES = MappingProxyType(
    {
        "mistral": "llama",
        "internlm3": "llama",
        "deepseek_v2": "deepseek_v3",
        "ernie4_5_moe": "ernie4_5",
        "chatglm": "chatglm2",
    }
)
# Names of the rules' parameters in configurations; the first that is there counts.
_ENTRIES = MappingProxyType(
    {
        "num_heads": ("num_attention_heads", "n_head"),
        "num_key_value_groups": ("num_key_value_heads", "num_attention_heads"),
        "num_experts": ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts"),
        "num_layers": ("num_hidden_layers",),
        "tied": ("tie_word_embeddings",),
    }
)
_HEADS = ("lm_head.weight", "embed_out.weight")


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of models whose rules are those of a configuration.

    Raises:
        AoaError: There are none.
    """
    kind = str(config.get("model_type"))
    family = _MODEL_TYPES.get(kind, kind)
    if family not in rule_names():
        known = ", ".join(sorted({*rule_names(), *_MODEL_TYPES}))
        raise AoaError(
            [
                f"there are no rules for the model_type {config.get('model_type')!r} of the configuration; there are "
                f"for {known}. Remedy: name a family whose tensors have the same names, or give AOA statements"
            ]
        )
    return family


def rules_of_config(
    config: Mapping[str, Any],
    direction: str,
    keys: Collection[str],
    family: str | None = None,
    variant: str = "plain",
    **given: Any,
) -> dict[str, list[str]]:
    """Return the ``aoa_config`` for a model by its configuration.

    Args:
        config: The configuration, as ``config.json`` has it.
        direction: ``"from_hf"`` or ``"to_hf"``.
        keys: Keys of the source. Where the configuration does not say whether the embeddings are tied, they are if
            no output layer is among these.
        family: As in :func:`~paddle_flexckpt.aoa.model_rules.model_rules`; None: the configuration's.
        variant: Likewise.
        **given: Parameters of the rules, which override the configuration.

    Returns:
        The statements.

    Raises:
        AoaError: There are no rules, the configuration lacks what they need, or it says that weights are quantized and
            the rules do not dequantize them.
    """
    chosen = family_of(config) if family is None else family
    if direction == "from_hf":
        _check_quantized(config, chosen, variant)
    parameters = {}
    for name in describe_model_rules(chosen)["parameters"]:
        entry = next((entry for entry in _ENTRIES.get(name, ()) if config.get(entry) is not None), None)
        if entry is not None:
            parameters[name] = config[entry]
        elif name == "tied":
            parameters[name] = not any(key.endswith(_HEADS) for key in keys)
    return model_rules(chosen, variant, direction, **{**parameters, **given})


def _check_quantized(config: Mapping[str, Any], family: str, variant: str) -> None:
    """Raise AoaError where rules would take quantized weights for plain numbers.

    A variant that dequantizes has the name of the method in configurations.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if variant == method:
        return
    variants = describe_model_rules(family)["variants"]
    remedy = (
        f"take the variant {method!r}"
        if method in variants
        else "write them out dequantized first, by the library that quantized them; or give AOA statements with dequant"
    )
    by = "by a method that it does not name" if method is None else f"by {method!r}"
    raise AoaError(
        [
            f"the configuration says that weights are quantized, {by}, and the rules for {family}, {variant!r}, take "
            f"them for plain numbers. Remedy: {remedy}"
        ]
    )
