"""The loop, the dialect and the verifier together with the real interpreter."""

from __future__ import annotations

import asyncio
import time

from scripted_engine import EOS, TOKENIZER, ScriptedEngine, call, encode, problem

from agentic_rl.episode import EndStatus
from agentic_rl.rollout.collector import collect, rollout_metrics
from agentic_rl.rollout.engine import Sampling
from agentic_rl.tools import FencedDialect, InterpreterTool

ANSWER = encode("\\boxed{4}") + EOS
STREAMS = [
  call("2+2") + ANSWER,
  call("print(2+2)") + ANSWER,
  call("x=1/0") + ANSWER,
  call("while 1:print") + ANSWER,  # runs into its time limit
  call("2+2") + call("3+3") + EOS,  # the answer is the interpreter's alone
  call("print(r'\\boxed{4}')") + EOS,
]


def test_episodes_run_code():
  from agentic_rl.sandbox import Interpreter, InterpreterConfig, Limits

  engine = ScriptedEngine(lambda session: STREAMS[int(session.split("/")[1]) % len(STREAMS)])
  dialect = FencedDialect(budget_end="stop")

  async def main():
    async with await Interpreter.start(InterpreterConfig(slots=2)) as interpreter:
      tool = InterpreterTool(interpreter, Limits(wall_s=1.0))
      sampling = Sampling(max_new_tokens=200)
      start = time.monotonic()
      episodes = await collect(
        engine, TOKENIZER, dialect, tool, [problem()], 2 * len(STREAMS), sampling=sampling, max_tokens=300
      )
      return episodes, time.monotonic() - start

  episodes, seconds = asyncio.run(main())
  assert seconds < 10
  assert all(e.status is EndStatus.ANSWERED for e in episodes)
  for first, second in zip(episodes[:6], episodes[6:], strict=True):
    assert first.token_ids == second.token_ids
  observed = [[c.observation for c in e.calls] for e in episodes[:6]]
  assert observed == [
    ["4"],
    ["4"],
    ["ZeroDivisionError: division by zero"],
    ["TimeoutError: the code ran longer than its time limit"],
    ["4", "6"],
    ["\\boxed{4}"],
  ]
  assert [e.reward for e in episodes[:6]] == [1, 1, 1, 1, 0, 0]
  metrics = rollout_metrics(episodes)
  assert metrics["rollout/code_proportion"] == 1
  assert metrics["tool/error_frac"] == 2 / 7
  assert metrics["tool/timeout_frac"] == 1 / 7
  assert metrics["tool/infra_error_count"] == 0
