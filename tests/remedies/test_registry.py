"""Each remedy that changes what is saved or loaded has a scenario that follows it."""

from __future__ import annotations

from pathlib import Path

from tests.remedies.collected import PACKAGE, Remedy, remedies
from tests.remedies.following import scenarios

_HERE = Path(__file__).parent


def _listed(name: str) -> list[str]:
    lines = (_HERE / name).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _followed(remedy: Remedy) -> bool:
    return any(module == remedy.module and remedy.has(words) for module, words in scenarios())


def test_each_remedy_has_a_scenario_or_changes_nothing() -> None:
    changes_nothing = set(_listed("changes_nothing.txt"))
    missing = [str(each) for each in remedies() if str(each) not in changes_nothing and not _followed(each)]
    print(f"{len(remedies())} remedies, {len(changes_nothing)} change nothing, {len(scenarios())} scenarios")
    assert not missing, "write a scenario (tests/remedies/README.md) that follows\n" + "\n".join(missing)


def test_nothing_is_listed_that_is_gone() -> None:
    known = set(map(str, remedies()))
    listed = _listed("changes_nothing.txt")
    assert [line for line in listed if line not in known] == []


def test_nothing_is_listed_twice_or_beside_its_scenario() -> None:
    listed = _listed("changes_nothing.txt")
    assert len(listed) == len(set(listed))
    assert [str(each) for each in remedies() if str(each) in set(listed) and _followed(each)] == []


def test_each_scenario_follows_a_remedy_that_is_there() -> None:
    known = remedies()
    gone = {
        place: (module, words)
        for (module, words), place in scenarios().items()
        if not any(each.module == module and each.has(words) for each in known)
    }
    assert gone == {}


def test_a_new_remedy_is_found(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "new.py").write_text(
        '''"""Say nothing. Remedy: of a docstring"""
_HINT = "from a constant"
def f(x, key):
    remedy = "by name " + x if x else f"of {key}"
    what, remedy = "wrong", "in a tuple"
    Problem("wrong", key, remedy=remedy)
    Problem("wrong", key, remedy=_HINT)
    Problem("wrong", key, remedy=f"directly, {key}")
    log.warning("trouble. Remedy: in a warning")
    raise ValueError(f"{key} is wrong. Remedy: {key} in " "two parts")
''',
        "utf-8",
    )
    texts = ["from a constant", "by name {}", "of {}", "in a tuple", "directly, {}", "in a warning", "{} in two parts"]
    assert {each.text for each in remedies(tmp_path)} == set(texts)


def test_the_package_is_where_it_is_looked_for() -> None:
    assert (PACKAGE / "transfer" / "problems.py").is_file()
