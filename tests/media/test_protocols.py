"""The table of URL schemes: each row is used, and a scheme without one works with the caller's word for its commits."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media import protocols
from paddle_flexckpt.media.medium import Medium
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.media.protocols import PROTOCOLS, Protocol, commit_of, protocol_of
from paddle_flexckpt.media.s3 import S3Medium


class Basket(MemoryFileSystem):
    """A store that fsspec comes to know in a test."""

    protocol = ("basket",)
    store: dict = {}
    pseudo_dirs = [""]


@pytest.fixture
def basket():
    fsspec.register_implementation("basket", Basket, clobber=True)
    yield "basket://fruit"
    Basket.store.clear()


@pytest.mark.parametrize("scheme", [*PROTOCOLS, "file", "local"])
def test_a_url_that_lost_a_slash_is_refused_for_each_row(scheme):
    with pytest.raises(ValidationError, match="has lost a slash"):
        open_storage(f"{scheme}:/bucket/run")
    assert open_storage(f"of_{scheme}:/bucket/run").has_path


def test_a_new_medium_is_one_row(basket, monkeypatch):
    storage = open_storage(basket)
    with pytest.raises(ValidationError, match="it is not known how 'basket' replaces a file at once"):
        storage.make_directory()

    class Apples(Medium):
        takes_password = False

    row = Protocol("put", creates=True, medium=Apples)
    monkeypatch.setattr(protocols, "PROTOCOLS", {**PROTOCOLS, "basket": row})
    storage = open_storage(basket)
    storage.make_directory()
    with storage.create("apple") as file:
        file.write(b"red")
    with pytest.raises(FileExistsError), storage.create("apple") as file:
        file.write(b"green")
    assert (storage.names(), storage.read("apple")) == (["apple"], b"red")
    assert type(storage._medium) is Apples
    assert storage._medium.exclusive
    with pytest.raises(ValidationError, match="lost a slash"):
        open_storage("basket:/fruit")
    with pytest.raises(ValidationError, match="BASKET takes no credentials from URLs"):
        open_storage("basket://me:secret@fruit")


def test_the_table_says_how_files_commit():
    assert (protocol_of("s3").medium, protocol_of("other").medium) == (S3Medium, Medium)
    plain = fsspec.AbstractFileSystem()
    assert [commit_of(scheme, plain) for scheme in ("gs", "ssh", "smb", "https", "other")] == [
        "put",
        "replace",
        "rename",
        None,
        None,
    ]

    class Renames(fsspec.AbstractFileSystem):
        def mv(self, *arguments, **keywords):
            """Rename."""

    assert (commit_of("other", Renames()), commit_of("oss", Renames())) == ("rename", "put")
