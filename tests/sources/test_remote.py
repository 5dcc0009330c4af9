"""Remote addresses: what counts as one, streaming, listing, and what is said when it fails."""

import gzip
import pickle
import threading
import tracemalloc
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

import pytest

from recompute_scan.errors import InputError, MissingExtra
from recompute_scan.trace.columns import Limits
from recompute_scan.trace.streams import _stays, _Stream, is_remote, list_remote, open_remote, shown

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class _Odd(BaseHTTPRequestHandler):
    """Answers by path; notes what it was asked for, and counts what it sent."""

    sent: ClassVar[list[int]] = []
    asked: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.asked.append(f"http://{self.headers['Host']}{self.path}")
        if self.path.startswith("/forbidden"):
            self.send_error(403)
        elif self.path == "/links/":
            page = rb"""<a href="one.json">1</a> <a href="/links/two.json">2</a> <a href="..">up</a>
            <a href="http://other.example/three.json">3</a> <a href="/elsewhere/four.json">4</a>
            <a href="below/">below</a> <a href="../elsewhere/">5</a> <a href="../6.json">6</a>
            <a href="%2e%2E/7.json">7</a> <a href="..%2F8.json">8</a> <a href="..\9.json">9</a>"""
            self._send(page, len(page), body, "text/html")
        elif self.path.startswith("/short"):
            self._send(b"x" * 1000, 5000, body)
        elif self.path.startswith("/encoded"):
            self._send(gzip.compress(b"inside"), None, body, encoding="gzip")
        elif self.path.startswith("/large"):
            self._stream(200 << 20, body)
        elif self.path.startswith(("/to/", "/links/two")):
            target = unquote(self.path.removeprefix("/to/")).replace("/links/", "/elsewhere/")
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send(self.path.encode(), len(self.path), body)

    def _send(
        self,
        data: bytes,
        length: int | None,
        body: bool,
        kind: str = "application/json",
        encoding: str | None = None,
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _stream(self, size: int, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if not body:
            return
        block = bytes(1 << 18)
        self.sent.append(0)
        try:
            for _ in range(size // len(block)):
                self.wfile.write(block)
                self.sent[-1] += len(block)
        except OSError:
            pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    for rank in range(3):
        (tmp_path / "ranks" / f"rank{rank}.json").write_bytes(b'{"traceEvents": []}')
    (tmp_path / "ranks" / "deeper").mkdir()
    (tmp_path / "one.json.gz").write_bytes(gzip.compress(b"{}" * 100_000))
    return tmp_path


@pytest.fixture
def site(folder: Path) -> Iterator[str]:
    yield from _serve(partial(_Quiet, directory=str(folder)))


@pytest.fixture
def odd() -> Iterator[str]:
    yield from _serve(_Odd)


def _serve(handler: type[BaseHTTPRequestHandler] | partial[_Quiet]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def memory() -> Iterator[str]:
    root = f"memory://{uuid.uuid4().hex}"
    files = fsspec.filesystem("memory")
    for name in ("a/rank10.json", "a/rank2.json", "a/notes.txt", "a/below/rank3.json", "b.json"):
        files.pipe(f"{root}/{name}", name.encode())
    yield root
    files.rm(root, recursive=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://host/a.json", True),
        ("S3://bucket/key", True),
        ("hf://datasets/a/b.json.gz", True),
        ("memory://a", True),
        ("a.json", False),
        ("/a/b.json", False),
        ("C://a.json", False),
        ("C:\\a.json", False),
        ("https:/host/a", False),
        ("://a", False),
        ("folder/s3://x", False),
    ],
)
def test_what_is_an_address(text: str, expected: bool) -> None:
    assert is_remote(text) is expected


def test_an_address_is_shown_without_its_secrets() -> None:
    address = "https://me:pass@host/a.json?X-Amz-Signature=abc&x=1"
    assert shown(address) == "https://host/a.json"
    assert shown("s3://bucket/a.json") == "s3://bucket/a.json"


def test_a_file_over_http(site: str, folder: Path) -> None:
    with closing(open_remote(f"{site}/one.json.gz")) as stream:
        assert stream.read(2) == b"\x1f\x8b"
        buffer = bytearray(100)
        assert stream.readinto(buffer) == 100
        rest = stream.read()
    assert b"\x1f\x8b" + bytes(buffer) + rest == (folder / "one.json.gz").read_bytes()


def test_a_large_file_is_never_held_whole(odd: str) -> None:
    tracemalloc.start()
    try:
        with closing(open_remote(f"{odd}/large")) as stream:
            assert len(stream.read(1 << 16)) == 1 << 16
            buffer = bytearray(1 << 18)
            total = 1 << 16
            while total < 60 << 20:
                total += stream.readinto(buffer)
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20
    # The rest was not sent: the server writes no further than the sockets' buffers.
    assert _Odd.sent[-1] < 100 << 20


def test_what_a_server_compressed_stays_so(odd: str) -> None:
    with closing(open_remote(f"{odd}/encoded")) as stream:
        assert gzip.decompress(stream.read()) == b"inside"


def test_folders_and_globs_over_http(site: str) -> None:
    ranks = [f"{site}/ranks/rank{rank}.json" for rank in range(3)]
    assert list_remote(f"{site}/ranks/") == ranks
    assert list_remote(f"{site}/ranks/rank*.json") == ranks
    assert list_remote(ranks[1]) == [ranks[1]]
    signed = f"{site}/any.json?signature=a[b*"
    assert list_remote(signed) == [signed]


@pytest.mark.parametrize("pattern", ["", "*", "**"])
def test_a_page_of_links_leads_nowhere_else(odd: str, pattern: str) -> None:
    _Odd.asked.clear()
    found = list_remote(f"{odd}/links/{pattern}")
    assert found == [f"{odd}/links/one.json", f"{odd}/links/two.json"]
    with closing(open_remote(found[0])) as stream:
        assert stream.read() == b"/links/one.json"
    with pytest.raises(InputError, match="E325") as caught:
        open_remote(pickle.loads(pickle.dumps(found[1]))).read()
    assert "another place" in str(caught.value)
    assert all(address.startswith(f"{odd}/links") for address in _Odd.asked)


def test_folders_and_globs_of_the_memory_file_system(memory: str) -> None:
    for address in (f"{memory}/a", f"{memory}/a/"):
        found = list_remote(address)
        assert [name.rpartition("/")[2] for name in found] == [
            "notes.txt",
            "rank10.json",
            "rank2.json",
        ]
    found = list_remote(f"{memory}/a/rank?.json")
    assert len(found) == 1
    with closing(open_remote(found[0])) as stream:
        assert stream.read() == b"a/rank2.json"
    assert list_remote(f"{memory}/b.json") == [f"{memory}/b.json"]
    assert len(list_remote(f"{memory}/**")) == 5


def test_more_files_than_allowed(memory: str) -> None:
    with pytest.raises(InputError, match="E316"):
        list_remote(f"{memory}/a", Limits(members=2))


def test_what_does_not_exist(site: str, memory: str) -> None:
    for address in (f"{site}/none.json", f"{memory}/none.json"):
        with pytest.raises(InputError) as caught:
            open_remote(address)
        assert caught.value.code == "E325"
        assert shown(address) in caught.value.what
    for address in (f"{memory}/none*.json", f"{site}/ranks/none*.json", f"{site}/none/"):
        with pytest.raises(InputError) as caught:
            list_remote(address)
        assert caught.value.code == "E325"


@pytest.mark.parametrize(("host", "said"), [("", "403"), ("http://127.0.0.1:9", "Connect")])
def test_refusals_do_not_tell_secrets(odd: str, host: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        open_remote(f"{host or odd}/forbidden/a.json?token=hunter2")
    assert caught.value.code == "E325"
    assert said in str(caught.value.why)
    assert "hunter2" not in str(caught.value)


def test_a_connection_that_breaks_off(odd: str) -> None:
    stream = open_remote(f"{odd}/short?token=hunter2")
    with closing(stream), pytest.raises(InputError) as caught:
        while stream.read(100):
            pass
    assert caught.value.code == "E325"
    assert "stopped after" in caught.value.what
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("address", ["nosuch://x", "zip://a.json::http://host/b.zip"])
def test_schemes_that_are_not_known(address: str) -> None:
    with pytest.raises(InputError, match="E326"):
        open_remote(address)


@pytest.mark.parametrize(
    ("package", "address"), [("s3fs", "s3://bucket/a.json"), ("aiohttp", "https://host/a.json")]
)
def test_a_scheme_whose_package_is_missing(
    package: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(InputError) as caught:
        open_remote(address)
    assert caught.value.code == "E326"
    assert caught.value.hint == f"pip install {package}"


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    for function in (open_remote, list_remote):
        with pytest.raises(MissingExtra) as caught:
            function("https://host/a.json")
        assert 'pip install ".[remote]"' in str(caught.value)


def test_a_host_of_version_six_is_no_chain_of_addresses() -> None:
    for address in ("http://[::1]:9/x.json", "http://user:word@[fe80::1]:9/x.json"):
        with pytest.raises(InputError) as refusal, open_remote(address):
            pass
        assert refusal.value.code == "E325"
        assert "word" not in str(refusal.value)
    with pytest.raises(InputError, match="chain of addresses"):
        open_remote("zip://a.json::http://[::1]:9/x.zip")


@pytest.mark.parametrize(("bytes_each", "patient"), [(10, False), (5_000, True)])
def test_a_server_that_drips_is_given_up(
    bytes_each: int, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100_000, 2))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))

    class Dripping:
        left = 100

        def read(self, most: int) -> bytes:
            self.left -= 1
            return b"x" * min(most, bytes_each) if self.left else b""

        def close(self) -> None:
            pass

    with closing(_Stream(Dripping(), "http://host/x.json?key=word")) as stream:
        if patient:
            assert len(stream.readall()) == 99 * bytes_each
            return
        with pytest.raises(InputError, match="given up") as refusal:
            stream.readall()
    assert refusal.value.code == "E325"
    assert "word" not in str(refusal.value)


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.2:{port}/x.json",
        "http://127.0.0.1:{other}/x.json",
        "http://localhost:{port}/x.json",
        "//127.0.0.1:{other}/x.json",
        "http://user:secret@127.0.0.1:{other}/x.json?key=secret",
        "http://2130706433:{other}/x.json",
        "http://[::ffff:127.0.0.1]:{other}/x.json",
        "/to/http%3A%2F%2F127.0.0.1%3A{other}%2Fx.json",
    ],
)
@pytest.mark.parametrize("folder", ["", "folder/"])
def test_no_server_sends_us_to_another_host(odd: str, target: str, folder: str) -> None:
    _Odd.asked.clear()
    servers = _serve(_Odd)
    port, other = (address.rpartition(":")[2] for address in (odd, next(servers)))
    address = f"{odd}/to/{quote(target.format(port=port, other=other), safe='')}{folder}"
    with pytest.raises(InputError, match="E325") as caught:
        for one in list_remote(address):
            open_remote(one).read()
    assert caught.value.why is not None
    assert "another place" in caught.value.why or folder
    assert "secret" not in caught.value.why
    assert all(address.startswith(f"{odd}/") for address in _Odd.asked)
    next(servers, None)


@pytest.mark.parametrize("target", ["/x.json", "//{host}/x.json", "http://{host}/x.json"])
def test_within_a_host_redirects_are_followed(odd: str, target: str) -> None:
    host = odd.removeprefix("http://")
    with open_remote(f"{odd}/to/{quote(target.format(host=host), safe='')}") as file:
        assert file.read().endswith(b"x.json")


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ("http://a/x", "https://a/x", True),
        ("https://a/x", "http://a/x", False),
        ("https://a/x", "https://a:8443/x", False),
        ("https://a/x", "https://a.b/x", False),
        ("https://a/x", "https://a@b/x", False),
        ("https://a/x", "file:///etc/passwd", False),
        ("https://a/x", "https://[a/x", False),
        ("https://a/x", "https://a:99999999/x", False),
        ("https://a/x", "../y", True),
        ("http://a/x/", "https://a/x", True),
        ("https://a/x/", "/x/y/../z", True),
        *(("https://a/x/", way, False) for way in ("//b/x/y", "/xy", "//a//a/x/y", "?k=/../y")),
        *(("https://a/x/", f"{up}/y", False) for up in ("..", "%2E%2e", "..%2f", ".\t.", "..;a")),
    ],
)
def test_what_the_same_host_and_folder_is(before: str, after: str, stays: bool) -> None:
    assert _stays(before, after, before if before.endswith("/") else "") == stays
