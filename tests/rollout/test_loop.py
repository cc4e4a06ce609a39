from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest
from scripted_engine import EOS, TOKENIZER, ScriptedEngine, ScriptedTool, call, encode, ids, logprob, problem

from agentic_rl.episode import EndStatus, Episode, FinishKind
from agentic_rl.errors import UserError
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.loop import request_seed, run_episode
from agentic_rl.tools import Call, End, FencedDialect, Rendered, RunCalls, ToolOutcome

DIALECT = FencedDialect(call_budget=3, observation_template="```output\n{output}\n```\n")
SAMPLING = Sampling(max_new_tokens=10_000, seed=5)
OBSERVATION = encode("```output\n4\n```\n")


def play(engine, tool=None, dialect=DIALECT, max_tokens=500, sampling=SAMPLING, a_problem=None) -> Episode:
  a_problem = a_problem or problem()
  return asyncio.run(
    run_episode(engine, TOKENIZER, dialect, tool, a_problem, 0, sampling=sampling, max_tokens=max_tokens)
  )


def one(stream, **options) -> tuple[Episode, ScriptedEngine]:
  engine = ScriptedEngine({"p/0": stream})
  return play(engine, **options), engine


def check_token_for_token(episode: Episode, engine: ScriptedEngine) -> None:
  """Mask, ids, log-probabilities and versions are what the engine saw and returned, position by position."""
  want: dict[int, tuple[int, float]] = {}
  for request in engine.requests:
    assert request.token_ids == episode.token_ids[: len(request.token_ids)]
    for i, token in enumerate(request.completion.token_ids):
      want[len(request.token_ids) + i] = token, request.completion.logprobs[i]
  got = zip(episode.token_ids, episode.loss_mask, episode.logprobs, episode.versions, strict=True)
  for position, (token, mask, logp, version) in enumerate(got):
    assert mask == (position in want)
    assert (token, logp) == want.get(position, (token, 0.0))
    assert version == (3 if mask else -1)


def test_direct_answer():
  episode, engine = one(encode("\\boxed{4}") + EOS)
  assert episode.status is EndStatus.ANSWERED
  assert [s.origin for s in episode.segments] == ["prompt", "policy"]
  assert episode.last_turn_text == "\\boxed{4}<eos>"
  assert episode.token_ids == tuple(encode("2+2=") + encode("\\boxed{4}") + EOS)  # the sampled end is kept, mask 1
  assert engine.ended == ["p/0"]
  check_token_for_token(episode, engine)


def test_ids_stay_as_sampled_over_three_turns():
  # "he" "llo" would come back from text as "hello", and "`" "``" as "```".
  turns = [ids("he", "llo") + call("print(2+2)"), ids("he", "llo", " ") + call("1"), ids("he", "llo") + EOS]
  tool = ScriptedTool()
  episode, engine = one([*turns[0], *turns[1], *turns[2]], tool=tool)
  assert TOKENIZER.encode(TOKENIZER.decode(ids("he", "llo"))) != ids("he", "llo")
  want = encode("2+2=") + turns[0] + OBSERVATION + turns[1] + OBSERVATION + turns[2]
  assert episode.token_ids == tuple(want)
  assert tool.codes == ["\nprint(2+2)\n", "\n1\n"]
  # Each turn of a call is two requests: to the open fence, and to the closing one.
  assert [r.sampling.stop for r in engine.requests] == [
    ("```python", "</answer>"),
    ("```",),
    ("```python", "</answer>"),
    ("```",),
    ("```python", "</answer>"),
  ]
  check_token_for_token(episode, engine)
  assert episode.logprobs[4] == logprob(ids("he")[0], 4)


def test_tool_segments_are_masked_and_counted_apart():
  episode, _ = one(call("1") + encode("ok") + EOS, tool=ScriptedTool())
  assert (episode.length("policy"), episode.length("tool")) == (len(call("1")) + 3, len(OBSERVATION))
  assert episode.text("tool") == "```output\n4\n```\n"
  (made,) = episode.calls
  assert (made.code, made.observation, made.status) == ("\n1\n", "4", "ok")


@pytest.mark.parametrize("seed", range(30))
def test_mask_is_exactly_what_the_engine_returned(seed):
  """Random turn structures: text, calls, nested fences, ends, over random budgets."""
  rng = random.Random(seed)
  text = [
    *ids("he", "llo", "hello", " ", "x", "\n", "1", "`", "```", "\n```\n", "```output\n", "\\boxed{"),
    *encode("}"),
  ]
  stream = []
  for _ in range(rng.randrange(1, 6)):
    stream += rng.choices(text, k=rng.randrange(0, 6))
    stream += rng.choice([ids("```python"), ids("```python\n"), ids("</answer>"), [], EOS])
    stream += rng.choices(text, k=rng.randrange(0, 6)) + rng.choice([ids("```"), ids("\n```\n"), []])
  stream += EOS * 20
  dialect = FencedDialect(
    call_budget=rng.randrange(4),
    budget_end=rng.choice(["notice", "stop", "free"]),
    max_observation_tokens=rng.choice([None, 3]),
    truncation=rng.choice(["replace", "head", "middle", "tail"]),
  )
  tool = ScriptedTool(*[ToolOutcome("hello" * rng.randrange(4), rng.choice(["ok", "error"])) for _ in range(9)])
  max_tokens = rng.choice([8, 20, 60, 1000])
  episode, engine = one(stream, tool=tool, dialect=dialect, max_tokens=max_tokens)
  check_token_for_token(episode, engine)
  assert len(episode.token_ids) <= max_tokens
  assert episode.status in (EndStatus.ANSWERED, EndStatus.LENGTH, EndStatus.CALL_BUDGET)
  assert len(tool.codes) <= dialect.call_budget


def test_call_cut_off_by_length_never_runs():
  tool = ScriptedTool()
  prompt, whole = len(encode("2+2=")), len(call("print(1)"))
  for max_tokens in range(prompt + 1, prompt + whole):
    episode, _ = one(call("print(1)") + EOS, tool=tool, max_tokens=max_tokens)
    assert episode.status is EndStatus.LENGTH
    assert len(episode.token_ids) == max_tokens
  assert tool.codes == []


def test_bound_on_one_completion_ends_the_episode_too():
  tool = ScriptedTool()
  episode, _ = one(call("print(1)") + EOS, tool=tool, sampling=Sampling(max_new_tokens=3))
  assert (episode.status, tool.codes, episode.length("policy")) == (EndStatus.LENGTH, [], 1 + 3)


@pytest.mark.parametrize(("spare", "fits"), [(-1, False), (0, True), (1, True)])
def test_result_is_appended_iff_it_fits(spare, fits):
  exact = len(encode("2+2=") + call("1") + OBSERVATION)
  episode, engine = one(call("1") + encode("x" * 50), tool=ScriptedTool(), max_tokens=exact + spare)
  assert episode.status is EndStatus.LENGTH
  assert episode.length("tool") == (len(OBSERVATION) if fits else 0)
  assert len(episode.calls) == 1  # it ran, and is recorded in any case
  assert len(engine.requests) == 2 + (spare > 0)  # nothing is asked of the engine without room for a token
  assert len(episode.token_ids) == (exact + spare if fits else exact - len(OBSERVATION))
  check_token_for_token(episode, engine)


def test_prompt_that_fills_the_budget_is_refused():
  engine = ScriptedEngine({"p/0": EOS})
  with pytest.raises(UserError, match=r"'p' has 4 tokens and max_tokens is 4"):
    play(engine, max_tokens=4)
  assert engine.requests == []
  assert play(engine, max_tokens=5).status is EndStatus.ANSWERED


def test_spent_budget_stop():
  dialect = FencedDialect(call_budget=1, budget_end="stop")
  tool = ScriptedTool()
  episode, _ = one(call("1") + call("2") + encode("never"), tool=tool, dialect=dialect)
  assert episode.status is EndStatus.CALL_BUDGET
  assert tool.codes == ["\n1\n"]
  assert [(c.code, c.status) for c in episode.calls] == [("\n1\n", "ok"), ("\n2\n", "over_budget")]
  assert episode.text().endswith("2\n```\n")  # the call over the budget is the policy's, and stays


def test_spent_budget_notice():
  dialect = FencedDialect(call_budget=1, budget_end="notice", notice="NO MORE")
  episode, engine = one(call("1") + call("2") + encode("ok") + EOS, tool=ScriptedTool(), dialect=dialect)
  assert episode.status is EndStatus.ANSWERED
  assert episode.segments[3].origin == "tool"
  assert episode.segments[3].text.endswith("NO MORE")
  assert len(episode.calls) == 1
  assert episode.last_turn_text == "```python\n2\n```\nok<eos>"  # written, not run
  check_token_for_token(episode, engine)


def test_spent_budget_free():
  dialect = FencedDialect(call_budget=1, budget_end="free")
  episode, engine = one(call("1") + call("2") + EOS, tool=ScriptedTool(), dialect=dialect)
  assert (episode.status, len(episode.calls)) == (EndStatus.ANSWERED, 1)
  assert engine.requests[-1].sampling.stop == ("</answer>",)
  assert episode.text("tool") == "\n```output\n4\n```\n"


def test_no_budget_no_tool():
  dialect = FencedDialect(call_budget=0, budget_end="free")
  episode, engine = one(call("1") + encode("\\boxed{4}") + EOS, dialect=dialect)
  assert (episode.status, episode.calls, len(engine.requests)) == (EndStatus.ANSWERED, (), 1)


def test_a_call_without_a_tool_is_a_fault_of_the_settings():
  with pytest.raises(UserError, match="has none"):
    one(call("1"))


@pytest.mark.parametrize("end", [EOS, ids("</answer>"), encode("X")])
def test_truncation_is_what_the_engine_says(end):
  """Three ways to end by itself, one of them an extra stop id; the last id alone would not tell."""
  sampling = Sampling(max_new_tokens=100, stop_token_ids=tuple(encode("X")))
  episode, _ = one(encode("ok") + end, sampling=sampling)
  assert episode.status is EndStatus.ANSWERED
  # The very same ids, ended by the budget where no stop was seen.
  episode, _ = one(encode("ok") + encode("y"), max_tokens=len(encode("2+2=ok")))
  assert episode.status is EndStatus.LENGTH


def test_stops_of_the_caller_are_refused():
  with pytest.raises(ValueError, match="belong to the dialect"):
    one(EOS, sampling=Sampling(max_new_tokens=9, stop=("x",)))


def test_infrastructure_error_aborts():
  tool = ScriptedTool(ToolOutcome("worker lost", "infra_error"))
  episode, engine = one(call("1") + encode("never"), tool=tool)
  assert (episode.status, episode.reward) == (EndStatus.ABORTED, None)
  assert [c.status for c in episode.calls] == ["infra_error"]
  assert episode.length("tool") == 0
  assert engine.ended == ["p/0"]


def test_engine_abort_keeps_what_there_is():
  episode, engine = one(ids("he", "llo"))  # the script ends there
  assert engine.requests[0].completion.finish.kind is FinishKind.ABORT
  assert (episode.status, episode.text("policy")) == (EndStatus.ABORTED, "hello")


def test_session_is_ended_when_the_engine_fails():
  engine = ScriptedEngine({"p/0": [*encode("x"), ConnectionError("gone")]})
  with pytest.raises(ConnectionError):
    play(engine)
  assert engine.ended == ["p/0"]


def test_every_request_has_its_own_seed():
  stream = call("1") + call("1") + EOS
  engine = ScriptedEngine(lambda session: stream)

  async def both():
    for sample in (0, 1):
      await run_episode(
        engine, TOKENIZER, DIALECT, ScriptedTool(), problem(), sample, sampling=SAMPLING, max_tokens=500
      )

  asyncio.run(both())
  seeds = [r.sampling.seed for r in engine.requests]
  assert len(set(seeds)) == len(seeds) == 10
  assert seeds[0] == request_seed(5, "p", 0, 0)
  assert seeds[6] == request_seed(5, "p", 1, 1)


def test_seeds_do_not_depend_on_the_process():
  program = "from agentic_rl.rollout.loop import request_seed; print(request_seed(1, 'a/b', 2, 3))"
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert int(done.stdout) == request_seed(1, "a/b", 2, 3) < 2**63
  # A separator inside a uid makes no two requests alike.
  assert request_seed(1, "a", 11, 1) != request_seed(1, "a", 1, 11)


def test_sampling_passes_through():
  engine = ScriptedEngine({"p/0": EOS})
  play(engine, sampling=Sampling(max_new_tokens=1000, temperature=0.7, top_p=0.9, top_k=5), max_tokens=50)
  sent = engine.requests[0].sampling
  assert (sent.temperature, sent.top_p, sent.top_k, sent.max_new_tokens) == (0.7, 0.9, 5, 46)
  assert sent.stop_token_ids == (TOKENIZER.eos_id,)


class BatchDialect(FencedDialect):
  """A dialect with several calls a turn, one of them malformed, as a chat dialect has them."""

  def read(self, state, text, finish):
    if finish.matched != "</answer>":
      return End(EndStatus.ANSWERED)
    return RunCalls((Call("first"), Call("", malformed="no JSON"), Call("second")), state)

  def render_results(self, state, outcomes, tokenizer):
    texts = tuple(o.text for o in outcomes)
    return Rendered("|".join(texts), texts, state)


def test_several_calls_run_side_by_side_and_keep_their_order():
  class Tool:
    def __init__(self):
      self.started = []

    async def end(self, session):
      pass

    async def run(self, code, *, session):
      self.started.append(code)
      await asyncio.sleep(0.05 if code == "first" else 0)
      assert self.started == ["first", "second"]
      return ToolOutcome(code)

  episode, _ = one(ids("</answer>") + EOS, tool=Tool(), dialect=BatchDialect())
  assert episode.text("tool") == "first|no JSON|second"
  assert [c.status for c in episode.calls] == ["ok", "malformed", "ok"]
