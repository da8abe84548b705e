"""The search page: what it answers, and what it refuses. In a real browser where there is one."""

import http.client
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import pytest

import clipctl
from clipctl.config.layers import Layer, resolve
from clipctl.inference.embedding_store import EmbeddingStore
from clipctl.inference.gallery import open_gallery
from clipctl.inference.refresh import refresh
from clipctl.report import browse
from clipctl.runs.rundir import RunDir
from clipctl.training.plan import make_plan
from tests.chromium import Chromium
from tests.conftest import MICRO, train
from tests.test_use import COLOURS, draw


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """24 pictures of three colours, the model that learnt them, and a secret next to them."""
    root = tmp_path_factory.mktemp("browse")
    for colour in COLOURS:
        for number in range(8):
            draw(root / "photos" / colour / f"{colour}-{number}.png", colour, number)
    run = RunDir.create(root / "runs", "tiny", "colours")
    values = {**MICRO, "data.source": str(root / "photos"), "data.val_fraction": 0.3, "train.epochs": 30}
    train(make_plan(resolve([Layer("test", {**values, "optim.lr": 3e-3})])), run)
    run.release()
    model = clipctl.load(run.path)
    refresh(root / "index", model, open_gallery([str(root / "photos")]), [str(root / "photos")])
    (root / "photos" / "secret.txt").write_text("top secret")
    return root / "index", model


@pytest.fixture(scope="module")
def server(index):
    path, model = index
    server = browse.Server(browse.Searcher(EmbeddingStore.open(path), model))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def request(server, target, method="GET", body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, target, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def results(server, target, **values):
    status, _, body = request(server, f"/{server.token}/{target}", **values)
    assert status == 200, body
    return json.loads(body)["results"]


def test_the_page_carries_everything_it_needs(server):
    status, headers, body = request(server, f"/{server.token}/")
    page = body.decode()
    assert status == 200 and "24" in page and not re.search(r"(src|href)=\"(https?:)?//", page)
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])[1]
    assert page.count(f'nonce="{nonce}"') == 3 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert "NONCE" not in page and "FACTS" not in page


def test_words_a_number_and_a_picture_find_pictures(server, index):
    found = results(server, "search?q=" + urllib.parse.quote("a photo of a red") + "&top=5")
    assert len(found) == 5 and all(one["name"].startswith("red-") for one in found)
    like = results(server, f"like/{found[0]['row']}?top=3")
    assert like[0]["row"] == found[0]["row"] and like[0]["score"] == pytest.approx(1, abs=2e-3)
    content = (index[0].parent / "photos" / "blue" / "blue-3.png").read_bytes()
    by_picture = results(server, "picture?top=1", method="POST", body=content)
    assert by_picture[0]["name"].startswith("blue-") and by_picture[0]["score"] > 0.99
    assert [one["row"] for one in results(server, "search?q=&top=4")] == [0, 1, 2, 3]


def test_pictures_are_drawn_anew(server):
    status, headers, body = request(server, f"/{server.token}/thumbnail/0")
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and body[:2] == b"\xff\xd8"
    assert request(server, f"/{server.token}/picture/3")[0] == 200
    assert request(server, f"/{server.token}/thumbnail/24")[0] == 404


def hostile(server, rng):
    """A request that must be refused: method, target, headers, body."""
    token = server.token
    tricks = [
        "../secret.txt",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/secret.txt",
        "/etc/passwd",
        "....//secret.txt",
        "\\..\\x",
    ]
    tricks += ["thumbnail/../../secret.txt", "thumbnail/-1", "thumbnail/1e3", "picture/0x1", "thumbnail/99999999999"]
    tricks += ["thumbnail/0/..", "thumbnail/%30", "like/24", "picture/24", "nothing", "search/1", "file:///etc/passwd"]
    trick = rng.choice(tricks) + rng.choice(["", "?q=../../x", "%00", "/", "#", ".png"])
    wrong = ["", "x" * 24, token[:-1], token + "a", token.swapcase(), "%2e", "*" * 80]
    match rng.randrange(5):
        case 0:
            return "GET", f"/{token}/{trick}", {}, None
        case 1:
            return "GET", f"/{rng.choice(wrong)}/{rng.choice(['', 'search?q=red', 'thumbnail/0'])}", {}, None
        case 2:
            host = rng.choice(["evil.example", "127.0.0.1", f"127.0.0.1:{server.server_port + 1}", "localhost:80", ""])
            return "GET", f"/{token}/search?q=red", {"Host": host}, None
        case 3:
            method = rng.choice(["PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"])
            return method, f"/{token}/thumbnail/0", {}, None
    body = rng.choice([b"", b"no picture", b"\x89PNG\r\n\x1a\n" + rng.randbytes(200), rng.randbytes(5000)])
    return "POST", f"/{token}/{rng.choice(['picture', 'search', '', 'thumbnail/0', '../x'])}", {}, body


def test_a_thousand_hostile_requests_are_refused(server, monkeypatch):
    opened = []
    real = browse.Originals.content

    def content(self, path):
        opened.append(path)
        return real(self, path)

    monkeypatch.setattr(browse.Originals, "content", content)
    rng = random.Random(0)
    for _ in range(1000):
        method, target, headers, body = hostile(server, rng)
        target = urllib.parse.quote(target, safe="/:?=&%\\#.*-_")
        try:
            status, _, answer = request(server, target, method, body, headers)
        except (http.client.HTTPException, ConnectionError):
            continue
        is_unknown_method = status == 501 and method not in ("GET", "POST")
        assert 400 <= status < 500 or is_unknown_method, (method, target, headers, status, answer)
        assert b"secret" not in answer and b"root:" not in answer
    assert not opened  # no picture was even looked for


def test_a_picture_that_took_the_place_of_another_is_not_served(server, index, tmp_path):
    """A link to a picture outside, which the same number would show; and one that was edited."""
    draw(tmp_path / "secret.png", "green", 9)
    (row,) = (one["row"] for one in results(server, "search?q=&top=24") if one["name"] == "red-7.png")
    indexed = index[0].parent / "photos" / "red" / "red-7.png"
    kept = indexed.rename(tmp_path / "kept.png")
    try:
        indexed.symlink_to(tmp_path / "secret.png")
        status, _, answer = request(server, f"/{server.token}/picture/{row}")
        assert status == 404 and b"changed since it was embedded" in answer
        indexed.unlink()
        shutil.copy(tmp_path / "secret.png", indexed)
        assert request(server, f"/{server.token}/thumbnail/{row}")[0] == 404
    finally:
        indexed.unlink()
        kept.rename(indexed)
    assert request(server, f"/{server.token}/picture/{row}")[0] == 200


def test_a_body_that_comes_too_slowly_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(browse, "REQUEST_LIMIT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as slow:
        head = f"POST /{server.token}/picture HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        slow.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode())
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < 8:
                slow.sendall(b"x")
                time.sleep(0.1)
    assert 0.3 < time.monotonic() - started < 5
    assert results(server, "search?q=red&top=1")


def test_what_is_too_large_or_too_slow_is_cut_off(server, monkeypatch):
    headers = {"Content-Length": str(browse.BODY_LIMIT_BYTES + 1)}
    assert request(server, f"/{server.token}/picture", "POST", b"x", headers)[0] == 413
    assert request(server, f"/{server.token}/picture", "POST", None, {"Content-Length": "many"})[0] in (400, 411)
    monkeypatch.setattr(browse, "REQUEST_LIMIT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as slow:
        slow.sendall(f"POST /{server.token}/picture HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n".encode())
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < 8:
                slow.sendall(b"X-Slow: 1\r\n")
                time.sleep(0.1)
                if not slow.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) and time.monotonic() - started > 0.4:
                    raise ConnectionResetError
    assert results(server, "search?q=red&top=1")


def test_a_flood_does_not_stop_it(server):
    sockets = [socket.create_connection(("127.0.0.1", server.server_port), timeout=5) for _ in range(60)]
    time.sleep(0.3)
    for one in sockets:
        one.close()
    for _ in range(50):  # the threads notice one after the other
        try:
            assert results(server, "search?q=red&top=1")
            return
        except (http.client.HTTPException, ConnectionError):
            time.sleep(0.1)
    pytest.fail("it does not answer any more")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("words", ["", "a photo of a blue"])
def test_in_a_browser(server, tmp_path, words):
    """The page fills by itself, shows what is looked for, and has no error on its console."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}", "--enable-logging=stderr"]
    address = f"{server.address}#{urllib.parse.quote(words)}"
    done = subprocess.run(
        [CHROMIUM, *flags, "--virtual-time-budget=6000", "--window-size=1000,800", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.count("<figure") == 24 and (words or "24 pictures") in done.stdout, done.stderr[-2000:]
    names = re.findall(r'class="name"[^>]*>([a-z]+)-\d', done.stdout)
    assert not words or names[:8] == ["blue"] * 8
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]


@pytest.fixture
def chromium(tmp_path):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with Chromium(CHROMIUM, tmp_path / "profile") as browser:
        yield browser


def test_what_is_typed_is_found_and_the_keys_work(server, chromium):
    chromium.open(server.address)
    first = "(document.querySelector('figure .name')?.textContent ?? '')"
    focused = (
        "(document.activeElement.closest('figure')?.querySelector('.name').textContent ?? document.activeElement.id)"
    )
    chromium.wait_for(f"document.querySelectorAll('figure').length === 24 && {focused} === 'query'")
    for words, colour in (("a photo of a blue", "blue"), ("a photo of a green", "green")):
        chromium.press("Escape")
        for character in words:
            chromium.press(character)
        chromium.wait_for(f"{first}.startsWith('{colour}-') && location.hash === '#{urllib.parse.quote(words)}'")
        names = chromium.evaluate("[...document.querySelectorAll('figure .name')].map((one) => one.textContent)")
        assert [name.partition("-")[0] for name in names[:8]] == [colour] * 8
    chromium.press("ArrowDown")
    chromium.press("ArrowRight")
    second = chromium.evaluate(focused)
    assert second == names[1]
    chromium.press("m")  # more like this one
    says = "document.getElementById('says').textContent"
    chromium.wait_for(f"{says}.startsWith('more like {second}') && {focused} === {first}")
    chromium.press("ArrowRight")
    assert chromium.evaluate(f"{focused} === document.querySelectorAll('figure .name')[1].textContent")
    chromium.press("/")
    assert chromium.evaluate(focused) == "query" and chromium.said == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_with_ctrl_c(index, number):
    command = [sys.executable, "-m", "clipctl", "browse", index[0], "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = process.stdout.readline().strip()
    assert process.stderr.readline() == "Press Ctrl-C to stop.\n"
    with urllib.request.urlopen(address, timeout=20) as page:
        assert page.status == 200
    process.send_signal(number)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 0


def test_a_port_that_is_taken_is_refused(index):
    from typer.testing import CliRunner

    from clipctl.cli.app import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = CliRunner().invoke(app, ["browse", str(index[0]), "--port", str(taken.getsockname()[1])])
    assert refused.exit_code == 2 and "cannot be used" in refused.stderr
