"""flexckpt show, digest, diff, verify, repair and export.

Tested in tests/cli/test_cli.py and tests/cli/test_verify.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, AoaError, CheckpointError, Problem, ValidationError
from paddle_flexckpt.catalog.texts import in_words_of, printable
from paddle_flexckpt.cli.common import (
    OF_RUN,
    Outcome,
    add_aoa,
    add_checkpoint,
    add_html,
    add_json,
    add_verify,
    aoa_config,
    byte_count,
    checkpoints_of,
    progress_bar,
    read_catalog,
    write_page,
)
from paddle_flexckpt.media.opening import open_backend

if TYPE_CHECKING:
    from paddle_flexckpt.cli.outputs import ShownTensor
    from paddle_flexckpt.report import VerifyReport
    from paddle_flexckpt.tools.tensor_reader import TensorReader

# Modules of a command here are imported when it runs, so that commands start quickly.
# With more values than this, --json of `show` leaves them out.
MOST_VALUES = 1 << 16
# Functions and arguments in errors, and their names on the command line.
_FLAGS = {
    "repair_manifest(path, unique_id, overwrite=True)": "flexckpt repair CHECKPOINT --id ID --overwrite",
    "repair_manifest(overwrite=True)": "flexckpt repair CHECKPOINT --id ID --overwrite",
    "verify_checkpoint()": "flexckpt verify",
    "overwrite=True": "--overwrite",
    "fewer_files=True": "--fewer-files",
    "its save_token": "--save-token",
}
# A key, and a slice of it.
_SLICE = re.compile(r"(.+)\[([^\[\]]*)\]")


def add_command(commands: Any) -> None:
    """Add the parsers of these commands."""
    for add in (_add_show, _add_digest, _add_diff, _add_verify, _add_repair, _add_export):
        add(commands)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="print a tensor, or a slice of it, with statistics",
        epilog="example: flexckpt show run/step_100 'layers.0.weight[0:4, :]'",
    )
    add_checkpoint(parser)
    parser.add_argument("what", metavar="KEY[SLICE]", nargs="+", help="a key, or a slice of it as numpy writes it")
    add_aoa(parser, required=False)
    add_json(parser, "them")
    parser.set_defaults(run=_show)


def _add_digest(commands: Any) -> None:
    parser = commands.add_parser(
        "digest",
        help="print a digest of each tensor, which does not depend on how the checkpoint is cut",
        epilog="example: diff <(flexckpt digest run/step_100) <(flexckpt digest exported/model.safetensors)",
    )
    add_checkpoint(parser)
    add_json(parser, "them")
    add_aoa(parser, required=False)
    parser.set_defaults(run=_digest)


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="list what differs between two checkpoints of any format and layout",
        description="Lists what differs between two checkpoints of any format and layout: keys, shapes, dtypes and "
        "values, the largest relative difference first. The statements of --aoa are about FIRST. The exit status is 0 "
        "where nothing differs, or nothing beyond "
        "--rtol and --atol, and 1 otherwise.",
        epilog="example: flexckpt diff run/step_100 run/step_200 --rtol 1e-5",
    )
    of_first = f"directory or URL of a checkpoint, {OF_RUN}; or a safetensors file"
    parser.add_argument("first", metavar="FIRST", help=of_first)
    parser.add_argument("second", metavar="SECOND", help="of another")
    parser.add_argument("--first-id", type=int, metavar="ID", help="id of the first; by default the highest")
    parser.add_argument("--second-id", type=int, metavar="ID", help="id of the second; by default the highest")
    add_aoa(parser, required=False)
    parser.add_argument("--weights", action="store_false", dest="states", help="leave optimizer states out")
    parser.add_argument("--extra-state", action="store_true", help="compare a run's extra state too")
    allowed = "allow differences of values up to A + R * |value of SECOND|; by default bits are compared"
    parser.add_argument("--rtol", type=float, default=0.0, metavar="R", help=allowed)
    parser.add_argument("--atol", type=float, default=0.0, metavar="A", help="the same")
    add_json(parser)
    add_html(parser)
    parser.set_defaults(run=_diff, newest={"first": "first_id", "second": "second_id"})


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="read a whole checkpoint and list all that is damaged",
        description="Reads a whole checkpoint, or all of a run's steps, and lists all that is damaged. The exit "
        "status is 0 where nothing is, and no save of the run has died, and 1 otherwise.",
        epilog="example: flexckpt verify run/step_00000100",
    )
    add_checkpoint(parser, all_steps=True)
    add_json(parser)
    parser.set_defaults(run=_verify)


def _add_repair(commands: Any) -> None:
    parser = commands.add_parser(
        "repair",
        help="rebuild a lost manifest from the data files, or lost data files from parity",
        description="Rebuilds a lost manifest from the headers of the data files. The checksums are computed anew: "
        "damage that happened before cannot be found afterwards. A manifest that can be read is compared with them. "
        "With --nodes, rebuilds lost data files from parity, and compares each block with its checksum.",
        epilog="example: flexckpt repair run/step_00000100 --id 0",
    )
    parser.add_argument("source", metavar="CHECKPOINT", nargs="?", help="directory or URL of the checkpoint")
    parser.add_argument(
        "--id", type=int, dest="unique_id", metavar="ID", help="its id; of --nodes by default the highest"
    )
    parser.add_argument(
        "--nodes",
        metavar="DIR",
        nargs="+",
        help="in place of CHECKPOINT: nodes' directories, in which lost data files are rebuilt from parity",
    )
    parser.add_argument("--dry-run", action="store_true", help="with --nodes: only print what would be rebuilt")
    parser.add_argument("--overwrite", action="store_true", help="replace the manifest that is there")
    parser.add_argument("--save-token", metavar="TOKEN", help="the save to rebuild, if the files are of several saves")
    parser.add_argument(
        "--fewer-files",
        action="store_true",
        help="rebuild without missing files: the checkpoint is marked as partial, and the exit status is 1",
    )
    parser.set_defaults(run=_repair, refuse=parser.error)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write whole tensors as safetensors files",
        description="Writes whole tensors as safetensors files. Copies config.json, a tokenizer's and such files.",
        epilog="example: flexckpt export run/step_00000100 out --prefix model",
    )
    parser.add_argument("source", metavar="CHECKPOINT", help=f"directory or URL of the checkpoint, {OF_RUN}")
    parser.add_argument("output", metavar="OUTPUT", help="directory or URL to write to; nothing may be there")
    add_aoa(parser, required=False)
    parser.add_argument("--prefix", help="only keys that start with this and a dot, which are taken off")
    parser.add_argument("--states", action="store_true", help="write optimizer states too")
    parser.add_argument(
        "--max-file-bytes", type=byte_count, default=5 << 30, help="largest size of one file (default: 5GiB)"
    )
    add_verify(parser)
    parser.set_defaults(run=_export, newest={"source": ""})


def _show(options: argparse.Namespace) -> str:
    """Return the key, type, shape, statistics and values of each slice. Long arrays are shown without their middle."""
    from paddle_flexckpt.tools.tensor_reader import TensorReader

    config = aoa_config(options.aoa)
    with TensorReader(options.source, options.unique_id, config) as reader:
        shown = [_shown(reader, text) for text in options.what]
    if options.json:
        from paddle_flexckpt.cli.outputs import ShowReport

        return ShowReport(options.source, [tensor for tensor, _ in shown]).to_json()
    return "\n".join(text for _, text in shown)


def _shown(reader: TensorReader, text: str) -> tuple[ShownTensor, str]:
    """Return a tensor, or a slice of it, with statistics: as data and as text."""
    from paddle_flexckpt.cli.outputs import ShownTensor

    match = _SLICE.fullmatch(text)
    if match is not None and text in reader:  # a key may itself end like a slice
        match = None
    if text.count("[") > text.count("]") and text not in reader:
        raise ValidationError([Problem("the bracket of a slice is not closed", key=text, expected=f"{text}]")])
    try:
        parts = [] if match is None else [_part(part.strip()) for part in match[2].split(",") if part.strip()]
        array = reader.read(text if match is None else match[1], tuple(parts))
    except ValidationError:  # a ValueError whose text is complete
        raise
    except (IndexError, ValueError) as error:
        raise ValidationError([Problem(f"cannot read a slice: {error}", key=text)]) from error
    is_complex = array.dtype.kind == "c"
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = array.astype(np.complex128 if is_complex else np.float64)
        text_of_values = np.array2string(values if array.dtype.kind == "V" else array, threshold=64, edgeitems=3)
    finite = values[np.isfinite(values)]
    of_all = finite.size and not is_complex
    found = ShownTensor(
        what=text,
        dtype=array.dtype.name,
        shape=list(array.shape),
        smallest=float(finite.min()) if of_all else None,
        largest=float(finite.max()) if of_all else None,
        mean=float(finite.mean()) if of_all else None,
        deviation=float(finite.std()) if of_all else None,
        zeros=int((values == 0).sum()),
        not_finite=int(values.size - finite.size),
        values=(array if array.dtype.kind in "biu" else values).tolist() if values.size <= MOST_VALUES else None,
    )
    head = f"{printable(text)}: {found.dtype} {found.shape}"
    if of_all:
        head += f", from {found.smallest:.6g} to {found.largest:.6g}"
        head += f", mean {found.mean:.6g}, deviation {found.deviation:.6g}"
    shown = _as_text(text, array) or text_of_values
    return found, f"{head}, {found.zeros} zeros, {found.not_finite} not finite\n{shown}"


def _as_text(key: str, array: np.ndarray) -> str:
    """Return the text that a tensor of a run's extra state is; "" if it is none."""
    if not key.startswith(EXTRA_STATE) or array.dtype != np.uint8:
        return ""
    with contextlib.suppress(ValueError):
        json.loads(array.tobytes())
        return printable(array.tobytes().decode())
    return ""


def _part(text: str) -> Any:
    """Return an index, a slice or ``...`` from its text."""
    if text == "...":
        return ...
    numbers = [int(number) if number.strip() else None for number in text.split(":")]
    if len(numbers) > 3:
        raise ValueError(f"a slice has at most three numbers; got {text!r}")
    return numbers[0] if len(numbers) == 1 else slice(*numbers)


def _digest(options: argparse.Namespace) -> str:
    """Return a line for each tensor: its digest and its key."""
    from paddle_flexckpt.tools.digests import digest_checkpoint

    config = aoa_config(options.aoa)
    with progress_bar(options.json) as progress:
        found = digest_checkpoint(options.source, options.unique_id, config, progress=progress)
    if options.json:
        from paddle_flexckpt.cli.outputs import DigestReport

        return DigestReport(options.source, found).to_json()
    return "\n".join(f"{digest}  {printable(key)}" for key, digest in found.items())


def _diff(options: argparse.Namespace) -> Outcome:
    """Return one line for each difference and a summary; code 1 if there is one that is not allowed."""
    from paddle_flexckpt.tools.comparison import diff

    config = aoa_config(options.aoa)
    names = "first_id", "second_id", "states", "extra_state", "rtol", "atol"
    chosen = {name: getattr(options, name) for name in names}
    with progress_bar(options.json) as progress:
        try:
            report = diff(options.first, options.second, config, progress=progress, **chosen)
        except AoaError as error:
            raise AoaError([*error.problems, *_fits_second(options.second, config)]) from error
    lines = [*report.lines(), report.summary()]
    if options.html is not None:
        from paddle_flexckpt.pages.report_pages import diff_page

        lines.append(write_page(options.html, diff_page(report)))
    lines = [report.to_json()] if options.json else lines
    return Outcome("\n".join(lines), int(not report.within_tolerance))


def _fits_second(second: str, config: Any) -> list[str]:
    """Return the text that statements which do not fit FIRST fit SECOND; empty if they do not."""
    from paddle_flexckpt.aoa import compile_program

    try:
        compile_program(config, read_catalog(second), None)
    except CheckpointError:
        return []
    return ["the statements fit SECOND, and --aoa is about FIRST. Remedy (FC601): give the two in the other order"]


def _verify(options: argparse.Namespace) -> Outcome:
    """Return one line for each problem and a summary, and the unfinished saves of a run; code 1 if not all is well."""
    from paddle_flexckpt.cli.overview import find_lost, find_unfinished, is_all_running, lost_line, unfinished_lines
    from paddle_flexckpt.tools.verification import verify_checkpoint

    steps = checkpoints_of(options.source, options.unique_id)
    reports = []
    for path, unique_id in [(each.path, each.unique_id) for each in steps] or [(options.source, options.unique_id)]:
        with progress_bar(options.json) as progress:
            reports.append(verify_checkpoint(path, unique_id, progress=progress))
    damaged = sum(not each.ok for each in reports)
    root = open_backend(options.source)
    unfinished, lost = (find_unfinished(root), find_lost(root)) if steps else ([], [])
    ok = not damaged and not lost and is_all_running(unfinished)
    if options.json and steps:
        from paddle_flexckpt.cli.outputs import VerifyRunReport

        return Outcome(VerifyRunReport(options.source, ok, reports, unfinished, lost).to_json(), int(not ok))
    if options.json:
        return Outcome(reports[0].to_json(), damaged)
    lines = [line for each in reports for line in (*_problem_lines(each), each.summary())]
    lines += [f"{options.source}: {len(steps) - damaged} of {len(steps)} checkpoints are whole"] if steps else []
    return Outcome(
        "\n".join([*lines, *map(lost_line, lost), *unfinished_lines(options.source, unfinished)]), int(not ok)
    )


def _problem_lines(report: VerifyReport) -> list[str]:
    """Return a line for each problem; of a file that is too short, one line with the number of tensors cut off."""
    from paddle_flexckpt.native.verify import FILE_ENDS, TOO_SHORT

    problems, place = report.problems, f"{report.path} --id {report.unique_id}"
    names = {words: flag.replace("CHECKPOINT --id ID", place) for words, flag in _FLAGS.items()}
    short = {each.file for each in problems if each.what == TOO_SHORT}
    cut_off: dict[str | None, set[str | None]] = {file: set() for file in short}
    shown = []
    for each in problems:
        if each.file in short and each.what.endswith(FILE_ENDS):
            cut_off[each.file].add(each.key)
        else:
            shown.append(each)
    lines = []
    for each in shown:
        keys = len(cut_off[each.file]) if each.what == TOO_SHORT else 0
        more = f" ({keys} tensor{'s' * (keys > 1)} not whole; --json lists all)" if keys else ""
        lines.append(in_words_of(" ".join(str(each).split()), names) + more)
    return lines


def _repair(options: argparse.Namespace) -> Outcome:
    """Return a summary; code 1 if the checkpoint is partial, or if lost files cannot be rebuilt."""
    if (options.source is None) == (options.nodes is None):
        options.refuse("give CHECKPOINT, whose manifest is rebuilt, or --nodes, whose data files are")
    if options.nodes is None and (options.unique_id is None or options.dry_run):
        options.refuse("--dry-run goes with --nodes alone" if options.dry_run else "CHECKPOINT needs --id")
    if options.nodes is not None and (options.overwrite or options.save_token or options.fewer_files):
        options.refuse("--overwrite, --save-token and --fewer-files go with CHECKPOINT alone")
    if options.nodes is not None:
        return _repair_nodes(options)
    from paddle_flexckpt.tools.verification import repair_manifest

    chosen = {name: getattr(options, name) for name in ("overwrite", "save_token", "fewer_files")}
    try:
        report = repair_manifest(options.source, options.unique_id, **chosen)
    except ValidationError as error:
        raise ValidationError(in_words_of(str(error), _FLAGS)) from None
    return Outcome(report.summary(), int(bool(report.partial)))


def _repair_nodes(options: argparse.Namespace) -> Outcome:
    """Return a line for each lost file, and a summary; code 1 if one cannot be rebuilt."""
    from paddle_flexckpt.native.node_repair import rebuild_lost_files

    found = rebuild_lost_files(options.nodes, options.unique_id, options.dry_run)
    done = "can be rebuilt" if options.dry_run else "was rebuilt and verified"
    lines = [f"{name} {done} in {path}" for name, path in found.rebuilt.items()]
    lines += [f"{name} is lost: {reason}" for name, reason in found.reasons.items()]
    summary = (
        f"id {found.unique_id}: of {len(lines)} lost data files {len(found.rebuilt)} {done.replace('was', 'were')}"
    )
    return Outcome("\n".join([*lines, summary]), int(bool(found.reasons)))


def _export(options: argparse.Namespace) -> str:
    from paddle_flexckpt.tools.export import export_safetensors

    config = aoa_config(options.aoa)
    chosen = {name: getattr(options, name) for name in ("prefix", "states", "max_file_bytes", "verify")}
    with progress_bar() as progress:
        return export_safetensors(options.source, options.output, config, progress=progress, **chosen).summary()
