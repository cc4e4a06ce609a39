"""The servers of a remote interpreter: which of them answer, how much each has to do, and one request to one."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import io
import logging
import math
import random
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import aiohttp

from agentic_rl.sandbox import wire
from agentic_rl.sandbox.limits import LEVELS, ExecResult, Limits, LimitsError

_LARGE_BYTES = 1 << 20
_PROBE_S = 5.0
_log = logging.getLogger(__name__)

Protocol = Literal["native", "sandbox_fusion"]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
  """Where the servers are and how to treat them.

  Attributes:
    urls: One address or more, such as `http://10.0.0.7:8080`.
    token: Sent as `Authorization: Bearer ...`; empty where the servers want none.
    protocol: `native` for `launch/serve_sandbox.py`; `sandbox_fusion` for SandboxFusion, which has no sessions.
    limits: Limits of a snippet that brings none.
    max_in_flight_per_host: One-shot snippets that a host is given at the same time; further ones wait here.
    retries: How often a snippet is tried again after a fault of a host.
    backoff_s: Longest wait before the first of these; it doubles each time. The actual wait is random.
    max_backoff_s: Its upper bound.
    wait_s: Time beyond `Limits.wall_s` after which a snippet that has no answer is given up: in the queues here and
      there, on the way, and for all its tries together.
    connect_timeout_s: Longest wait for a connection.
    start_timeout_s: Longest wait of `start` for a host.
    max_response_mib: Largest answer that is read.
  """

  urls: tuple[str, ...] = ()
  token: str = dataclasses.field(default="", repr=False)
  protocol: Protocol = "native"
  limits: Limits = dataclasses.field(default_factory=Limits)
  max_in_flight_per_host: int = 64
  retries: int = 6
  backoff_s: float = 0.25
  max_backoff_s: float = 8.0
  wait_s: float = 600.0
  connect_timeout_s: float = 5.0
  start_timeout_s: float = 10.0
  max_response_mib: float = 96

  def __post_init__(self) -> None:
    if isinstance(self.urls, str):
      raise LimitsError(f"RemoteConfig.urls must be a sequence of addresses, got the str {self.urls!r}")
    if not self.urls:
      raise LimitsError("RemoteConfig.urls is empty; give the address of one server or more")
    if self.protocol not in get_args(Protocol):
      raise LimitsError(f"RemoteConfig.protocol must be one of {', '.join(get_args(Protocol))}, got {self.protocol!r}")
    if not isinstance(self.token, str) or not self.token.isprintable() or not self.token.isascii():
      raise LimitsError("RemoteConfig.token must be printable ASCII")
    for name, low, integral in (
      ("max_in_flight_per_host", 1, True),
      ("retries", 0, True),
      ("backoff_s", 0, False),
      ("max_backoff_s", 0, False),
      ("wait_s", 0.01, False),
      ("connect_timeout_s", 0.01, False),
      ("start_timeout_s", 0.01, False),
      ("max_response_mib", 0.001, False),
    ):
      value = getattr(self, name)
      kinds = (int,) if integral else (int, float)
      if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < low:
        kind = "an integer" if integral else "a number"
        raise LimitsError(f"RemoteConfig.{name} must be {kind} from {low:g} on, got {value!r}")
    if len(set(self.addresses())) < len(self.urls):
      raise LimitsError("RemoteConfig.urls names a server twice")

  def addresses(self) -> list[str]:
    """The addresses in one form, without a slash at the end, and without `/run_code`, which others put there."""
    return [_address(url) for url in self.urls]


def _address(url: Any) -> str:
  problem = f"RemoteConfig.urls must have addresses such as http://10.0.0.7:8080, got {str(url)[:200]!r}"
  if not isinstance(url, str):
    raise LimitsError(problem)
  try:
    parts = urllib.parse.urlsplit(url.strip())
    parts.port  # noqa: B018  (raises if it is no number)
  except ValueError as error:
    raise LimitsError(f"{problem}: {error}") from error
  if parts.scheme not in ("http", "https"):
    raise LimitsError(f"{problem}: the scheme must be http or https")
  if not parts.hostname or parts.query or parts.fragment or parts.username or parts.password:
    raise LimitsError(f"{problem}: it needs a host and must have no user, query or fragment")
  path = parts.path.rstrip("/").removesuffix("/run_code").rstrip("/")
  return f"{parts.scheme}://{parts.netloc}{path}"


class HostError(Exception):
  """A request got no answer that could be used."""


class NotStartedError(HostError):
  """The host was not reached, or took nothing in, so that the snippet cannot have started.

  Attributes:
    final: Whether nothing of the process that listened there can be left: nobody listens, or it shuts down.
  """

  def __init__(self, text: str, final: bool = False) -> None:
    super().__init__(text)
    self.final = final


class BrokenError(HostError):
  """The request was sent and no answer came; the snippet may have started."""


class MalformedError(HostError):
  """The answer was not what a server of this protocol says."""


class BusyError(HostError):
  """The host asks to come again later.

  Attributes:
    wait_s: After how long, or None if it does not say.
  """

  def __init__(self, text: str, wait_s: float | None) -> None:
    super().__init__(text)
    self.wait_s = wait_s


class TooLargeError(HostError):
  """The answer is larger than is read, which is the doing of a snippet that writes much."""


class RejectedError(HostError):
  """The host refuses this request, and would do so again.

  Attributes:
    status: HTTP status.
    why: What the host says.
  """

  def __init__(self, text: str, status: int, why: str) -> None:
    super().__init__(text)
    self.status, self.why = status, why


@dataclasses.dataclass(eq=False)
class Host:
  """One server.

  Attributes:
    url: Its address.
    up: Whether it is given snippets.
    in_flight: Requests that it has not answered.
    failures: Faults since its last good answer.
    why: The last fault.
    facts: What it last said of itself.
    instance: Name of the process that gave the last answer, empty where the protocol has none.
  """

  url: str
  up: bool = True
  in_flight: int = 0
  failures: int = 0
  why: str = ""
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  instance: str = ""


def backoff_s(config: RemoteConfig, failures: int) -> float:
  """How long to wait after so many failures: random, so that those that failed together do not come back together."""
  longest = min(config.max_backoff_s, config.backoff_s * 2.0 ** min(30, max(0, failures - 1)))
  return random.uniform(0.5, 1.0) * longest


class Pool:
  """The servers. A faulty one gets nothing until it says that it is well."""

  def __init__(self, config: RemoteConfig) -> None:
    self.hosts = [Host(url) for url in config.addresses()]
    self._config = config
    self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
    self._probes: dict[Host, asyncio.Task[None]] = {}
    self.closing = asyncio.Event()
    self._max_response = int(config.max_response_mib * (1 << 20))
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if config.token:
      headers["Authorization"] = "Bearer " + config.token
    # SandboxFusion's server closes idle connections after a few seconds. A snippet that is sent over one just then may
    # or may not have started, and could not be sent again, so that each gets a connection of its own.
    connector = aiohttp.TCPConnector(limit=0, force_close=config.protocol == "sandbox_fusion")
    self._http = aiohttp.ClientSession(
      connector=connector,
      headers=headers,
      timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
      auto_decompress=False,
      cookie_jar=aiohttp.DummyCookieJar(),
    )

  async def close(self) -> None:
    """Ends the probes and the connections; whoever waits for a host learns that there is none."""
    self.closing.set()
    self._wake(len(self._waiters))
    probes = list(self._probes.values())
    for task in probes:
      task.cancel()
    await asyncio.gather(*probes, return_exceptions=True)
    await self._http.close()

  @property
  def waiting(self) -> int:
    """How many snippets wait here for a host."""
    return len(self._waiters)

  # -- who gets what -------------------------------------------------------------------------------------------------

  async def acquire(self, until: float) -> Host:
    """The host with the least to do; waits while all have as much as they may. `release` it.

    Args:
      until: By the loop's clock.

    Raises:
      NotStartedError: No host is up, or none is free in time.
    """
    again = False
    while True:
      if self.closing.is_set():
        raise NotStartedError("the interpreter was closed")
      ready = [host for host in self.hosts if host.up]
      if not ready:
        raise NotStartedError("no server answers: " + "; ".join(f"{host.url}: {host.why}" for host in self.hosts))
      best = min(ready, key=lambda host: host.in_flight)
      if best.in_flight < self._config.max_in_flight_per_host and (again or not self._waiters):
        best.in_flight += 1
        return best
      future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
      (self._waiters.appendleft if again else self._waiters.append)(future)
      try:
        async with asyncio.timeout_at(until):
          await future
      except TimeoutError as error:
        self._abandon(future)
        raise NotStartedError("all servers are busy and none was free in time") from error
      except asyncio.CancelledError:
        self._abandon(future)
        raise
      again = True

  def _abandon(self, future: asyncio.Future[None]) -> None:
    if future in self._waiters:
      self._waiters.remove(future)
    else:
      self._wake(1)  # it was woken for a place that it does not take

  def _wake(self, count: int) -> None:
    while count > 0 and self._waiters:
      future = self._waiters.popleft()
      if not future.done():
        future.set_result(None)
        count -= 1

  def release(self, host: Host) -> None:
    """Gives back a place at a host."""
    host.in_flight -= 1
    self._wake(1)

  def fail(self, host: Host, why: str) -> None:
    """Takes a host out until it says that it is well."""
    host.failures += 1
    host.why = why
    if host.up:
      _log.warning("%s is taken out: %s", host.url, why)
    host.up = False
    if not any(other.up for other in self.hosts):
      self._wake(len(self._waiters))  # they have to learn that nobody is left
    if host not in self._probes and not self.closing.is_set():
      self._probes[host] = asyncio.get_running_loop().create_task(self._probe(host))

  async def _probe(self, host: Host) -> None:
    loop = asyncio.get_running_loop()
    while True:
      await asyncio.sleep(backoff_s(self._config, host.failures))
      try:
        before = host.instance
        await self.call(host, "GET", self._health_path, None, loop.time() + _PROBE_S, lambda said: said)
        if not host.facts or host.instance != before:
          await self.greet(host, _PROBE_S)
        break
      except HostError as error:
        host.failures += 1
        host.why = str(error)
    _log.warning("%s is well again", host.url)
    del self._probes[host]
    host.up = True
    self._wake(self._config.max_in_flight_per_host)

  @property
  def _health_path(self) -> str:
    """What tells whether a host is well."""
    return "/health" if self._config.protocol == "native" else "/v1/ping"

  async def greet(self, host: Host, patience_s: float) -> None:
    """Asks a host what it is, as far as its protocol has words for that; raises HostError."""
    native = self._config.protocol == "native"
    path, decode = ("/capabilities", _facts) if native else (self._health_path, lambda said: {})
    until = asyncio.get_running_loop().time() + patience_s
    host.facts = await self.call(host, "GET", path, None, until, decode)

  # -- one request ---------------------------------------------------------------------------------------------------

  async def call(
    self, host: Host, method: str, path: str, body: bytes | None, until: float, decode: Callable[[Any], _T]
  ) -> _T:
    """Sends one request and returns what the answer says.

    Args:
      host: Which server.
      method: HTTP method.
      path: Path below its address.
      body: JSON.
      until: When to give up, by the loop's clock.
      decode: Makes it of the JSON; raises WireError if it is not what it should be.

    Raises:
      HostError: Whatever there was instead of an answer; the class tells whether the snippet can have started.
    """
    if self.closing.is_set():
      raise NotStartedError("the interpreter was closed")
    try:
      async with asyncio.timeout_at(until):
        url = host.url + path
        data: Any = io.BytesIO(body) if body is not None and len(body) > _LARGE_BYTES else body
        async with self._http.request(method, url, data=data, allow_redirects=False) as response:
          content = await self._read(response)
          status, headers = response.status, response.headers
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
      gone = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
      raise NotStartedError(f"no connection: {error}", final=gone) from error
    except TimeoutError as error:
      raise BrokenError("no answer in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
      raise BrokenError(f"the connection broke: {type(error).__name__}: {error}"[:500]) from error
    host.instance = headers.get(wire.INSTANCE_HEADER, "")[: wire.MAX_NAME]
    if content is None:
      raise TooLargeError(f"the answer is larger than the {self._max_response} bytes of RemoteConfig.max_response_mib")
    if status in (200, 201):
      try:
        if len(content) > _LARGE_BYTES:
          return await asyncio.to_thread(lambda: decode(wire.parse(content)))
        return decode(wire.parse(content))
      except wire.WireError as error:
        raise MalformedError(f"the answer is malformed: {error}") from error
    said = _said(content)
    why = str(said.get("error") or said.get("detail") or "it does not say why")[:500]
    text = f"HTTP {status}: {why}"
    if status == 429:
      raise BusyError(text, _wait_s(said, headers.get("Retry-After", "")))
    if status == 503:
      raise NotStartedError(text, final=True)
    if status >= 500:
      raise BrokenError(text)
    if status >= 400:
      raise RejectedError(text, status, why)
    raise MalformedError(f"the answer is malformed: {text}")

  async def _read(self, response: aiohttp.ClientResponse) -> bytes | None:
    """The body, or None if it is too large."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
      size += len(part)
      if size > self._max_response:
        response.close()
        return None
      parts.append(part)
    return b"".join(parts)


def _facts(said: Any) -> dict[str, Any]:
  """What a server of the native protocol says of itself."""
  facts = wire.mapping("body", said)
  wire.one_of(*LEVELS)("level", facts.get("level"))
  wire.count("slots", facts.get("slots"))
  return facts


def _said(data: bytes) -> dict[str, Any]:
  """What an answer other than 200 says, which may be anything."""
  try:
    said = wire.parse(data[:_LARGE_BYTES])
  except wire.WireError:
    return {}
  return said if isinstance(said, dict) else {}


def _wait_s(said: Mapping[str, Any], header: str) -> float | None:
  """After how long a busy host wants to be asked again."""
  exact = said.get("retry_after_s")
  if isinstance(exact, int | float) and not isinstance(exact, bool) and math.isfinite(exact) and exact >= 0:
    return float(exact)
  return float(header) if header.isascii() and header.isdigit() and len(header) < 7 else None


def infra_error(why: str, level: str, **fields: Any) -> ExecResult:
  """The result of a snippet that the servers failed."""
  return ExecResult("infra_error", error=why, level=level, **fields)
