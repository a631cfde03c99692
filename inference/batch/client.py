"""HTTP to a server: time limits, retries, streams. The key in OPENAI_API_KEY goes to no other server."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

import httpx

from outrider.base.errors import UserError, reason
from outrider.base.files import MOST_BYTES, parse_json
from outrider.base.words import read_secret

UNANSWERED = "server"  # the failure of a prompt that a resumed run asks again
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the first retry, doubled for each later retry; the limit of a pause
_SHOWN = 500  # bytes of a refusal that are shown
_CONNECT_LIMIT = 10.0  # seconds to connect to the server
_QUICK_LIMIT = httpx.Timeout(30.0, connect=_CONNECT_LIMIT)  # of a request that computes nothing
Reply = TypeVar("Reply")


class ReplyError(Exception):
    """No usable reply. failure: the value of `Answer.failure`. retry: whether to repeat the request. wait: the number
    of seconds before, if the server names it."""

    def __init__(self, words: str, failure: str = UNANSWERED, *, retry: bool = True, wait: float | None = None):
        super().__init__(words)
        self.failure, self.retry, self.wait = failure, retry, wait


def read_json(response: httpx.Response) -> Any:
    """The JSON of a reply. Raises `UserError` for a reply that is too long, nested too deeply, or no JSON."""
    return parse_json(b"".join(bounded_parts(response)))


def bounded_parts(response: httpx.Response) -> Iterator[bytes]:
    """The parts of a reply as they come. Raises `UserError` for a reply that is too long."""
    bytes_read = 0
    for chunk in response.iter_raw():  # not compressed: the client accepts only "identity"
        bytes_read += len(chunk)
        if bytes_read > MOST_BYTES:
            raise UserError(f"more than {MOST_BYTES} bytes")
        yield chunk


def lines_of(response: httpx.Response) -> Iterator[bytes]:
    """The lines of a reply as they come. Unlike httpx's `iter_lines`, the function splits at line feeds only."""
    unfinished_line = b""
    for chunk in bounded_parts(response):
        *lines, unfinished_line = (unfinished_line + chunk).split(b"\n")
        yield from lines
    yield unfinished_line


def ask_together(requests: Sequence[Callable[[], Reply]], max_running: int) -> list[Reply]:
    """The replies to `requests`, of which at most `max_running` run at a time. Raises what a request raises. After an
    error, or Ctrl-C, nothing waits for the requests that are still running: a server may hang."""
    reply_futures: list[Future[Reply]] = [Future() for _ in requests]
    open_requests = deque(zip(reply_futures, requests, strict=True))

    def work() -> None:
        while open_requests:
            with suppress(IndexError):  # another thread took the last request
                reply_future, request = open_requests.popleft()
                try:
                    reply_future.set_result(request())
                except BaseException as error:
                    reply_future.set_exception(error)

    for _ in range(min(max_running, len(requests))):
        Thread(target=work, daemon=True).start()
    try:
        return [future.result() for future in reply_futures]
    finally:
        open_requests.clear()


class Client:
    """Asks the server at `url`; any thread may. label: the option with the URL, for errors. timeout: the longest time
    in seconds without a byte of a reply. retries: how often `retry` repeats a failed request, after a pause. Raises
    `UserError` for a key that cannot be sent, and for a proxy in the environment that cannot be used."""

    def __init__(self, url: str, label: str, timeout: float, retries: int):
        self.url, self.label = url.rstrip("/").removesuffix("/v1"), label
        self._retries = retries
        api_key = read_secret("OPENAI_API_KEY")
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        no_reuse = httpx.Limits(max_keepalive_connections=0)  # a server may close kept connections at a request
        try:
            self._limit = httpx.Timeout(timeout, connect=min(timeout, _CONNECT_LIMIT))
            self._http = httpx.Client(headers=headers, timeout=self._limit, limits=no_reuse, follow_redirects=True)
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"{label}: {reason(error)}; see SSL_CERT_FILE, HTTP_PROXY and ALL_PROXY") from None

    def fetch(
        self, path: str, body: Mapping[str, object] | None = None, read: Callable[[httpx.Response], Reply] = read_json
    ) -> Reply:
        """The result of `read` for the reply; a body is POSTed. Raises `ReplyError`, and `UserError` for a refusal."""
        method, timeout = ("GET", _QUICK_LIMIT) if body is None else ("POST", self._limit)
        try:
            with self._http.stream(method, f"{self.url}{path}", json=body, timeout=timeout) as response:
                if response.request.method != method:  # a redirected POST became a GET
                    new_origin = f"{response.url.scheme}://{response.url.netloc.decode()}"
                    raise ReplyError(f"{path} is redirected to {new_origin}; give that server", retry=False)
                if response.is_success:
                    return read(response)
                status, message = response.status_code, next(response.iter_raw(_SHOWN), b"").decode("utf-8", "replace")
                retry_after = response.headers.get("Retry-After", "")
        except ReplyError:
            raise
        except Exception as error:  # a reply may be anything
            cause = reason(error) if isinstance(error, UserError) else f"{type(error).__name__}: {reason(error)}"
            raise ReplyError(f"{path} gave no reply that can be read ({cause})") from None
        refusal = f"{path} answered {status}: {message.strip()}"
        if status in (401, 403, 404):
            raise UserError(f"{self.label}: {refusal}; check URL, model, OPENAI_API_KEY")
        wait_seconds = float(retry_after) if retry_after.isdecimal() and retry_after.isascii() else None
        raise ReplyError(refusal, retry=status in (408, 429) or status >= 500, wait=wait_seconds)

    def retry(self, make: Callable[[], Reply], retries_left: int | None = None) -> Reply:
        """The result of `make`, which is called again after a pause if it raises a `ReplyError` with `retry`."""
        retries_left, pause_seconds = self._retries if retries_left is None else retries_left, PAUSE
        while True:
            try:
                return make()
            except ReplyError as error:
                if not retries_left or not error.retry:
                    raise
                time.sleep(min(max(pause_seconds, error.wait or 0.0), LONGEST_PAUSE))
                retries_left, pause_seconds = retries_left - 1, 2 * pause_seconds
