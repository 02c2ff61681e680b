"""Names of a save's files: whose they are, what they say, and which of them an older version has given."""

from __future__ import annotations

import pytest

from paddle_flexckpt.native.save_names import (
    MANIFEST,
    SaveId,
    SaveNames,
    is_message,
    lost_ids,
    marked_by,
    new_token,
    rank_of,
    save_of,
    token_after,
)

TOKEN = "0000002a" + "0123456789abcdef01234567"
SAVE = SaveNames(5, TOKEN)
OTHER = SaveNames(5, TOKEN[:-1] + "8")
FILES = [SAVE.data_file(3), SAVE.partition_file(12), SAVE.prepared_file(0)]


def test_every_file_of_a_save_has_its_token():
    assert SAVE.data_file(3) == f"3_5-{TOKEN}.safetensors"
    assert SAVE.partition_file(12) == f"12_5-{TOKEN}.partition"
    assert SAVE.prepared_file(0) == f"0_5-{TOKEN}.prepared"
    assert SAVE.marker_file == f"5-{TOKEN}.saving"
    assert SAVE.save_id == SaveId(5, 42, TOKEN)


def test_a_save_knows_its_own_files_and_no_others():
    assert all(map(SAVE.owns, [*FILES, f"{SAVE.prepared_file(0)}.{TOKEN}.tmp"]))
    assert not any(map(OTHER.owns, FILES))
    assert not any(map(SaveNames(6, TOKEN).owns, FILES))
    old = [f"3_5-{TOKEN}.part", "3_5.safetensors", "3_5.42.safetensors", "12_5.42.partition", "3_5.part", "5.42.saving"]
    assert not any(map(SAVE.owns, [*old, "5.manifest", SAVE.marker_file, f"5.manifest.{TOKEN}.tmp"]))


@pytest.mark.parametrize("name", [*FILES, f"{SAVE.prepared_file(0)}.{TOKEN}.tmp"])
def test_a_name_says_of_which_save_it_is(name):
    assert save_of(name) == SAVE.save_id
    assert marked_by(name) is None and not is_message(name)


def test_names_of_older_versions_have_generations():
    for name in ("3_5.safetensors", "12_5.partition", "0_5.prepared", f"0_5.prepared.{TOKEN}.tmp"):
        assert save_of(name) == SaveId(5, 0)
    for name in ("3_5.42.safetensors", "12_5.42.partition", "0_5.42.prepared"):
        assert save_of(name) == SaveId(5, 42) != SAVE.save_id
    assert (marked_by("5.saving"), marked_by("5.42.saving")) == (SaveId(5, 0), SaveId(5, 42))


def test_the_marker_of_a_save_names_it():
    assert marked_by(SAVE.marker_file) == SAVE.save_id
    assert save_of(SAVE.marker_file) is None


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "x_5.safetensors", "3_x.safetensors", "3_5.safetensors.tmp", "model-00001.safetensors",
        "3_5-.safetensors", f"3_5-{TOKEN[:-1]}.safetensors", f"3_5-{TOKEN}0.safetensors",
        f"3_5-{TOKEN.replace('a', 'A')}.safetensors",
        f"3_5.1-{TOKEN}.safetensors", f"-3_5-{TOKEN}.safetensors", f"3_5-{TOKEN}.safetensors\n", f"3_5-{TOKEN}.bin",
        "٣_5.safetensors", "5.manifest", "5.saving.tmp", "5..saving", "5-.saving", f"5-{TOKEN[1:]}.saving", "saving",
        f"5-{TOKEN}.manifest", "",
    ],
)  # fmt: skip
def test_other_names_are_of_no_save(name):
    assert (save_of(name), marked_by(name), is_message(name)) == (None, None, False)


@pytest.mark.parametrize("save_id", ["5", "5.2", f"5-{TOKEN}", f"5.2-{TOKEN}"])
def test_messages_of_all_versions_are_known(save_id):
    messages = [f"3_{save_id}.{kind}" for kind in ("part", "failed", "decided", "late")]
    assert all(map(is_message, [*messages, f"{messages[0]}.{TOKEN}.tmp", f"{messages[1]}.{TOKEN}.tmp"]))
    others = [f"{messages[0]}.tmp", f"{messages[2]}.{TOKEN}.tmp", f"{messages[3]}.{TOKEN}.tmp", f"x{messages[0]}"]
    assert not any(map(is_message, [*others, f"5-{TOKEN}.part"]))
    assert [save_of(name) for name in messages] == [None] * 4


def test_the_ranks_of_files():
    assert [rank_of(name) for name in FILES] == [3, 12, 0]
    assert rank_of("17_5.2.safetensors") == 17


def test_tokens_rise_with_the_saves_of_a_directory():
    here: list[str] = []
    for number in range(1, 20):
        save = SaveNames(number % 3, new_token(here))
        assert save.save_id.number == number
        here.append((save.data_file(7), save.partition_file(7), save.prepared_file(7), save.marker_file)[number % 4])
    tokens = [new_token(here) for _ in range(100)]
    assert len({*tokens}) == 100 and {token[:8] for token in tokens} == {"00000014"}
    assert min(tokens) > max(save.token for save in map(save_of, here) if save is not None)


def test_a_token_is_higher_than_any_generation_of_an_older_version():
    assert SaveNames(0, new_token([])).save_id.number == 1
    assert SaveNames(0, new_token(["0_0.safetensors", "0.manifest"])).save_id.number == 1
    assert SaveNames(0, new_token(["0_0.7.safetensors", "3_2.safetensors"])).save_id.number == 8
    assert SaveNames(0, new_token(["0_0.7.safetensors", "0.11.saving"])).save_id.number == 12
    assert SaveNames(0, new_token(["0_0.99.part", "model.safetensors"])).save_id.number == 1


def test_the_highest_number_stays_the_highest():
    """Two saves of one number have different tokens all the same."""
    last = SaveNames(0, token_after(16**8 - 2))
    assert last.token[:8] == "f" * 8
    after = SaveNames(0, new_token([last.data_file(0), "1_0.99999999999.safetensors"]))
    assert (len(after.token), after.token[:8]) == (32, "f" * 8) and after.token != last.token


def test_a_manifest_has_an_id_alone():
    assert MANIFEST.fullmatch("12.manifest")[1] == "12"
    assert not any(map(MANIFEST.fullmatch, ("x.manifest", "1.2.manifest", f"5-{TOKEN}.manifest", "5.manifest\n")))


@pytest.mark.parametrize("data", [SAVE.data_file(0), "0_5.safetensors", "0_5.42.safetensors"])
def test_data_files_without_manifest_and_marker_have_lost_it(data):
    assert lost_ids([data]) == [5]
    assert lost_ids([data, "5.manifest"]) == []
    assert lost_ids([data, "6.manifest", SaveNames(6, TOKEN).marker_file, OTHER.marker_file, "5.3.saving"]) == [5]


@pytest.mark.parametrize(
    ("data", "begun"),
    [
        (SAVE.data_file(0), SAVE.marker_file),
        (SAVE.data_file(0), SAVE.prepared_file(1)),
        ("0_5.safetensors", "5.saving"),
        ("0_5.42.safetensors", "5.42.saving"),
        ("0_5.42.safetensors", "0_5.42.prepared"),
        ("0_5.safetensors", f"1_5-{TOKEN}.failed"),
        ("0_5.42.safetensors", f"1_5.42-{TOKEN}.part"),
    ],
)
def test_data_files_of_a_save_that_has_begun_have_lost_nothing(data, begun):
    assert lost_ids([data, begun]) == []
    assert lost_ids([data, begun, "1_7.safetensors"]) == [7]
