"""Patches put into a package and taken out of it.

Any set of patches that are in a package has one result: the released files with all of their edits. A change goes from
one such set to another:

1. every file is compared with what is known of it, and the new contents are made, all of them in memory;
2. the old contents, the new ones and the diffs are kept beside the package, then the journal that names them;
3. each file is replaced at once by its new content;
4. the new state is written, the journal removed.

Whatever is killed when: before the journal nothing has happened, and after it either command, ``apply`` or ``revert``
with the same names, knows the contents of both ends and brings all files to one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paddle_flexckpt.patching.diff import FileDiff, compose
from paddle_flexckpt.patching.errors import PatchError
from paddle_flexckpt.patching.index import Patch, sha256
from paddle_flexckpt.patching.package import Package
from paddle_flexckpt.patching.record import Journal, Record, State


def apply_patches(package: Package, patches: Sequence[Patch]) -> list[str]:
    """Puts patches into a package, all of them or none.

    Args:
        package: The package.
        patches: Those to put in; ones that are in already are passed over.

    Returns:
        The files that were changed.

    Raises:
        PatchError: One of them does not fit these files or those patches that are in, a file has been changed by
            somebody else, or another change was cut short. Nothing is changed then.
        OSError: A file cannot be written; what was begun can be carried through or undone.
    """
    record = Record(package)
    with record.locked():
        journal = record.journal()
        if journal is not None:
            return _resume(package, record, journal, "apply", [patch.name for patch in patches])
        state = present_state(package, record)
        problems = [
            problem
            for patch in patches
            if patch.name not in state.patches
            for problem in misfits(package, state, patch)
        ]
        if problems:
            raise PatchError(_head(package, "cannot be patched; nothing was changed"), problems)
        present = [record.patch(state, name) for name in state.patches]
        wanted = present + [patch for patch in patches if patch.name not in state.patches]
        return _change(package, record, state, wanted, "apply", [patch.name for patch in patches])


def revert_patches(package: Package, names: Sequence[str]) -> list[str]:
    """Takes patches out of a package: its files become what they would be had these never been put in.

    Args:
        package: The package.
        names: Of patches that are in.

    Returns:
        The files that were changed.

    Raises:
        PatchError: One of them is not in, a file has been changed since, or another change was cut short. Nothing is
            changed then.
        OSError: A file cannot be written; what was begun can be carried through or undone.
    """
    record = Record(package)
    with record.locked():
        journal = record.journal()
        if journal is not None:
            return _resume(package, record, journal, "revert", names)
        state = present_state(package, record)
        absent = [name for name in names if name not in state.patches]
        if absent:
            inside = ", ".join(state.patches) or "none"
            raise PatchError(
                _head(package, f"has no patch {', '.join(map(repr, absent))} of this command; it has {inside}")
            )
        wanted = [record.patch(state, name) for name in state.patches if name not in names]
        return _change(package, record, state, wanted, "revert", names)


def applied_patches(package: Package) -> list[Patch]:
    """The patches that are recorded as being in, or on their way, as they were when applied."""
    record = Record(package)
    journal, state = record.journal(), record.state()
    states = [state] if journal is None else [state, journal.before, journal.after]
    return list({name: record.patch(each, name) for each in states for name in each.patches}.values())


def present_state(package: Package, record: Record) -> State:
    """The patches that are in, after a comparison of every file with what is known of it.

    A package that was installed anew has none: then nothing of what was recorded is left in its files.

    Raises:
        PatchError: A file is neither as patched, nor are all as released.
    """
    state = record.state()
    problems = [
        f"{package.root / path}: expected sha256 {file['current']}, as patched; got {_checksum(package, path)}"
        for path, file in state.files.items()
        if _checksum(package, path) != file["current"]
    ]
    if not problems:
        return state
    released = all(_checksum(package, path) == file["original"] for path, file in state.files.items())
    if released or package.version != state.version:
        return State(package.version)
    raise PatchError(
        _head(package, f"was changed after {', '.join(state.patches)} had been applied; nothing was changed now"),
        [
            *problems,
            "Remedy: undo those changes, or install the package again (pip install --force-reinstall --no-deps)",
        ],
    )


def misfits(package: Package, state: State, patch: Patch) -> list[str]:
    """Why a patch that is not in cannot be put in; nothing if it can.

    Args:
        package: The package.
        state: The patches that are in it, from :func:`present_state`.
        patch: The patch.
    """
    problems = []
    for file in patch.files:
        known = state.files.get(file.path)
        got = known["original"] if known else _checksum(package, file.path)
        if got == file.after:
            problems.append(f"{patch.name}: {package.root / file.path} has this patch already, put in by other means")
        elif got != file.before:
            problems.append(
                f"{patch.name}: {package.root / file.path}: expected sha256 {file.before}, as in "
                f"{patch.package} {' or '.join(patch.versions)}; got {got}"
            )
    return problems


def _checksum(package: Package, path: str) -> str:
    content = package.read(path)
    return "no such file" if content is None else sha256(content)


def _head(package: Package, text: str) -> str:
    return f"package {package.name!r} {package.version or '(unknown version)'} in {package.root} {text}"


def compose_files(originals: Mapping[str, bytes], patches: Iterable[Patch]) -> dict[str, bytes]:
    """The files that patches change, as these leave them.

    Args:
        originals: The released files.
        patches: The patches; their order does not matter.

    Raises:
        PatchError: Two of them change the same lines, or a patch does not do what the index says.
    """
    diffs: dict[str, list[tuple[str, FileDiff]]] = {}
    for patch in patches:
        mine = patch.diffs()
        for file in patch.files:
            alone = sha256(compose(originals[file.path], [(patch.name, mine[file.path])]))
            if alone != file.after:
                raise PatchError(
                    f"patch {patch.name!r} does not do what the index says (file {file.path!r}); expected sha256 "
                    f"{file.after}; got {alone}"
                )
            diffs.setdefault(file.path, []).append((patch.name, mine[file.path]))
    return {path: compose(originals[path], each) for path, each in diffs.items()}


def _change(
    package: Package, record: Record, state: State, patches: Sequence[Patch], verb: str, names: Sequence[str]
) -> list[str]:
    """From the present state to the one with just these patches; ``verb`` and ``names`` are the command's."""
    paths = dict.fromkeys(file.path for patch in patches for file in patch.files)
    originals = {
        path: record.blob(state.files[path]["original"]) if path in state.files else package.read(path) or b""
        for path in {**paths, **state.files}
    }
    contents = compose_files(originals, patches)
    for path in {**contents, **state.files}:
        record.keep(originals[path])
        record.keep(contents.get(path, b""))
        record.keep(package.read(path) or b"")
    after = State(
        version=package.version,
        patches={patch.name: {**patch.as_dict(), "text": record.keep(patch.text)} for patch in patches},
        files={
            path: {"original": sha256(originals[path]), "current": sha256(contents[path])} for path in sorted(contents)
        },
    )
    journal = Journal(verb, tuple(names), state, after)
    record.begin(journal)
    return _carry(package, record, journal, after)


def _resume(package: Package, record: Record, journal: Journal, verb: str, names: Sequence[str]) -> list[str]:
    """Finishes or undoes a change that was cut short."""
    if set(names) != set(journal.names):
        raise PatchError(_head(package, interrupted(journal)))
    return _carry(package, record, journal, journal.after if verb == journal.verb else journal.before)


def interrupted(journal: Journal) -> str:
    """What to say of a change that was cut short."""
    names = " ".join(journal.names)
    other = "revert" if journal.verb == "apply" else "apply"
    return (
        f"is in the middle of `--{journal.verb} {names}`, which was cut short. Remedy: the same command finishes it, "
        f"`--{other} {names}` undoes it"
    )


def _carry(package: Package, record: Record, journal: Journal, target: State) -> list[str]:
    """Brings every file to its content in a state of the journal."""
    todo, problems = [], []
    for path in journal.paths():
        got, wanted = _checksum(package, path), journal.target(path, target)
        ends = journal.target(path, journal.before), journal.target(path, journal.after)
        if got not in ends:
            problems.append(f"{package.root / path}: expected sha256 {' or '.join(ends)}; got {got}")
        elif got != wanted:
            todo.append((path, record.blob(wanted)))
    if problems:
        raise PatchError(_head(package, "was changed by somebody else; nothing was changed now"), problems)
    for path in journal.paths():
        package.discard(path)
    for path, content in todo:
        package.write(path, content)
    record.finish(target)
    return [path for path, _ in todo]
