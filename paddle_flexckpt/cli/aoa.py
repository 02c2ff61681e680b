"""flexckpt explain, expand, invert and rules: AOA statements explained, written out, undone and ready-made.

Tested in tests/cli/test_cli.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.aoa.compile import compile_program, expand_program, explain_targets
from paddle_flexckpt.aoa.invert import invert
from paddle_flexckpt.aoa.model_rules import describe_model_rules, model_rules, rule_names
from paddle_flexckpt.catalog import Catalog, ValidationError
from paddle_flexckpt.cli.common import OF_RUN, Outcome, add_aoa, add_set, aoa_config, parse_parameter, read_catalog
from paddle_flexckpt.transfer.problems import reshaped
from paddle_flexckpt.transfer.resolution import Given, fit

_SOURCE = f"directory or URL of a checkpoint of the statements' source, {OF_RUN}"
_TARGET = "directory or URL of a checkpoint of the statements' destination"


def add_command(commands: Any) -> None:
    """Add the parsers of the four commands."""
    explain = commands.add_parser(
        "explain",
        help="where each tensor comes from under AOA statements",
        description="Prints where each tensor comes from under AOA statements. The exit status is 1 where nothing "
        "feeds a tensor of TARGET, or a tensor that no statement makes has another shape there.",
        epilog="example: flexckpt explain run/step_00000100 --aoa 'model.norm -> norm' --key norm",
    )
    expand = commands.add_parser(
        "expand",
        help="AOA statements with ids, stars and fused layouts written out",
        epilog="example: flexckpt expand run/step_00000100 --aoa statements.json",
    )
    invert = commands.add_parser(
        "invert",
        help="the AOA statements that undo others, as JSON",
        epilog="example: flexckpt invert --aoa statements.json",
    )
    for parser, run in ((explain, _explain), (expand, _expand), (invert, _invert)):
        add_aoa(parser)
        parser.set_defaults(run=run)
    for parser in (explain, expand):
        parser.add_argument("source", metavar="CHECKPOINT", help=_SOURCE)
        parser.add_argument("target", metavar="TARGET", nargs="?", help=f"{_TARGET}; by default what they make")
        parser.set_defaults(newest={"source": "", "target": ""})
    explain.add_argument("--key", action="append", default=[], help="only this target; may be given several times")

    rules = commands.add_parser(
        "rules",
        help="AOA statements for common models, as JSON",
        epilog="example: flexckpt rules llama --variant plain --direction to_hf",
    )
    rules.add_argument("name", metavar="FAMILY", nargs="?", help="a model family; by default all are listed")
    rules.add_argument("--variant", help="which parameters the Paddle model fuses (plain)")
    rules.add_argument(
        "--direction",
        choices=("from_hf", "to_hf"),
        help="from Hugging Face's names, or to them (from_hf); without one of these options the family is described",
    )
    add_set(rules, "num_heads=32")
    rules.set_defaults(run=_rules)


def _explain(options: argparse.Namespace) -> Outcome:
    """Return where each target comes from; code 1 if nothing feeds one of TARGET's."""
    source, target = read_catalog(options.source), read_catalog(options.target)
    config = aoa_config(options.aoa)
    text, unfed = explain_targets(config, source, target, options.key)
    if target is not None:
        _check_shapes(source, target, compile_program(config, source, target), options.key)
    return Outcome(text, int(bool(unfed) and target is not None))


def _check_shapes(source: Catalog, target: Catalog, mapping: TensorMapping, keys: Sequence[str]) -> None:
    """Raise ValidationError where targets that no statement makes have another shape in the source, as a load does."""
    known, problems = {*source.keys, *target.keys}, []
    for row in np.unique(target.key, return_index=True)[1].tolist():
        key = target.key_name(row)
        if key not in source.keys or key in mapping.tensors or key in mapping.unfed or (keys and key not in keys):
            continue
        first = int(np.argmax(source.key == source.keys.index(key)))
        given = Given(source.unpadded(first, source.global_shape), source.dtype_name(first), "{} (source)")
        if given.shape != target.unpadded(row, target.global_shape):
            remedy = reshaped(target, row, source, first, known) or given.shape_remedy
            problems.append(fit(target, row, replace(given, shape_remedy=remedy), True)[1])
    if problems:
        raise ValidationError([problem for problem in problems if problem is not None])


def _expand(options: argparse.Namespace) -> str:
    """Return the simple statements to which macros expand."""
    source, target = read_catalog(options.source), read_catalog(options.target)
    lines: list[str] = []
    for expanded in expand_program(aoa_config(options.aoa), source, target):
        lines.append(f"# statement {expanded.number}: {expanded.text.strip()}")
        lines += [text.strip() for text in expanded.texts]
    return "\n".join(lines)


def _invert(options: argparse.Namespace) -> str:
    """Return the statements that undo others."""
    return json.dumps(invert(aoa_config(options.aoa)), indent=2, ensure_ascii=False)


def _rules(options: argparse.Namespace) -> str:
    """Return the families, one of them, or its statements."""
    asked = [f"--{name}" for name in ("variant", "direction", "set") if getattr(options, name)]
    if options.name is None and asked:
        raise ValidationError([f"{asked[0]} is about the rules of a family. Remedy (FC101): give FAMILY too"])
    if options.name is None:
        return "\n".join(f"{name:14} {describe_model_rules(name)['description']}" for name in rule_names())
    if not asked:
        return json.dumps(
            {key: value for key, value in describe_model_rules(options.name).items() if key != "blocks"},
            indent=2,
            ensure_ascii=False,
        )
    parameters = dict(parse_parameter(text) for text in options.set)
    variant, direction = options.variant or "plain", options.direction or "from_hf"
    rules = model_rules(options.name, variant, direction, **parameters)
    return json.dumps(rules, indent=2, ensure_ascii=False)
