"""Whether patches fit the installed package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_flexckpt.patching.changes import compose_files, interrupted, misfits, present_state
from paddle_flexckpt.patching.errors import PatchError
from paddle_flexckpt.patching.index import Patch
from paddle_flexckpt.patching.package import Package
from paddle_flexckpt.patching.record import Record


@dataclass(frozen=True)
class Finding:
    """What is the case with one patch.

    Attributes:
        patch: The patch.
        package: The package; None if it is not installed.
        status: ``"applied"``; ``"fits"``; ``"does not fit"``; ``"conflicts"`` with a patch that is in;
            ``"interrupted"``; ``"changed"``: patched files have been changed since; ``"not installed"``.
        details: Why, where it is none of the first two.
    """

    patch: Patch
    package: Package | None
    status: str
    details: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the patch is in, or could be put in."""
        return self.status in ("applied", "fits")


def check_patches(package: Package | None, patches: Sequence[Patch]) -> list[Finding]:
    """Looks at a package without changing anything.

    Args:
        package: The package; None if it is not installed.
        patches: Patches for it.
    """
    if package is None:
        return [Finding(patch, None, "not installed") for patch in patches]
    record = Record(package)
    try:
        journal = record.journal()
        if journal is not None:
            return [
                Finding(patch, package, "interrupted", (f"the package {interrupted(journal)}",)) for patch in patches
            ]
        state = present_state(package, record)
    except PatchError as error:
        return [Finding(patch, package, "changed", (str(error),)) for patch in patches]
    findings = []
    for patch in patches:
        if patch.name in state.patches:
            findings.append(Finding(patch, package, "applied"))
            continue
        details = misfits(package, state, patch)
        if details:
            findings.append(Finding(patch, package, "does not fit", tuple(details)))
            continue
        try:
            shared = [record.patch(state, name) for name in state.patches]
            paths = {file.path for each in (patch, *shared) for file in each.files}
            originals = {
                path: record.blob(state.files[path]["original"]) if path in state.files else package.read(path) or b""
                for path in paths
            }
            compose_files(originals, [*shared, patch])
            findings.append(Finding(patch, package, "fits"))
        except PatchError as error:
            findings.append(Finding(patch, package, "conflicts", (str(error),)))
    return findings
