"""flexckpt rehearse: what a load or a save of a job would do, without ranks. Tested in tests/cli/test_rehearse.py."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt.aoa.config import AoaConfig
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.cli.arguments import Outcome, add_aoa, add_checkpoint, add_html, aoa_config, written
from paddle_flexckpt.engine.models import layout_of
from paddle_flexckpt.engine.options import LoadOptions
from paddle_flexckpt.engine.rehearsal import RankReads, RehearsalReport, rehearse
from paddle_flexckpt.engine.save_rehearsal import SaveRehearsal, rehearse_save
from paddle_flexckpt.planning.layouts import Layout
from paddle_flexckpt.report import format_bytes, format_ranks

# Lines of the table, and keys of a list; all are in the JSON.
_LINES, _KEYS = 16, 3


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "rehearse",
        help="say whether a checkpoint loads under another layout, and what each rank would read, or would save",
        description="Says whether a checkpoint loads under another layout, or why not, in the words of the job, and "
        "what each rank would read and hold; with --save what that job would write. Only the manifest is "
        "read, and whether the files are there. The exit status is 0 where it loads, and 1 where it does not.",
        epilog="example: flexckpt rehearse run/step_100 --to tp=4,pp=2,sharding=v2:8 --gbps 2",
    )
    add_checkpoint(parser)
    add_layout(parser)
    parser.add_argument(
        "--strict", choices=("both", "missing", "unexpected", "none"), default="missing", help="as in load_state_dict"
    )
    parser.add_argument("--dtype", choices=("raise", "cast"), default="raise", help="as in load_state_dict")
    parser.add_argument("--master-weights", choices=("exact", "convert"), default="exact", help="as in load_state_dict")
    parser.add_argument(
        "--gbps", type=float, metavar="N", help="gigabytes a second that one rank reads while all do: to estimate time"
    )
    parser.add_argument(
        "--cooperative", action="store_true", help="say also what ranks read and exchange if one reads for all"
    )
    parser.add_argument(
        "--save", action="store_true", help="say what the job would save, instead of whether and how it loads"
    )
    parser.add_argument("--save-replicas", action="store_true", help="with --save: as in save_state_dict")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with all ranks")
    add_html(parser)
    parser.set_defaults(run=_rehearse)


def add_layout(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add ``--to``, and what else describes the layout of a job."""
    parser.add_argument(
        "--to",
        required=required,
        metavar="STRATEGY",
        help="the degrees of the job: tp, pp, vpp, dp, ep, sep, and sharding=KIND:DEGREE (v1, v2, stage2, stage3)",
    )
    add_aoa(parser, required=False)
    parser.add_argument(
        "--model", metavar="OTHER", help="a checkpoint of the job's model, if it is not what CHECKPOINT holds"
    )
    parser.add_argument(
        "--cut",
        action="append",
        default=[],
        metavar="GLOB=AXIS",
        help="along which axis tensor parallelism cuts these tensors, or none; may be given several times, and the "
        "first that fits counts; by default as they were cut at the save",
    )
    parser.add_argument("--weights", action="store_true", help="the job has no optimizer")


def layout_from(options: argparse.Namespace, config: AoaConfig | None) -> tuple[Layout, list[str]]:
    """Return the layout of the job that :func:`add_layout` describes, and what it takes for granted."""
    return layout_of(
        options.source,
        options.to,
        unique_id=options.unique_id,
        aoa_config=config,
        model=options.model,
        cuts=[_cut(text) for text in options.cut],
        states=not options.weights,
    )


def _rehearse(options: argparse.Namespace) -> Outcome:
    """Return a table of the ranks and what is noticed, or the job's error; code 1 where it would fail."""
    config = None if options.aoa is None else aoa_config(options.aoa)
    if options.gbps is not None and not options.gbps > 0:
        raise ValidationError([f"--gbps takes a positive number; got {options.gbps}"])
    loading = {"--cooperative": options.cooperative, "--strict": options.strict != "missing"}
    if options.save and any(loading.values()):
        raise ValidationError([f"{next(filter(loading.get, loading))} is of a load: it does not go with --save"])
    if options.save_replicas and not options.save:
        raise ValidationError(["--save-replicas is of a save: give --save too"])
    strict: Any = {"both": True, "none": False}.get(options.strict, options.strict)
    asked = LoadOptions(
        unique_id=options.unique_id,
        aoa_config=config,
        strict=strict,
        dtype=options.dtype,
        master_weights=options.master_weights,
        optimizer_states="ignore" if options.weights else "raise",
    )
    layout, notes = layout_from(options, config)
    rate = None if options.gbps is None else options.gbps * 1e9
    if options.save:
        saved = rehearse_save(layout, save_replicas=options.save_replicas, bytes_per_second=rate, notes=notes)
        lines = [*_save_lines(saved), saved.summary()]
        if options.html is not None:
            from paddle_flexckpt.pages.reports import save_rehearsal_page

            lines.append(written(options.html, save_rehearsal_page(saved)))
        text = saved.to_json() if options.json else "\n".join(lines)
        return Outcome(text, int(not saved.ok))
    report = rehearse(
        options.source,
        layout,
        asked,
        cooperative=options.cooperative,
        by_source=options.html is not None,
        bytes_per_second=rate,
        notes=notes,
    )
    lines = [*_lines(report), report.summary()]
    if options.html is not None:
        from paddle_flexckpt.pages.reports import rehearsal_page

        lines.append(written(options.html, rehearsal_page(report)))
    text = report.to_json() if options.json else "\n".join(lines)
    return Outcome(text, int(not report.ok))


def _cut(text: str) -> tuple[str, int | None]:
    glob, equals, axis = text.rpartition("=")
    if not equals or not (axis == "none" or axis.lstrip("-").isdigit()):
        raise ValidationError([f"--cut takes GLOB=AXIS, with a number or none; got {text!r}"])
    return glob, None if axis == "none" else int(axis)


def _lines(report: RehearsalReport) -> list[str]:
    """Return a table of the ranks, those that read the most first, and a line for whatever else is to be known."""
    table: list[tuple[str, ...]] = [("ranks", "needed", "read", "amplification", "requests", "files", "memory")]
    order = sorted(report.ranks, key=lambda each: -each.bytes_read)
    table += [_columns(each) for each in order[:_LINES]]
    lines = _aligned(table, len(order), "read") if order else []
    for name in ("missing", "unexpected", "aliases", "cast", "masters", "maybe_fused"):
        keys = list(getattr(report, name))
        if keys:
            lines.append(f"{name.replace('_', ' ')}: {listed(keys, _KEYS)}")
    return [*lines, *(f"note: {note}" for note in report.notes)]


def _save_lines(report: SaveRehearsal) -> list[str]:
    """Return a table of the ranks, those that write the most first, and the notes."""
    table: list[tuple[str, ...]] = [("rank", "held", "written", "items", "requests", "hashed", "staging")]
    columns = report.ranks
    order = sorted(range(report.world_size), key=lambda rank: -columns["bytes_written"][rank]) if report.ok else []
    for rank in order[:_LINES]:
        own = {name: values[rank] for name, values in columns.items()}
        sizes = {name: format_bytes(value) for name, value in own.items()}
        counts = (str(own["items"]), str(own["writes"]))
        more = (sizes["hashed_bytes"], sizes["staging_bytes"])
        table.append((str(rank), sizes["held_bytes"], sizes["bytes_written"], *counts, *more))
    lines = _aligned(table, len(order), "write") if order else []
    return [*lines, *(f"note: {note}" for note in report.notes)]


def _aligned(table: list[tuple[str, ...]], count: int, what: str) -> list[str]:
    """Return the lines of a table, and one that says how many of so many are not in it."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]
    more = count - len(table) + 1
    return [*lines, f"... and {more} more, which {what} less; --json has all"] if more else lines


def _columns(each: RankReads) -> tuple[str, ...]:
    sizes = map(format_bytes, (each.bytes_needed, each.bytes_read))
    counts = (f"{each.amplification:.2f}", str(each.reads), str(each.files), format_bytes(each.memory_bytes))
    return (format_ranks(each.ranks, _KEYS), *sizes, *counts)
