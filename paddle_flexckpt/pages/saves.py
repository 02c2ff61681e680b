"""Show the report of a save: bytes and seconds of ranks, and the holders. Tested in tests/pages/test_saves.py."""

from __future__ import annotations

from collections.abc import Mapping

from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.engine.holders import HoldersReport
from paddle_flexckpt.pages.holders import parts_table, tensors_drawn
from paddle_flexckpt.pages.markup import Content, Section, bullets, facts, join, page, paragraph, table
from paddle_flexckpt.pages.ranks import by_rank, of_bytes, of_seconds
from paddle_flexckpt.report import SaveReport


def save_page(
    report: SaveReport, holders: HoldersReport, step: int | None = None, metrics: Mapping[str, float] | None = None
) -> str:
    """Return a page of a save.

    Args:
        report: Its report.
        holders: The ranks that saved each part.
        step: Training step.
        metrics: The metrics recorded with it.
    """
    pairs: list[tuple[str, Content]] = [
        ("step", "unknown" if step is None else step),
        ("id", report.unique_id),
        ("tensors", report.keys),
        ("written", format_bytes(report.total_bytes)),
        ("held", format_bytes(report.held_bytes)),
        ("imbalance", f"{report.imbalance:.2f}"),
        *((f"seconds, {name}", f"{value:.3g}") for name, value in report.seconds.items()),
    ]
    overview = [facts(pairs)]
    if metrics:
        overview += [paragraph("Metrics:"), facts((name, f"{value:.6g}") for name, value in metrics.items())]
    if report.warnings:
        overview += [paragraph("Warnings:"), bullets(report.warnings)]
    seconds = [of_seconds(name, values) for name, values in report.rank_seconds.items()]
    found = [
        Section("Overview", join(overview)),
        Section("Seconds by rank and phase", by_rank("rank", seconds)),
        Section("Bytes written by each rank", by_rank("rank", [of_bytes("Written", report.rank_bytes)])),
    ]
    if report.replicas:
        rows = sorted(report.replicas.items(), key=lambda pair: (pair[1] == "equal", pair[0]))
        found.append(Section("Replicas", table("Replicas that need not be equal", ("Key", "How"), rows[:1000])))
    found += [Section("Largest tensors", tensors_drawn(holders)), Section("Their parts", parts_table(holders))]
    title = "A save" if step is None else f"Checkpoint of step {step}"
    return page(title, report.summary(), found)
