"""flexckpt convert: write a checkpoint of any format in another format or layout.

Tested in tests/cli/test_convert.py.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt.aoa.model_rules import rules_of_config
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.cli.common import (
    OF_RUN,
    add_aoa,
    add_cut,
    add_json,
    add_set,
    add_verify,
    aoa_config,
    byte_count,
    parse_cut,
    parse_parameter,
    progress_bar,
)
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.tools.config_models import is_config
from paddle_flexckpt.tools.conversion import MEMORY_BYTES, convert_checkpoint
from paddle_flexckpt.tools.conversion_content import read_config
from paddle_flexckpt.tools.conversion_targets import TARGETS

# Formats of programs on torch, whose models have Hugging Face's names.
_OF_TORCH = ("huggingface", "torch_dcp")


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint of any format in another format or layout",
        description="Writes a checkpoint of any format that can be read in another format or layout, one file after "
        "the other, in little memory. An interrupted conversion goes on when the same command is given again. The "
        "destination is no checkpoint before all of it is there. config.json, a tokenizer's files and the like are "
        "copied.",
        epilog="example: flexckpt convert model.pdparams out --format huggingface --model llama --config config.json",
    )
    of_source = f"directory or URL of a checkpoint, {OF_RUN}; or a file that is a checkpoint"
    parser.add_argument("source", metavar="SRC", help=of_source)
    parser.add_argument("output", metavar="DST", help="directory or URL to write to; nothing else may be there")
    parser.add_argument("--id", type=int, dest="unique_id", metavar="ID", help="id of SRC; by default the highest")
    parser.add_argument("--format", choices=tuple(TARGETS), default="native", help="format to write (default: native)")
    parser.add_argument(
        "--to",
        metavar="STRATEGY",
        help="write what the ranks of a job with these degrees would have saved (tp or mp, pp, vpp, dp, ep, sep, and "
        "sharding=KIND:DEGREE), or on a mesh such as 'mesh=2x4:dp,mp' or its JSON or YAML file, as `flexckpt rehearse` "
        "takes it; by default whole tensors",
    )
    add_cut(parser)
    _add_tensors(parser)
    _add_limits(parser)
    parser.set_defaults(run=_convert, newest={"source": "unique_id"})


def _add_tensors(parser: argparse.ArgumentParser) -> None:
    """Add the options about names, values and the choice of tensors."""
    add_aoa(parser, required=False)
    parser.add_argument(
        "--model",
        metavar="FAMILY",
        help="use the rules for this family of models between Hugging Face's names and Paddle's, with heads and "
        "experts as config.json has them; auto, or the path of the config.json: the family too",
    )
    parser.add_argument("--variant", default="plain", help="which parameters the Paddle model fuses (default: plain)")
    add_set(parser, "prefix=llama.")
    parser.add_argument("--config", metavar="FILE", help="the model's config.json; by default that in SRC")
    parser.add_argument("--dtype", help="type that floating-point weights get, such as bfloat16")
    parser.add_argument("--prefix", help="only keys that start with this and a dot, which are taken off")
    states = parser.add_mutually_exclusive_group()
    states.add_argument(
        "--states",
        action="store_true",
        default=None,
        help="write optimizer states and extra state (default but for huggingface)",
    )
    states.add_argument("--weights", action="store_false", dest="states", help="write neither")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options about files, memory and the way of the conversion."""
    parser.add_argument(
        "--max-file-bytes", type=byte_count, default=5 << 30, help="largest size of a file of whole tensors (5GiB)"
    )
    parser.add_argument(
        "--save-replicas",
        action="store_true",
        help="with --format paddle --to: write all that a rank has into its own file, also what others have",
    )
    parser.add_argument(
        "--memory",
        type=byte_count,
        dest="memory_bytes",
        metavar="BYTES",
        default=MEMORY_BYTES,
        help="the most memory to use, about (default: 256MiB)",
    )
    add_verify(parser)
    parser.add_argument(
        "--restart", action="store_true", help="remove what another conversion has begun to write to DST"
    )
    add_json(parser)


def _convert(options: argparse.Namespace) -> str:
    names = ["unique_id", "format", "states", "dtype", "config", "prefix", "max_file_bytes", "save_replicas"]
    names += ["memory_bytes", "verify"]
    statements = _statements(options)
    with progress_bar(options.json) as progress:
        report = convert_checkpoint(
            options.source,
            options.output,
            statements,
            strategy=options.to,
            cuts=tuple(parse_cut(text) for text in options.cut),
            restart=options.restart,
            progress=progress,
            **{name: getattr(options, name) for name in names},
        )
    return report.to_json() if options.json else report.summary()


def _statements(options: argparse.Namespace) -> Any:
    """Return the AOA statements: the given ones, or those of the family of models."""
    if options.model is None:
        if options.set:
            raise ValidationError(["--set is about the rules of a family. Remedy (FC101): give --model too"])
        return aoa_config(options.aoa)
    if options.aoa is not None:
        raise ValidationError(
            [
                "--model and --aoa both say what becomes of the tensors. Remedy (FC101): give one; `flexckpt rules` "
                "prints the statements of a family, to be edited"
            ]
        )  # fmt: skip
    directory = SourceDirectory(options.source)
    manifest = directory.read_manifest(options.unique_id)
    is_hf = manifest.origin in _OF_TORCH
    if is_hf == (options.format in _OF_TORCH):
        raise ValidationError(
            [
                f"--model converts between Hugging Face's names and Paddle's, and here both sides are "
                f"{'' if is_hf else 'not '}Hugging Face's: SRC is {manifest.origin}, --format is {options.format}. "
                "Remedy (FC101): leave --model out, or give --aoa"
            ]
        )
    is_file = is_config(options.model)
    if is_file and options.config is not None:
        raise ValidationError(["--model and --config both give a config.json. Remedy (FC101): give one"])
    text = read_config(options.model if is_file else options.config, directory)
    if text is None:
        raise ValidationError(
            [
                f"there is no config.json in {directory.path}, which says how many heads the model has. "
                "Remedy (FC101): give its path by --config"
            ]
        )  # fmt: skip
    return rules_of_config(
        json.loads(text),
        "from_hf" if is_hf else "to_hf",
        manifest.catalog.keys,
        None if is_file or options.model == "auto" else options.model,
        options.variant,
        **dict(parse_parameter(text) for text in options.set),
    )
