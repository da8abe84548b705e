"""A page, served on this machine, to search an index with: a search box and a grid of pictures.

Only programs on this machine can reach it, and only if they know the token in its address. It never writes. A request
names a picture by its number in the index: no path from a request ever reaches the file system, and what is sent is
drawn anew from the decoded picture, never the file itself.
"""

import hmac
import io
import json
import re
import secrets
import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import clipctl
from clipctl.data.bad import BadPictureError
from clipctl.data.decoding import open_picture
from clipctl.data.formats.rows import Hints
from clipctl.inference.embedder import Embedder
from clipctl.inference.embedding_store import EmbeddingStore
from clipctl.inference.gallery import Originals
from clipctl.inference.search import nearest
from clipctl.inference.stream import square_of

HOST = "127.0.0.1"
THUMBNAIL_PX, PICTURE_PX = 320, 1600
KEPT_THUMBNAILS = 2000  # about 20 kB each
MAX_TOP, USUAL_TOP = 500, 60
QUERY_LIMIT_CHARACTERS = 1000
BODY_LIMIT_BYTES = 32 * 2**20
SILENCE_LIMIT_S, REQUEST_LIMIT_S = (
    10.0,
    30.0,
)  # for a client that sends nothing, and for one that sends little by little
MOST_AT_ONCE = 32  # requests; more are turned away

_ADDRESS = re.compile(r"/(?P<token>[A-Za-z0-9_-]{1,64})/(?P<what>[a-z]*)(?:/(?P<row>\d{1,10}))?")


class Refused(Exception):
    """A response that is not a result."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class Searcher:
    """What the page can ask for."""

    def __init__(self, store: EmbeddingStore, embedder: Embedder) -> None:
        self._store, self._embedder = store, embedder
        self._originals = Originals(store.manifest.places, Hints(**store.manifest.hints))
        self._lock = threading.Lock()  # one search at a time: each uses all cores
        self._thumbnails: OrderedDict[int, bytes] = OrderedDict()

    @property
    def facts(self) -> dict[str, Any]:
        return {"pictures": len(self._store), "model": self._store.manifest.model.name}

    def by_words(self, words: str, top: int) -> list[dict[str, Any]]:
        """Without words, the first pictures of the index."""
        if not words.strip():
            return [self._result(row, None) for row in range(min(top, len(self._store)))]
        with self._lock:
            vector = self._embedder.embed_texts([words[:QUERY_LIMIT_CHARACTERS]])
        return self._nearest(vector, top)

    def like(self, row: int, top: int) -> list[dict[str, Any]]:
        self._check(row)
        return self._nearest(np.asarray(self._store.vectors[row : row + 1], dtype=np.float32), top)

    def by_picture(self, content: bytes, top: int) -> list[dict[str, Any]]:
        try:
            pixels = square_of(content, self._embedder.size_px)
        except BadPictureError as error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"this file cannot be used: {error}") from None
        with self._lock:
            vector = self._embedder.embed_pixels(pixels[None])
        return self._nearest(vector, top)

    def thumbnail(self, row: int) -> bytes:
        found = self._thumbnails.get(row)
        if found is None:
            found = self.picture(row, THUMBNAIL_PX)
            with self._lock:
                self._thumbnails[row] = found
                while len(self._thumbnails) > KEPT_THUMBNAILS:
                    self._thumbnails.popitem(last=False)
        return found

    def picture(self, row: int, most_px: int) -> bytes:
        """Drawn anew as JPEG, with no side above `most_px`."""
        self._check(row)
        try:
            picture = open_picture(self._originals.unchanged(self._store.picture(row)), most_px)
        except BadPictureError as error:
            raise Refused(HTTPStatus.NOT_FOUND, str(error)) from None
        picture.thumbnail((most_px, most_px), Image.Resampling.BICUBIC)
        drawn = io.BytesIO()
        picture.save(drawn, "JPEG", quality=85)
        return drawn.getvalue()

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self._store):
            raise Refused(HTTPStatus.NOT_FOUND, "no such picture")

    def _nearest(self, query: NDArray[np.float32], top: int) -> list[dict[str, Any]]:
        with self._lock:
            found = nearest(self._store, query, top)
        return [
            self._result(int(row), round(float(score), 6))
            for row, score in zip(found.rows[0], found.scores[0], strict=True)
        ]

    def _result(self, row: int, score: float | None) -> dict[str, Any]:
        path = self._store.picture(row).path.encode(errors="replace").decode()
        return {"row": row, "score": score, "name": path.rpartition("/")[2], "path": path}


class Server(ThreadingHTTPServer):
    """Serves one index until it is shut down. Raises OSError if the port is taken."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, searcher: Searcher, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.searcher, self.token = searcher, secrets.token_urlsafe(18)
        self.places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """More requests at once than a browser makes are turned away, before a thread is started for them."""
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        limit = threading.Timer(REQUEST_LIMIT_S, _cut, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has disconnected is not a problem."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = f"clipctl/{clipctl.__version__}", ""
    timeout = SILENCE_LIMIT_S

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: queries are private."""

    def _answer(self, find: Any) -> None:
        try:
            what, row, question = self._checked()
            kind, body = find(what, row, question)
            self._send(HTTPStatus.OK, kind, body)
        except Refused as refusal:
            self._send_error(refusal.status, str(refusal))
        except (TimeoutError, ConnectionError):
            self.close_connection = True
        except Exception as error:  # the page says so, and the next request may be answered again
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _send_error(self, status: HTTPStatus, words: str) -> None:
        with suppress(OSError):
            self._send(status, "application/json", json.dumps({"error": words}).encode())

    def _checked(self) -> tuple[str, int | None, dict[str, list[str]]]:
        """Check who asks, and for what. A page elsewhere that guesses the port fails here, by its Host or by the
        token."""
        if self.headers.get("Host", "") not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN, "wrong host")
        address = urlsplit(self.path)
        match = _ADDRESS.fullmatch(address.path)
        if match is None or not hmac.compare_digest(match["token"].encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "wrong address: open the one that clipctl browse printed")
        try:
            question = parse_qs(address.query, max_num_fields=4, errors="replace")
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "too many fields") from None
        return match["what"], None if match["row"] is None else int(match["row"]), question

    def _get(self, what: str, row: int | None, question: dict[str, list[str]]) -> tuple[str, bytes]:
        searcher = self.server.searcher
        match what, row:
            case "", None:
                return "text/html; charset=utf-8", self._page()
            case "search", None:
                return self._results(searcher.by_words(question.get("q", [""])[0], _top(question)))
            case "like", int(number):
                return self._results(searcher.like(number, _top(question)))
            case "thumbnail", int(number):
                return "image/jpeg", searcher.thumbnail(number)
            case "picture", int(number):
                return "image/jpeg", searcher.picture(number, PICTURE_PX)
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _post(self, what: str, row: int | None, question: dict[str, list[str]]) -> tuple[str, bytes]:
        if (what, row) != ("picture", None):
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,12}", length):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is required")
        if int(length) > BODY_LIMIT_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {BODY_LIMIT_BYTES >> 20} MiB")
        content = self.rfile.read(int(length))
        if len(content) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, "the picture is incomplete")
        return self._results(self.server.searcher.by_picture(content, _top(question)))

    def _results(self, results: list[dict[str, Any]]) -> tuple[str, bytes]:
        return "application/json", json.dumps({"results": results}).encode()

    def _page(self) -> bytes:
        # What a script element ends with must not occur in the facts.
        facts = json.dumps(self.server.searcher.facts).replace("<", "\\u003c")
        page = files("clipctl.report").joinpath("browse.html").read_text(encoding="utf-8")
        self._nonce = secrets.token_urlsafe(12)
        return page.replace("NONCE", self._nonce).replace("FACTS", facts).encode()

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        nonce = getattr(self, "_nonce", "")
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        policy += "img-src 'self' data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "private, max-age=3600" if kind == "image/jpeg" else "no-store")
        self.end_headers()
        self.wfile.write(body)


def _cut(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _top(question: dict[str, list[str]]) -> int:
    text = question.get("top", [""])[0]
    return max(1, min(MAX_TOP, int(text))) if re.fullmatch(r"\d{1,6}", text) else USUAL_TOP
