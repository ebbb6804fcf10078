"""The store of asynchronous islands: counters and values over every transport, and nothing of anybody else."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from toolkit.checkpoints.element_runs import flat
from toolkit.cli import main
from toolkit.errors import BadInput, RankFailed
from toolkit.run_dir.async_islands import Membership, parse_address
from toolkit.runtime.islands.async_store import Piece, Update, UpdateStore
from toolkit.runtime.islands.async_transfer import DEAD_SECONDS, BackgroundTransfer
from toolkit.runtime.islands.flat_masters import Layout
from toolkit.runtime.islands.quantize import Encoding, ErrorFeedbackCodec
from toolkit.runtime.islands.signed_store import SignedStore
from toolkit.runtime.islands.store_access import (
    ISLANDS_KEY,
    SERVER_KEY,
    StoreKey,
    StoreServer,
    make_keys,
    new_key,
    read_key,
)
from toolkit.runtime.islands.transports import LARGEST_BYTES, FolderTransport, Transport, open_transport

MIB = 2**20


@contextlib.contextmanager
def served(folder: Path, most_bytes: int = 64 * MIB) -> Iterator[str]:
    """The address of a real server in a thread of its own."""
    server, ports, listens = StoreServer("127.0.0.1", 0, folder, most_bytes), [], threading.Event()

    def ready(port: int) -> None:
        ports.append(port)
        listens.set()

    thread = threading.Thread(target=server.run, args=(ready,), daemon=True)
    thread.start()
    assert listens.wait(20)
    try:
        yield f"https://127.0.0.1:{ports[0]}"
    finally:
        server.stop()
        thread.join(20)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "made"
    make_keys(folder, ["127.0.0.1", "localhost"])
    return folder


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[str]:
    with served(keys) as address:
        yield address


S3 = Path(__file__).parents[3] / ".venv" / "s3"
"""Where the Makefile installs a local S3 server."""


@pytest.fixture(scope="module")
def buckets() -> Iterator[str]:
    """Address of a bucket `runs` of a real S3 server on this host, which obstore is told of by its environment."""
    assert S3.is_dir(), "the local S3 server is missing: make .venv/s3"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    access = {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    with (
        subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(S3)}, stderr=subprocess.DEVNULL) as moto,
        pytest.MonkeyPatch.context() as patch,
        httpx.Client(trust_env=False, transport=httpx.HTTPTransport(retries=20)) as client,
    ):
        for name, value in access.items():
            patch.setenv(name, value)
        client.put(f"{url}/runs")
        yield "s3://runs"
        moto.terminate()


@pytest.fixture(params=["folder", "https", pytest.param("bucket", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path, keys: Path) -> Iterator[tuple[str, Path]]:
    """An empty store, and the file of its key."""
    if request.param == "folder":
        yield (tmp_path / "store with spaces").as_uri(), keys / ISLANDS_KEY
    elif request.param == "bucket":
        yield f"{request.getfixturevalue('buckets')}/{tmp_path.name}", keys / ISLANDS_KEY
    else:
        with served(keys) as address:
            yield address, keys / ISLANDS_KEY


def connected(place: tuple[str, Path]) -> SignedStore:
    key = read_key(place[1])
    return SignedStore(open_transport(place[0], key, 5.0), key)


def raw(place: tuple[str, Path]) -> Transport:
    """Somebody who may write to the place but, for a folder, does not sign."""
    return open_transport(place[0], read_key(place[1]), 5.0)


def test_counters_and_first_calls_are_atomic(place: tuple[str, Path]) -> None:
    numbers: list[int] = []
    firsts: list[bool] = []

    def claim() -> None:
        store = connected(place)
        for key in range(10):
            numbers.append(store.number("next", 1))
            firsts.append(store.first(f"first/{key}"))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
        if place[0].startswith("s3"):  # moto checks and writes in two steps; S3 itself does so in one
            thread.join()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 41))
    assert sum(firsts) == 10
    assert connected(place).number("next") == 40
    assert connected(place).number("other") == 0


def test_who_joins_late_counts_in_few_requests(tmp_path: Path, keys: Path) -> None:
    key, asked = read_key(keys / ISLANDS_KEY), 0

    class Counting(FolderTransport):
        def get(self, key: str) -> bytes | None:
            nonlocal asked
            asked += 1
            return super().get(key)

    address = (tmp_path / "store").as_uri()
    writer, watcher = (SignedStore(FolderTransport(address), key) for _ in range(2))
    for number in range(70):
        assert SignedStore(FolderTransport(address), key).number("next") == number
        assert writer.number("next", 1) == number + 1
        if number % 3 == 0:
            assert watcher.number("next") == number + 1
    writer.number("next", 930)
    late = SignedStore(Counting(address), key)
    assert late.number("next") == 1000
    assert asked <= 21
    assert late.number("next") == 1000
    assert asked <= 22


def test_values_that_are_not_signed_do_not_exist(place: tuple[str, Path]) -> None:
    store, stranger = connected(place), raw(place)
    stranger.put("plain", b"x" * 100)
    store.write("own", [1, 2])
    sealed = stranger.get("own")
    assert sealed is not None
    stranger.put("moved", sealed)
    stranger.put("own", sealed[:-1] + b"9")
    assert [store.read(key, "none") for key in ("plain", "moved", "own")] == ["none"] * 3
    assert sum(store.rejected.values()) == 3
    stranger.put("count/1", b"planted")
    assert store.number("count") == 0
    assert store.number("count", 1) == 1, "what is not signed makes room"


def test_encrypted_values_are_read_by_islands_only(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], encrypts=True)
    key = read_key(tmp_path / "keys" / ISLANDS_KEY)
    assert key.encrypts
    assert key.certificate.startswith("-----BEGIN CERTIFICATE")
    transport = open_transport((tmp_path / "store").as_uri(), key, 5.0)
    store = SignedStore(transport, key)
    store.write("own", "plain words")
    store.put("empty", b"")
    sealed = transport.get("own")
    assert sealed is not None
    assert b"plain" not in sealed
    assert (store.read("own"), store.get("empty")) == ("plain words", b"")
    transport.put("moved", sealed)
    assert store.read("moved") is None
    assert store.number("count", 2) == 2


def test_an_older_value_that_is_put_back_is_ignored(place: tuple[str, Path]) -> None:
    store, stranger = connected(place), raw(place)
    store.write("beat", 1)
    older = stranger.get("beat")
    store.write("beat", 2)
    assert store.read("beat") == 2
    assert older is not None
    stranger.put("beat", older)
    assert store.read("beat") is None


def test_another_secret_reads_and_writes_nothing(place: tuple[str, Path], tmp_path: Path) -> None:
    connected(place).write("own", 1)
    other = StoreKey(b"o" * 32, read_key(place[1]).certificate)
    if place[0].startswith("https"):
        with pytest.raises(BadInput, match="does not accept this island's secret"):
            SignedStore(open_transport(place[0], other, 5.0), other).read("own")
    else:
        store = SignedStore(open_transport(place[0], other, 5.0), other)
        assert store.read("own") is None
        store.write("own", 2)
    assert connected(place).read("own", "rejected") in (1, "rejected")


def test_who_joins_awaits_only_islands_whose_heartbeat_moves(tmp_path: Path, keys: Path) -> None:
    """One that was killed before is not taken for a slow one; its rounds are its own until its lease is over."""
    address, key = (tmp_path / "store").as_uri(), str(keys / ISLANDS_KEY)
    dead, slow = (UpdateStore(Membership(address, key, island, 3), 0, 1) for island in (1, 2))
    dead.send_beat(7)
    transfer = BackgroundTransfer(Membership(address, key, 0, 3), 0, 1, Layout(0, ()), Encoding(8))
    try:
        deadline = time.monotonic() + DEAD_SECONDS - 2
        while transfer.is_awaited(1) and time.monotonic() < deadline:
            slow.send_beat(time.time_ns())
            time.sleep(0.2)
        assert not transfer.is_awaited(1)
        assert transfer.alive(1)
        assert transfer.is_awaited(2)
    finally:
        transfer.end()


def test_updates_arrive_whole_or_with_their_problem(place: tuple[str, Path]) -> None:
    """An island of two ranks writes, one of a single rank reads both parts."""

    def member(island: int, rank: int) -> UpdateStore:
        return UpdateStore(Membership(place[0], str(place[1]), island, 2), rank, 2 - island)

    encoding, whole = Encoding(8), Layout(2000, (("w", flat(0, 1999)),))  # with padding
    codec = ErrorFeedbackCodec(encoding, torch.zeros(1000))
    contents = [codec.encoded(torch.randn(1000))[0] for _ in range(2)]
    for rank, content in enumerate(contents):
        assert member(0, 0).num_updates(0) == 0
        member(0, rank).put_layout(1, Layout(1000, (("w", flat(1000 * rank, min(1000 * rank + 1000, 1999))),)))
        member(0, rank).publish(Update(0, 0, 5, 0.5, (Piece(1000, content),)), incarnation=1)
    reader = member(1, 0)
    assert reader.num_updates(0) == 1
    found = reader.fetch(0, 0, whole, encoding)
    assert (found.round, found.weight, found.problem) == (5, 0.5, "")
    change = torch.zeros(2000)
    for piece in found.pieces:
        piece.copy_into(change, encoding.unpack(piece.content, piece.size))
    expected = torch.cat([encoding.unpack(content, 1000) for content in contents])
    assert torch.equal(change[:1999], expected[:1999])
    assert "signed bytes" in reader.fetch(0, 0, whole, Encoding(4)).problem
    assert "head" in reader.fetch(0, 1, whole, encoding).problem
    larger = Layout(3000, (("w", flat(0, 3000)),))
    assert "1999 of the 3000" in member(1, 0).fetch(0, 0, larger, encoding).problem
    member(0, 1).drop([0])
    assert "signed bytes" in reader.fetch(0, 0, whole, encoding).problem
    for head in ([1], ["1", 1, 1], [1, float("inf"), 1], {"round": 1}):
        reader.write("update/0/7/head", head)
        assert "malformed" in reader.fetch(0, 7, whole, encoding).problem
    member(0, 0).write("layout/0/2/0", [1, "nonsense"])
    reader.write("update/0/8/head", [1, 1.0, 2])
    assert "layout" in reader.fetch(0, 8, whole, encoding).problem


@pytest.mark.parametrize("encoding", [Encoding(), Encoding(8), Encoding(4), Encoding(2), Encoding(2, 0.05)])
def test_damaged_changes_are_named(encoding: Encoding) -> None:
    codec = ErrorFeedbackCodec(encoding, torch.zeros(1000))
    content = codec.encoded(torch.randn(1000))[0]
    assert codec.problem(content) == ""
    assert "bytes" in codec.problem(content[:-1])
    scale = content.numel() - (encoding.kept * 4 if encoding.density < 1 else 0)  # places come last
    content[scale - 4 : scale] = torch.tensor([float("nan")]).view(torch.uint8)
    assert "NaN" in codec.problem(content)


def test_the_server_binds_to_one_address(server: str) -> None:
    port = int(server.rpartition(":")[2])
    for address in ("127.0.0.2", socket.gethostbyname(socket.gethostname())):
        if address == "127.0.0.1":
            continue
        with pytest.raises(OSError, match=r"refused|unreachable"):
            socket.create_connection((address, port), timeout=2)


def test_strangers_get_no_answer_from_the_server(server: str, keys: Path) -> None:
    certificate = ssl.create_default_context(cadata=read_key(keys / ISLANDS_KEY).certificate)
    with httpx.Client(verify=certificate) as client:
        for token in ("", "Bearer", "Bearer wrong", "Bearer ünï"):
            headers = {"Authorization": token.encode("utf-8")} if token else {}
            for method in ("GET", "PUT", "DELETE"):
                assert client.request(method, f"{server}/update/0/0/head", headers=headers).status_code == 401
    with httpx.Client(verify=False) as client, pytest.raises(httpx.HTTPError):  # noqa: S501
        client.get(server.replace("https", "http") + "/own")


def test_what_is_too_large_is_refused(keys: Path) -> None:
    with served(keys, most_bytes=3 * MIB) as address:
        transport = open_transport(address, read_key(keys / ISLANDS_KEY), 1.0)
        with pytest.raises(RankFailed, match="413"):
            transport.put("large", bytes(LARGEST_BYTES + 1))
        for number in range(2):
            transport.put(f"value/{number}", bytes(MIB))
        with pytest.raises(RankFailed, match="at most"):
            transport.put("value/2", bytes(MIB))
        transport.delete("value/0")
        transport.put("value/2", bytes(MIB))
        with pytest.raises(RankFailed, match="414"):
            transport.put("k" * 600, b"")


def test_a_large_file_in_a_folder_is_not_read(tmp_path: Path, keys: Path) -> None:
    place = (tmp_path / "store").as_uri(), keys / ISLANDS_KEY
    store = connected(place)
    (tmp_path / "store" / "huge").write_bytes(b"")
    os.truncate(tmp_path / "store" / "huge", 2**40)
    assert store.get("huge") is None


def test_another_certificate_is_refused(server: str, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", ["127.0.0.1"])
    other = StoreKey(read_key(keys / ISLANDS_KEY).secret, read_key(tmp_path / "other" / ISLANDS_KEY).certificate)
    with pytest.raises(BadInput, match="another certificate"):
        open_transport(server, other, 5.0).get("own")
    with pytest.raises(BadInput, match="no certificate"):
        open_transport(server, new_key(), 5.0)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "old", ["127.0.0.1"], days=-0.02)
    with served(tmp_path / "old") as address, pytest.raises(BadInput, match="expired"):
        open_transport(address, read_key(tmp_path / "old" / ISLANDS_KEY), 5.0).get("own")


def test_keys_are_private_and_checked(tmp_path: Path, keys: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}
    assert {path.name for path in keys.iterdir()} == {ISLANDS_KEY, SERVER_KEY}
    assert "secret" not in repr(read_key(keys / ISLANDS_KEY))
    with pytest.raises(BadInput, match="holds keys already"):
        make_keys(keys, ["localhost"])
    bad = tmp_path / "bad"
    for text in ("", "secret: zz\n", "secret: 00\n", "\xff"):
        bad.write_bytes(text.encode("latin-1"))
        bad.chmod(0o600)
        with pytest.raises(BadInput, match="is not a key"):
            read_key(bad)
    bad.chmod(0o644)
    with pytest.raises(BadInput, match="can be read by others"):
        read_key(bad)
    with pytest.raises(BadInput, match="can't be read"):
        read_key(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:29400", "https://10.0.0.1:29400"),
        ("https://[::1]:29400/", "https://[::1]:29400"),
        ("file:///srv/run", "file:///srv/run"),
        ("s3://bucket/run", "s3://bucket/run"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["here", "http://a:1", "https://a", "https://a:0", "file://run", "s3://", "ftp://a/b"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(BadInput, match="is required"):
        parse_address(text)


def island(recipe: dict[str, Any], folder: Path, address: str, *argv: str) -> int:
    """`toolkit train` of one of two islands, without starting a worker: what is refused is refused before."""
    path = folder / "recipe.yaml"
    recipe = {**recipe, "strategy": {"name": "local_sgd", "islands": 2, "local_steps": 2}, "train": {
        **recipe["train"], "outer": {"mode": "async"}}}  # fmt: skip
    path.write_text(json.dumps(recipe))
    given = [
        "train",
        str(path),
        "--nproc",
        "2",
        "--island",
        "0",
        "--mailbox",
        address,
        "--run-dir",
        str(folder / "run"),
    ]
    return main([*given, *argv])


def test_an_island_of_another_recipe_is_refused_with_what_differs(
    recipe_mapping: dict[str, Any], tmp_path: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = (tmp_path / "store").as_uri(), keys / ISLANDS_KEY
    connected(place).create("recipe", json.dumps({"train.lr": 0.5}).encode())
    assert island(recipe_mapping, tmp_path, place[0], "--mailbox-key", str(place[1])) == 2
    shown = capsys.readouterr().err
    assert "belongs to islands of another recipe" in shown
    assert "train.lr is 0.01 here and 0.5 there" in shown or "data." in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["https://127.0.0.1:9", "file:///proc/none/store"])
def test_a_store_that_can_not_be_reached_ends_before_anything_starts(
    recipe_mapping: dict[str, Any],
    tmp_path: Path,
    keys: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("toolkit.sessions.islands.CHECK_SECONDS", 0.5)
    assert island(recipe_mapping, tmp_path, address, "--mailbox-key", str(keys / ISLANDS_KEY)) == 2
    assert address in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
