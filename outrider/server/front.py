"""What every request passes first and last: whether it may ask, the headers of its answer, and a printed line about it.

A browser lets any page send requests to a server of its machine. Two headers give such a page away. Its `Origin` is
foreign. If the name in its address was made to mean this machine (DNS rebinding), the `Host` is foreign.
"""

import asyncio
import re
import socket
import time
from contextlib import suppress

from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.base.errors import UserError
from outrider.inference.settings.tools import ServeConfig
from outrider.server.workers import GIVEN_UP, RefusedError

FIGURES = "outrider.figures"  # the key in a request's scope of what was measured of its answer, for the printed line
# The page has its script and style in itself, reaches this server alone, and stands in no frame.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_HEADERS = {"Content-Security-Policy": f"{_POLICY}; frame-ancestors 'none'", "X-Frame-Options": "DENY"}
_HEADERS |= {"Vary": "Origin", "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
# The scheme of an Origin; the address in brackets, or the name or address, with the dot that may end it; the port.
_HOST = re.compile(r"(?:https?://)?(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+?)\.?)(?::\d+)?", re.IGNORECASE)


def refusal(error: Exception) -> JSONResponse:
    """The response for an error, in OpenAI's format."""
    status, param = (error.status, error.param) if isinstance(error, RefusedError) else (400, None)
    status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (status, str(error))
    content = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "param": param}
    return JSONResponse({"error": content | {"code": None}}, status, {"Retry-After": "1"} if status == 429 else None)


def _name(header_value: str) -> str:
    """The name or address in a `Host` or `Origin` header, without scheme and port; empty if there is none."""
    match = _HOST.fullmatch(header_value)
    return (match[1] or match[2]).lower() if match else ""


class Front:
    """`app` for the hosts and origins that `config` allows; by default this machine's."""

    def __init__(self, app: ASGIApp, config: ServeConfig):
        self._app, self._is_open, machine_name = app, config.host in ("0.0.0.0", "::", ""), socket.gethostname().lower()
        host_names = {machine_name, machine_name.partition(".")[0]} if self._is_open else {config.host.lower()}
        self._hosts = {"localhost", "127.0.0.1", "::1", *map(str.lower, config.allow_hosts)} | host_names
        self._origins = {*config.allow_origins}

    def _admit(self, http_method: str, headers: dict[str, str]) -> dict[str, str]:
        """The headers that let a page of another origin read the answer. Raises `RefusedError` if it may not ask.

        A numeric address is no name that could have been made to mean this machine. So any is allowed if `host=` stands
        for all addresses of the machine.
        """
        host, origin, content_type = headers.get("host", ""), headers.get("origin"), headers.get("content-type", "")
        is_numeric = re.fullmatch(r"[\d.]+|.*:.*", _name(host))
        if not ({_name(host), "*"} & self._hosts or (self._is_open and is_numeric)):
            raise RefusedError(f"Host {host!r}: not a name of this server; allow_hosts=[NAME] adds one", status=421)
        is_local = origin is None or origin.partition("://")[2] == host or _name(origin) in self._hosts
        if not (is_local or self._origins & {origin, "*"}):
            raise RefusedError(f"Origin {origin!r}: not allowed to ask; allow_origins=[ORIGIN] allows it", status=403)
        if http_method == "POST" and content_type.partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(f"Content-Type {content_type!r}: expected application/json", status=415)
        requested_headers = headers.get("access-control-request-headers", "")
        cors_headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": requested_headers}
        return {} if origin is None else {"Access-Control-Allow-Origin": origin, **cors_headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        began, status, added = time.perf_counter(), 0, _HEADERS  # status 0: no answer has begun

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, old_headers = message["status"], message.get("headers", ())
                new_headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in added.items()]
                message = {**message, "headers": [*old_headers, *new_headers]}
            await send(message)

        try:
            if scope["path"] != "/health":  # open to all
                added = _HEADERS | self._admit(scope["method"], headers)
            app = Response(status_code=204) if scope["method"] == "OPTIONS" else self._app
            await app(scope, receive, answer)
        except UserError as error:
            await refusal(error)(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends before it began to answer
            if not status:
                await refusal(RefusedError(GIVEN_UP, status=503))(scope, receive, answer)
        finally:
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:200]
            figures = {"status": status, **scope.get(FIGURES, {}), "seconds": round(time.perf_counter() - began, 2)}
            with suppress(OSError):  # the reader of the output has gone
                print(scope["method"], path, *(f"{name}={value}" for name, value in figures.items()), flush=True)
