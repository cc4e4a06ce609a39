"""Requests that wait, handed out in turn to their owners. Standard library only."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from agentic_rl.sandbox.parent import Request


class FairQueue:
  """Waiting requests, handed out in turn to each owner, so that none with many waits holds up the others."""

  def __init__(self) -> None:
    self._by_owner: collections.OrderedDict[str, collections.deque[Request]] = collections.OrderedDict()
    self._count = 0

  def __len__(self) -> int:
    return self._count

  def push(self, request: Request, front: bool = False) -> None:
    """Adds a request, last or first in its owner's line; the first is also the owner's turn."""
    line = self._by_owner.setdefault(request.owner, collections.deque())
    if front:
      line.appendleft(request)
      self._by_owner.move_to_end(request.owner, last=False)
    else:
      line.append(request)
    self._count += 1

  def pop(self) -> Request:
    """Takes the next request."""
    owner, line = next(iter(self._by_owner.items()))
    request = line.popleft()
    if line:
      self._by_owner.move_to_end(owner)
    else:
      del self._by_owner[owner]
    self._count -= 1
    return request

  def remove(self, request: Request) -> bool:
    """Takes a request out; False if it is not here."""
    line = self._by_owner.get(request.owner, collections.deque())
    if request not in line:
      return False
    line.remove(request)
    if not line:
      del self._by_owner[request.owner]
    self._count -= 1
    return True

  def __iter__(self) -> Iterator[Request]:
    return (request for line in self._by_owner.values() for request in line)
