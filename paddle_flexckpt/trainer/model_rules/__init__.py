"""Rules for the models of PaddleNLP and PaddleFormers: what is split, fused and shared, and Hugging Face's names."""

from paddle_flexckpt.trainer.model_rules.axes import ModelRule, register_model_rule, unregister_model_rule
from paddle_flexckpt.trainer.model_rules.hf import hf_rules
from paddle_flexckpt.trainer.model_rules.library_models import (
    describe_model,
    install_model_rules,
    register_shared_attribute,
    uninstall_model_rules,
)
from paddle_flexckpt.trainer.model_rules.live import aoa_config_of, export_config_of

__all__ = [
    "ModelRule",
    "aoa_config_of",
    "describe_model",
    "export_config_of",
    "hf_rules",
    "install_model_rules",
    "register_model_rule",
    "register_shared_attribute",
    "uninstall_model_rules",
    "unregister_model_rule",
]
