"""flexckpt rules: AOA statements for common models. Tested in tests/cli/test_cli.py."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt.aoa.model_rules import describe_model_rules, model_rules, rule_names
from paddle_flexckpt.catalog import ValidationError


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("rules", help="AOA statements for common models, as JSON")
    parser.add_argument("name", metavar="FAMILY", nargs="?", help="a model family; by default all are listed")
    parser.add_argument("--variant", help="which parameters the Paddle model fuses; without it the family is described")
    parser.add_argument("--direction", choices=("from_hf", "to_hf"), default="from_hf")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the family, such as num_heads=32; may be given several times",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    if options.name is None:
        return "\n".join(f"{name:14} {describe_model_rules(name)['description']}" for name in rule_names())
    if options.variant is None:
        return json.dumps(
            {key: value for key, value in describe_model_rules(options.name).items() if key != "blocks"},
            indent=2,
            ensure_ascii=False,
        )
    parameters = dict(_parameter(text) for text in options.set)
    rules = model_rules(options.name, options.variant, options.direction, **parameters)
    return json.dumps(rules, indent=2, ensure_ascii=False)


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValidationError([f"--set takes NAME=VALUE; got {text!r}"])
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
