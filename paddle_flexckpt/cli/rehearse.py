"""flexckpt rehearse, map and bench: what a job would read, write and need, without its ranks.

Tested in tests/cli/test_rehearse.py, tests/cli/test_map.py and tests/cli/test_bench.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.aoa.model_rules import rule_names
from paddle_flexckpt.aoa.statements import AoaConfig
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.layer_ranges import grouped
from paddle_flexckpt.catalog.texts import format_bytes, format_ranks, printable
from paddle_flexckpt.cli.common import (
    COMMAND,
    Outcome,
    add_aoa,
    add_checkpoint,
    add_cut,
    add_html,
    aoa_config,
    byte_count,
    parse_cut,
    quoted,
    table,
    write_page,
)
from paddle_flexckpt.pages.holder_pages import holders_page
from paddle_flexckpt.pages.pictures import holders_picture
from paddle_flexckpt.planning.job_layout import JobLayout
from paddle_flexckpt.tools.holders import HoldersReport, Part, find_holders
from paddle_flexckpt.tools.models import layout_of
from paddle_flexckpt.tools.probe import probe, read_probe
from paddle_flexckpt.tools.rehearsal import rehearse
from paddle_flexckpt.tools.rehearsal_report import RankReads, RehearsalReport
from paddle_flexckpt.tools.save_rehearsal import SaveRehearsal, rehearse_save
from paddle_flexckpt.transfer.options import LoadOptions

# The most lines of the table, and keys of a list; all are in the JSON.
_LINES, _KEYS = 16, 3
# The most ranges of ranks, and files, in one line of the text; all are in the JSON.
_RANGES = 4


def add_command(commands: Any) -> None:
    """Add the parsers of the commands."""
    parser = commands.add_parser(
        "rehearse",
        help="predict whether a checkpoint loads under another layout, and what each rank would read, or would save",
        description="Predicts whether a checkpoint loads under another layout, or with which error the job fails, and "
        "what each rank would read and hold; with --save what that job would write. Reads the manifest alone, and "
        "checks that the files exist. The exit status is 0 if it loads, and 1 if it does not.",
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
        "--gbps",
        type=float,
        metavar="N",
        help="gigabytes per second that one rank reads while all read, to estimate time",
    )
    parser.add_argument(
        "--probe",
        metavar="PATH",
        help="to estimate time: a directory that all ranks of a node share, which is measured now, or a file with the "
        "output of `flexckpt bench --json`",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=1,
        metavar="N",
        help="with --probe: ranks that share the measured speed (1)",
    )
    parser.add_argument(
        "--cooperative",
        action="store_true",
        help="also predict comm_method='cooperative', where one rank reads a section for all",
    )
    parser.add_argument(
        "--object-store",
        action="store_true",
        help="count requests as if the checkpoint were in an object store; with --save, those that send data files",
    )
    parser.add_argument("--save", action="store_true", help="predict what the job would save, instead of a load")
    parser.add_argument("--save-replicas", action="store_true", help="with --save: as in save_state_dict")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with all ranks")
    add_html(parser)
    parser.set_defaults(run=_rehearse)
    _add_map(commands)
    _add_bench(commands)


def add_layout(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add ``--to`` and the other options that describe the layout of a job."""
    parser.add_argument(
        "--to",
        required=required,
        metavar="STRATEGY",
        help="the degrees of the job: tp (or mp), pp, vpp, dp, ep, sep, and sharding=KIND:DEGREE (v1, v2, stage2, "
        "stage3, muon); ep=dp:4 and ep=tp:4 name the ranks of experts; or a mesh, such as "
        "'mesh=2x4:dp,mp;sharding=stage1:dp;*.q_proj.weight=R,S1', or its JSON or YAML file",
    )
    add_aoa(parser, required=False)
    parser.set_defaults(newest={"source": "unique_id", "model": ""})
    parser.add_argument(
        "--model",
        metavar="OTHER",
        help="a checkpoint of the job's model, or its config.json (of a family with model rules), if it "
        "is not what CHECKPOINT holds",
    )
    parser.add_argument(
        "--variant",
        choices=("plain", "fused"),
        default="plain",
        help="with --model config.json: what the model fuses, as of the rules of its family",
    )
    add_cut(parser)
    parser.add_argument("--weights", action="store_true", help="the job has no optimizer")


def layout_from(options: argparse.Namespace, config: AoaConfig | None) -> tuple[JobLayout, list[str]]:
    """Return the layout of the job from the options of :func:`add_layout`, and its assumptions."""
    if options.model in rule_names():
        raise ValidationError(
            f"--model {options.model} is a family of models; a rehearsal needs the sizes of one. Remedy (FC101): give "
            "the path of its config.json, or of a checkpoint"
        )
    return layout_of(
        options.source,
        options.to,
        unique_id=options.unique_id,
        aoa_config=config,
        model=options.model,
        variant=options.variant,
        cuts=[parse_cut(text) for text in options.cut],
        states=not options.weights,
    )


def _rehearse(options: argparse.Namespace) -> Outcome:
    """Return a table of the ranks and remarks, or the job's error; code 1 if it would fail."""
    config = aoa_config(options.aoa)
    rate, request = _speed(options)
    of_load = {"--cooperative": options.cooperative, "--strict": options.strict != "missing"}
    wrong = [name for name, is_given in of_load.items() if is_given]
    if options.save and wrong:
        raise ValidationError([f"{wrong[0]} is an option of a load and cannot be given with --save"])
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
    if options.save:
        chosen = {"save_replicas": options.save_replicas, "object_store": options.object_store}
        saved = rehearse_save(layout, bytes_per_second=rate, notes=notes, **chosen)
        lines = [*_save_lines(saved), saved.summary(), *_hint(options.source, saved.error)]
        if options.html is not None:
            from paddle_flexckpt.pages.report_pages import save_rehearsal_page

            lines.append(write_page(options.html, save_rehearsal_page(saved)))
        text = saved.to_json() if options.json else "\n".join(lines)
        return Outcome(text, int(not saved.ok))
    report = rehearse(
        options.source,
        layout,
        asked,
        cooperative=options.cooperative,
        object_store=options.object_store,
        by_source=options.html is not None,
        bytes_per_second=rate,
        request_seconds=request,
        notes=notes,
    )
    lines = [*_lines(report), report.summary(), *_hint(options.source, report.error)]
    if options.html is not None:
        from paddle_flexckpt.pages.report_pages import rehearsal_page

        lines.append(write_page(options.html, rehearsal_page(report)))
    text = report.to_json() if options.json else "\n".join(lines)
    return Outcome(text, int(not report.ok))


def _hint(source: str, error: str) -> list[str]:
    """Return the command that helps where the job has an error."""
    return [] if not error or COMMAND.search(error) else [f"see `flexckpt inspect {quoted(source)}`"]


def _speed(options: argparse.Namespace) -> tuple[float | None, float]:
    """Return one rank's bytes per second while all ranks read or write, and the seconds that a request adds."""
    if options.gbps is not None and not options.gbps > 0:
        raise ValidationError([f"--gbps takes a positive number; got {options.gbps}"])
    if options.ranks_per_node < 1:
        raise ValidationError([f"--ranks-per-node takes a positive number; got {options.ranks_per_node}"])
    if options.probe is None:
        return None if options.gbps is None else options.gbps * 1e9, 0.0
    if options.gbps is not None:
        raise ValidationError(["--gbps and --probe both say how fast the medium is: give one of them"])
    found = read_probe(options.probe) if options.probe.endswith(".json") else probe(options.probe)
    rate = found.write_bytes_per_second if options.save else found.read_bytes_per_second
    return rate / options.ranks_per_node, found.request_seconds * options.ranks_per_node


def _lines(report: RehearsalReport) -> list[str]:
    """Return a table of the ranks, those that read the most first, and a line for each remark."""
    rows: list[tuple[str, ...]] = [("ranks", "needed", "read", "amplification", "requests", "files", "memory")]
    order = sorted(report.ranks, key=lambda each: -each.bytes_read)
    rows += [_columns(each) for each in order[:_LINES]]
    lines = _aligned(rows, len(order), "read") if order else []
    for name in ("missing", "unexpected", "aliases", "cast", "masters", "maybe_fused"):
        keys = getattr(report, name)
        if keys:
            lines.append(f"{name.replace('_', ' ')}: {listed(grouped(keys), _KEYS)}")
    busiest = max(report.ranks, key=lambda each: each.object_requests, default=None)
    if busiest is not None and busiest.object_requests:
        lines.append(
            f"object store: {sum(len(each.ranks) * each.object_requests for each in report.ranks)} requests; rank "
            f"{busiest.ranks[0]} makes the most, {busiest.object_requests} for {format_bytes(busiest.object_bytes)}"
        )
    return [*lines, *(f"note: {note}" for note in report.notes)]


def _save_lines(report: SaveRehearsal) -> list[str]:
    """Return a table of the ranks, those that write the most first, and the notes."""
    rows: list[tuple[str, ...]] = [("rank", "held", "written", "items", "requests", "hashed", "staging")]
    columns = report.ranks
    order = sorted(range(report.world_size), key=lambda rank: -columns["bytes_written"][rank]) if report.ok else []
    for rank in order[:_LINES]:
        own = {name: values[rank] for name, values in columns.items()}
        sizes = {name: format_bytes(value) for name, value in own.items()}
        counts = (str(own["items"]), str(own["writes"]))
        more = (sizes["hashed_bytes"], sizes["staging_bytes"])
        rows.append((str(rank), sizes["held_bytes"], sizes["bytes_written"], *counts, *more))
    lines = _aligned(rows, len(order), "write") if order else []
    requests = columns.get("object_requests")
    if requests:
        most = requests.index(max(requests))
        lines.append(f"object store: {sum(requests)} requests; rank {most} makes the most, {requests[most]}")
    return [*lines, *(f"note: {note}" for note in report.notes)]


def _aligned(rows: list[tuple[str, ...]], count: int, what: str) -> list[str]:
    """Return the lines of a table, and one with the number of lines left out."""
    lines, more = table(rows, right=range(1, len(rows[0]))), count - len(rows) + 1
    return [*lines, f"... and {more} more, which {what} less; --json has all"] if more else lines


def _columns(each: RankReads) -> tuple[str, ...]:
    sizes = map(format_bytes, (each.bytes_needed, each.bytes_read))
    counts = (f"{each.amplification:.2f}", str(each.reads), str(each.files), format_bytes(each.memory_bytes))
    return (format_ranks(each.ranks, _KEYS), *sizes, *counts)


def _add_map(commands: Any) -> None:
    parser = commands.add_parser(
        "map",
        help="list the ranks that have each part of a tensor, and those that would need it under another layout",
        description="Lists the rank and file of each part of each tensor, and with --to also the ranks of another job "
        "that would need it. Only the manifest is read.",
        epilog="example: flexckpt map run/step_100 'layers.0.*' --to tp=4,pp=2",
    )
    add_checkpoint(parser)
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a key, or a pattern with *; by default all keys")
    add_layout(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print all as JSON")
    add_html(parser)
    parser.add_argument("--png", metavar="FILE", help="draw a picture too (needs the extra viz)")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="for --html and --png, seconds by rank: the report of a save as JSON, or a list of those of all ranks",
    )
    parser.set_defaults(run=_map)


def _map(options: argparse.Namespace) -> str:
    """Return a line for each part of each tensor, and a summary."""
    for name in ("aoa", "model", "cut", "weights"):
        if getattr(options, name) and options.to is None:
            raise ValidationError([f"--{name} describes the job that --to names. Remedy (FC101): give --to STRATEGY"])
    if options.report is not None and options.html is None and options.png is None:
        raise ValidationError(["--report is for a page or a picture. Remedy (FC101): give --html FILE or --png FILE"])
    seconds = read_seconds(options.report) if options.report is not None else {}
    config = aoa_config(options.aoa)
    layout, notes = (None, []) if options.to is None else layout_from(options, config)
    report = find_holders(options.source, options.keys, unique_id=options.unique_id, layout=layout, notes=notes)
    lines = [*_map_lines(report), *(f"note: {note}" for note in report.notes), report.summary()]
    if options.html is not None:
        lines.append(write_page(options.html, holders_page(report, seconds)))
    if options.png is not None:
        holders_picture(report, options.png, seconds)
        lines.append(f"wrote {options.png}")
    return report.to_json() if options.json else "\n".join(lines)


def read_seconds(path: str) -> dict[str, list[float]]:
    """Return seconds by phase and rank from the report of a save, or from the reports of all ranks.

    Raises:
        ValidationError: The file holds neither.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if isinstance(found, list):
            phases = dict.fromkeys(name for each in found for name in each["seconds"])
            return {name: [float(each["seconds"].get(name, 0)) for each in found] for name in phases}
        return {str(name): [float(each) for each in values] for name, values in found["rank_seconds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = "a SaveReport as JSON, or a list of the reports of all ranks"
        problem = Problem("this is no report with seconds", file=path, expected=expected, got=repr(error))
        raise ValidationError([problem]) from error


def _map_lines(report: HoldersReport) -> list[str]:
    lines = []
    for key, tensor in report.tensors.items():
        lines.append(f"{printable(key)}: {tensor.dtype} {tensor.shape}")
        rows = [_map_columns("stored", part) for part in tensor.stored]
        rows += [_map_columns("needed", part) for part in tensor.needed]
        lines += [f"  {line}" for line in table(rows, right=(3,))]
    return lines


def _map_columns(what: str, part: Part) -> Sequence[str]:
    ranks = ("rank " if len(part.ranks) == 1 else "ranks ") + format_ranks(part.ranks, _RANGES)
    files = ", ".join(part.files[:_RANGES]) + (" ..." if len(part.files) > _RANGES else "")
    return what, part.where(), ranks, format_bytes(part.bytes), files


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast a medium is written and read, and how long a small read takes",
        description="Writes scratch files to a directory by several threads, reads them, and removes them. `flexckpt "
        "rehearse --probe` reads a file with the output of --json.",
        epilog="example: flexckpt bench run --json > run.json; flexckpt rehearse run/step_9 --to tp=4 --probe run.json",
    )
    parser.add_argument("path", metavar="PATH", help="a directory, or the URL of one")
    parser.add_argument(
        "--bytes", type=byte_count, default=256 << 20, metavar="SIZE", help="bytes of all scratch files (256MiB)"
    )
    parser.add_argument(
        "--threads", type=int, default=4, metavar="N", help="threads that write and read at the same time (4)"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> str:
    """Return one line, or JSON."""
    report = probe(options.path, options.bytes, options.threads)
    return report.to_json() if options.json else report.summary()
