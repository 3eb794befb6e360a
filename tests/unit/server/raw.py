"""A connection as no HTTP library would use it."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.unit.server.conftest import KEY


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(url.rsplit(":")[-1])))
    return connection


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


def post(path: str, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    return head(path, len(body)) + body


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it; or resets it, with what came before."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = connection.recv(1 << 16)
        assert piece, f"the connection ended after {data!r}"
        data += piece
    return data
