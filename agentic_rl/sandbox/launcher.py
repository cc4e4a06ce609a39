"""The process that the pool starts: finds the isolation that the host allows, enters it, forks the zygote and waits.

It outlives the zygote, however that ends, and cleans up behind it. Its standard input is a lifeline: end of file means
that the trainer is gone. Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from agentic_rl.sandbox import cgroup, framing, harness, isolation, lowlevel, scratch, seccomp, warmup
from agentic_rl.sandbox.zygote import Zygote

_GRACE_S = 6.0


def main(arguments: list[str]) -> None:
  """Starts a zygote and waits for its end.

  Args:
    arguments: Descriptor of the control socket, private directory, mark of the process tree, and JSON with `nice`,
      `preload`, `max_isolation`, `min_isolation` and `total_memory_mib`.
  """
  control = socket.socket(fileno=int(arguments[0]))
  control.set_inheritable(False)
  directory, mark = arguments[1], arguments[2].encode()
  settings = json.loads(arguments[3])
  for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # end of file on the lifeline is the way to stop
  os.umask(0o022)
  os.nice(settings["nice"])
  autogroup = lowlevel.set_autogroup_nice(settings["nice"])
  hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
  most = harness.MOST_DESCRIPTORS
  resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(hard, most), hard))
  plan = isolation.choose(directory, settings["max_isolation"])
  plan.facts["oom score"] = lowlevel.offer_to_oom_killer()
  plan.facts["autogroup"] = autogroup
  group = cgroup.Group.make(settings["total_memory_mib"])
  plan.facts["control group"] = group.text
  try:
    refusal = _refusal(plan, settings) or (group.text if settings["total_memory_mib"] and not group.path else "")
    if refusal:
      control.sendall(framing.pack({"refused": refusal}))
      return
    sys.exit(_fork_zygote(control, directory, mark, settings, plan, group))
  finally:
    group.remove()
    scratch.remove_tree(directory)


def _refusal(plan: isolation.Plan, settings: dict[str, Any]) -> str:
  if plan.at_least(settings["min_isolation"]):
    return ""
  found = "; ".join(f"{name}: {text}" for name, text in plan.facts.items() if isinstance(text, str))
  return (
    f"the strongest isolation here is {plan.level!r}, weaker than min_isolation "
    f"{settings['min_isolation']!r} ({found}). Allow what is missing, or accept it with min_isolation={plan.level!r}."
  )


def _fork_zygote(
  control: socket.socket, directory: str, mark: bytes, settings: dict[str, Any], plan: isolation.Plan, group: Any
) -> int:
  """Runs the zygote to its end, whatever that is; returns the exit code."""
  wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
  launcher = os.getpid()
  if plan.level == "namespace":
    isolation.enter_namespaces(plan)
  pid = os.fork()
  if pid == 0:
    try:
      os.close(wake_in)
      os.close(wake_out)
      lowlevel.die_with_parent()
      if plan.level != "namespace" and os.getppid() != launcher:
        os._exit(1)
      group.join()
      _be_zygote(control, directory, settings, plan)
      os._exit(0)
    except BaseException:  # whatever it is, the pool is to read it, and this process must not go on as the launcher
      sys.excepthook(*sys.exc_info())  # into the file that the pool reads
      sys.stderr.flush()
      raise
    finally:
      harness.leave(1)
  control.close()
  signal.signal(signal.SIGCHLD, lambda *_: None)
  signal.set_wakeup_fd(wake_out)
  status = _wait(pid, wake_in)
  signal.set_wakeup_fd(-1)
  if plan.level != "namespace" and status != 0:
    lowlevel.kill_everywhere(os.getsid(0), mark)
  return 0 if status == 0 else 1


def _wait(pid: int, wake: int) -> int:
  """Waits for the zygote; kills it if the trainer has gone and it goes on, as a stopped one does."""
  lifeline: list[int] = [0]
  give_up = float("inf")
  while True:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      return status
    patience = None if give_up == float("inf") else max(0.0, give_up - time.monotonic())
    ready, _, _ = select.select([wake, *lifeline], [], [], patience)
    if wake in ready:
      with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)
    if 0 in ready and not os.read(0, 4096):
      lifeline, give_up = [], time.monotonic() + _GRACE_S
    if time.monotonic() >= give_up:
      os.kill(pid, signal.SIGKILL)
      give_up = float("inf")


def _be_zygote(control: socket.socket, directory: str, settings: dict[str, Any], plan: isolation.Plan) -> None:
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.close(null)
  lowlevel.become_subreaper()
  lowlevel.forbid_inspection()
  proc = lowlevel.OwnProc()
  home = directory
  if plan.level == "namespace":
    isolation.set_up_root(directory)
    home = isolation.SCRATCH
  elif plan.first_uid:
    os.chmod(directory, 0o711)
  os.environ["HOME"] = os.environ["TMPDIR"] = home
  os.chdir(home)
  sys.path[:] = isolation.library_paths()
  sys.path_importer_cache.clear()
  sys.set_int_max_str_digits(0)  # the CPU limit bounds long conversions
  begin = time.process_time()
  for name in settings["preload"]:
    importlib.import_module(name)
  problems = warmup.warm(settings["preload"])
  facts = {
    "level": plan.level,
    "gaps": list(isolation.gaps(plan)),
    "facts": plan.facts,
    "processes": plan.level in ("process", "namespace"),
    "fork_checkpoint": plan.level == "process" or _can_listen(),
    "installed": [] if settings["preload"] else _installed(),
    "preload": settings["preload"],
    "preload_cpu_s": round(time.process_time() - begin, 2),
    "warmup_problems": problems,
    "python": sys.version.split()[0],
  }
  harness.make_streams()
  sys.argv = [""]
  for name in [n for n in sys.modules if n.split(".")[0] == "agentic_rl"]:
    del sys.modules[name]  # snippets see the modules of a plain interpreter
  Zygote(control, directory, plan, proc).serve(facts)


def _can_listen() -> bool:
  """Whether a filter with a fork listener can be installed: not where a container's own listener is in the way."""

  def try_it() -> None:
    lowlevel.forbid_new_privileges()
    os.close(seccomp.Filter(fork_listener=True).install(0))

  return not isolation.attempt(try_it)


def _installed() -> list[str]:
  return [name for name in ("numpy", "sympy", "scipy") if importlib.util.find_spec(name) is not None]
