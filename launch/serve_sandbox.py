r"""Serves the Python interpreter over HTTP, also in SandboxFusion's protocol; `docs/sandbox_service.md` says more.

AGENTIC_RL_SANDBOX_TOKEN=... python launch/serve_sandbox.py --host=0.0.0.0 --port=8080
"""

from __future__ import annotations

import asyncio
import os
import pathlib

from absl import flags

from agentic_rl.errors import UserError
from agentic_rl.sandbox import LEVELS, Interpreter, InterpreterConfig, Limits, LimitsError, SandboxStartError
from agentic_rl.sandbox.service import SandboxService
from agentic_rl.train.config_check import run_app

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
_PORT = flags.DEFINE_integer("port", 8080, "Port to listen at; 0 lets the system choose.", 0, 65_535)
_SLOTS = flags.DEFINE_integer("slots", 0, "Snippets that run at the same time; 0 means max(4, CPUs).", 0)
_QUEUE = flags.DEFINE_integer("queue", 1024, "Requests that may wait; more are answered with 429.", 0)
_MIN_ISOLATION = flags.DEFINE_enum("min_isolation", "landlock", LEVELS, "Refuses to start below this isolation.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "File with the token; default is AGENTIC_RL_SANDBOX_TOKEN.")
_INSECURE = flags.DEFINE_bool("insecure", False, "Allow an address that others can reach without a token.")
_WALL_S = flags.DEFINE_float("wall_s", Limits.wall_s, "Default limit of wall time.")
_CPU_S = flags.DEFINE_float("cpu_s", Limits.cpu_s, "Default limit of CPU time, and the limit for /run_code.")
_MEMORY_MIB = flags.DEFINE_integer("memory_mib", Limits.memory_mib, "Default limit of memory.")
_TOTAL_MEMORY_MIB = flags.DEFINE_integer("total_memory_mib", 0, "Memory of all snippets together; 0 means no limit.")
_SESSION_IDLE_S = flags.DEFINE_float("session_idle_s", 600, "A session that is idle for this long is closed.")
_DRAIN_S = flags.DEFINE_float("drain_s", 30, "What runs at SIGTERM may go on for this long.")
_WARM = flags.DEFINE_bool("warm", True, "Load the modules (numpy, sympy, scipy) before the first request.")


def _token() -> str:
  """The token, or an empty string where none is needed."""
  path, host = _TOKEN_FILE.value, _HOST.value
  try:
    given = pathlib.Path(path).read_text("utf-8") if path else os.environ.get("AGENTIC_RL_SANDBOX_TOKEN", "")
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"--token_file cannot be read: {error}") from error
  token = given.strip()
  if path and not token:
    raise UserError(f"--token_file={path} is empty")
  if not (token or host in ("127.0.0.1", "::1", "localhost") or _INSECURE.value):
    raise UserError(f"--host={host} can be reached by others; give a token (--token_file), or say --insecure")
  return token


async def _serve(config: InterpreterConfig, token: str) -> None:
  host, idle_s = _HOST.value, _SESSION_IDLE_S.value
  async with await Interpreter.start(config) as interpreter:
    if _WARM.value:
      await interpreter.warm()
    service = SandboxService(interpreter, token=token, max_queue=_QUEUE.value, session_idle_s=idle_s)
    url = f"http://[{host}]" if ":" in host else f"http://{host}"
    what = f"isolation {service.level}, {config.resolved_slots()} slots, {'with' if token else 'without'} a token"
    ready = lambda port: print(f"sandbox listens at {url}:{port} ({what})", flush=True)  # noqa: E731
    try:
      await service.serve(host, _PORT.value, drain_s=_DRAIN_S.value, on_ready=ready)
    except OSError as error:
      raise UserError(f"cannot listen at {host}:{_PORT.value}: {error.strerror or error}") from error


def main(argv: list[str]) -> int:
  del argv
  try:
    limits = Limits(_WALL_S.value, _CPU_S.value, _MEMORY_MIB.value)
    config = InterpreterConfig(
      slots=_SLOTS.value, limits=limits, min_isolation=_MIN_ISOLATION.value, total_memory_mib=_TOTAL_MEMORY_MIB.value
    )
    asyncio.run(_serve(config, _token()))
  except (LimitsError, SandboxStartError) as error:
    raise UserError(str(error)) from error
  return 0


if __name__ == "__main__":
  run_app(main)
