"""A proxy on loopback that passes HTTP requests on, and spoils those that it is told to."""

from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Exchange:
    """One request and what can be done with it. Only `answer`, `reset` or `hang` end it."""

    method: str
    path: str
    headers: dict[str, str]
    _handler: Any
    _target: tuple[str, int]
    _stopped: threading.Event
    _body: bytes | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def body(self) -> bytes:
        if self._body is None:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                raise NotImplementedError("a body of unknown length")
            self._body = self._handler.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self._body

    def forward(self) -> Answer:
        """Have the server do it."""
        body = self.body
        server = http.client.HTTPConnection(*self._target, timeout=60)
        try:
            server.putrequest(self.method, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    server.putheader(name, value)
            server.endheaders(body)
            response = server.getresponse()
            kept = [(n, v) for n, v in response.getheaders() if n.lower() not in ("connection", "transfer-encoding")]
            return Answer(response.status, kept, response.read())
        finally:
            server.close()

    def answer(self, given: Answer, *, cut: bool = False) -> None:
        """Tell the client; with `cut`, all but the last byte, and then a reset."""
        _ = self.body  # else the next request on this connection would begin with it
        self._handler.send_response_only(given.status)
        for name, value in given.headers:
            self._handler.send_header(name, value)
        if "content-length" not in [name.lower() for name, _ in given.headers]:
            self._handler.send_header("Content-Length", str(len(given.body)))
        self._handler.end_headers()
        if self.method != "HEAD":
            self._handler.wfile.write(given.body[:-1] if cut else given.body)
        if cut:
            self.reset()

    def refuse(self, status: int, code: str) -> None:
        """Answer as S3 words its errors, without the server's doing."""
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>spoiled</Message></Error>".encode()
        self.answer(Answer(status, [("Content-Type", "application/xml")], body))

    def reset(self) -> None:
        """End the connection with a RST instead of a FIN."""
        self._handler.close_connection = True
        client = self._handler.connection
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(client.detach())

    def hang(self) -> None:
        """Say nothing, and read nothing, until the client gives up."""
        client = self._handler.connection
        while not self._stopped.wait(0.02):
            try:
                if not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    break  # closed
            except BlockingIOError:
                continue
            except OSError:
                break
            if self._body is None and _closed_by_peer(client):
                break
        self._handler.close_connection = True


Fault = Callable[[Exchange], None]


def internal_error(exchange: Exchange) -> None:
    exchange.refuse(500, "InternalError")


def slow_down(exchange: Exchange) -> None:
    exchange.refuse(503, "SlowDown")


def hang(exchange: Exchange) -> None:
    exchange.hang()


def reset(exchange: Exchange) -> None:
    exchange.reset()


def lose_reply(exchange: Exchange) -> None:
    exchange.forward()
    exchange.reset()


def cut_reply(exchange: Exchange) -> None:
    exchange.answer(exchange.forward(), cut=True)


def hang_after(exchange: Exchange) -> None:
    exchange.forward()
    exchange.hang()


def deliver_twice(exchange: Exchange) -> None:
    exchange.forward()
    exchange.answer(exchange.forward())


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (internal_error, slow_down, hang, reset, lose_reply, cut_reply, hang_after, deliver_twice)
}


def _anything(exchange: Exchange) -> bool:
    return True


@dataclass
class FaultProxy:
    """Listens at `url`; `seen` are the requests since it was last told something, `spoiled` how many were spoiled."""

    target: str
    seen: list[str] = field(default_factory=list)
    spoiled: int = 0
    _fault: Fault | None = None
    _nth: int = 1
    _forever: bool = False
    _where: Callable[[Exchange], bool] = _anything
    _matching: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.handle_error = lambda request, address: None  # clients go away in the middle: that is the point
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def spoil(
        self, fault: Fault, *, nth: int = 1, forever: bool = False, where: Callable[[Exchange], bool] = _anything
    ) -> None:
        """From now on spoil the nth request, counted from 1 among those that `where` accepts, or also all after it."""
        with self._lock:
            self.seen, self.spoiled, self._matching = [], 0, 0
            self._fault, self._nth, self._forever, self._where = fault, nth, forever, where

    def heal(self) -> None:
        """Spoil nothing from now on."""
        with self._lock:
            self.seen, self.spoiled, self._fault = [], 0, None

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def _fault_for(self, exchange: Exchange) -> Fault | None:
        with self._lock:
            self.seen.append(str(exchange))
            if self._fault is None or not self._where(exchange):
                return None
            self._matching += 1
            if self._matching < self._nth or (self._matching > self._nth and not self._forever):
                return None
            self.spoiled += 1
            return self._fault

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self
        address = urlsplit(self.target)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # so that connections are kept, and can break between two requests

            def serve(self) -> None:
                exchange = Exchange(
                    self.command,
                    self.path,
                    dict(self.headers),
                    self,
                    (address.hostname, address.port),
                    proxy._stopped,
                )
                if fault := proxy._fault_for(exchange):
                    fault(exchange)
                else:
                    exchange.answer(exchange.forward())

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _closed_by_peer(client: socket.socket) -> bool:
    """Whether the other end has closed, though what it sent before has not been read."""
    state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != 1  # TCP_ESTABLISHED
