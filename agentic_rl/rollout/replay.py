"""An engine and a tool that repeat recorded episodes: for debugging, tests, and the cost of the loop itself."""

from __future__ import annotations

from collections.abc import Sequence

from agentic_rl.episode import Completion, EndStatus, Episode, Finish, FinishKind, Publication, Segment
from agentic_rl.rollout.engine import Sampling
from agentic_rl.tools import OVER_BUDGET, ToolOutcome


class ReplayMismatch(ValueError):
  """A request that is not the recorded one: another tokenizer, dialect, prompt or tool result than at the recording."""


class ReplayEngine:
  """Returns the recorded completions of episodes, turn by turn, for requests of session `uid/sample`.

  It keeps no position: the request's ids tell the turn, so an episode can be replayed any number of times. Sampled ids,
  log-probabilities and versions are the recorded ones, whatever the temperature and seed asked for. Finish reasons,
  which episodes do not hold, follow from the stops asked for.
  """

  def __init__(self, episodes: Sequence[Episode]):
    self._episodes = {f"{episode.uid}/{episode.sample}": episode for episode in episodes}
    if len(self._episodes) != len(episodes):
      raise ValueError("two episodes to replay have the same uid and sample")
    self._turns = {session: _turns(episode) for session, episode in self._episodes.items()}

  async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
    """The recorded completion. Raises `ReplayMismatch` where the ids or the stops are not those of the recording."""
    if session not in self._episodes:
      raise ReplayMismatch(f"no episode {session} was recorded")
    episode = self._episodes[session]
    ids = episode.token_ids
    shorter = min(len(token_ids), len(ids))
    same = next((i for i in range(shorter) if token_ids[i] != ids[i]), shorter)
    if same < len(token_ids):
      asked, recorded = token_ids[same], ids[same] if same < len(ids) else "the end"
      raise ReplayMismatch(f"episode {session}: token {same} is {asked}, recorded was {recorded}")
    segment = self._turns[session].get(len(token_ids))
    if segment is None:
      if episode.status is EndStatus.ABORTED and len(token_ids) == len(ids):
        return Completion((), (), Finish(FinishKind.ABORT, "the recorded episode was aborted here"), ())
      raise ReplayMismatch(f"episode {session}: no completion was recorded after {len(token_ids)} tokens")
    if len(segment.token_ids) > sampling.max_new_tokens:
      raise ReplayMismatch(
        f"episode {session}: {sampling.max_new_tokens} tokens were asked for, recorded were {len(segment.token_ids)}"
      )
    last = len(token_ids) + len(segment.token_ids) == len(ids)
    finish = _finish(episode, segment, sampling, last)
    return Completion(segment.token_ids, segment.logprobs, finish, segment.versions)

  async def load(self, publication: Publication) -> None:
    """Does nothing: a recording keeps its versions."""

  async def end_session(self, session: str) -> None:
    """Does nothing: nothing is cached."""

  async def close(self) -> None:
    """Does nothing: nothing is held."""


class ReplayTool:
  """Returns the recorded results of calls, in the order of each episode. Raises `ReplayMismatch` for another call."""

  def __init__(self, episodes: Sequence[Episode]):
    self._calls = {f"{e.uid}/{e.sample}": [c for c in e.calls if c.status != OVER_BUDGET] for e in episodes}
    self._next = dict.fromkeys(self._calls, 0)

  async def end(self, session: str) -> None:
    """Nothing is kept."""

  async def run(self, code: str, *, session: str) -> ToolOutcome:
    calls, at = self._calls.get(session, []), self._next.get(session, 0)
    if at >= len(calls) or calls[at].code != code:
      raise ReplayMismatch(f"episode {session}: call {at} was not recorded with the code {code!r}")
    self._next[session] = (at + 1) % len(calls)
    call = calls[at]
    return ToolOutcome(call.observation, call.status, call.wall_s, call.cpu_s)


def _turns(episode: Episode) -> dict[int, Segment]:
  """Policy segments by the number of tokens before them."""
  turns, before = {}, 0
  for segment in episode.segments:
    if segment.origin == "policy":
      turns[before] = segment
    before += len(segment.token_ids)
  return turns


def _finish(episode: Episode, segment: Segment, sampling: Sampling, last: bool) -> Finish:
  """The finish reason that explains a recorded completion."""
  if segment.token_ids[-1] in sampling.stop_token_ids:
    return Finish(FinishKind.STOP, segment.token_ids[-1])
  ends = {text: segment.text.find(text) + len(text) for text in sampling.stop if text in segment.text}
  if ends:
    return Finish(FinishKind.STOP, min(ends, key=lambda text: ends[text]))
  if last and episode.status is EndStatus.LENGTH:
    return Finish(FinishKind.LENGTH)
  if last and episode.status is EndStatus.ABORTED:
    return Finish(FinishKind.ABORT, "the recorded episode was aborted here")
  raise ReplayMismatch(
    f"episode {episode.uid}/{episode.sample}: the completion {segment.text[-40:]!r} ends at none of the stops asked for"
  )
