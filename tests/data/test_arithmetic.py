from __future__ import annotations

import asyncio
import collections
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from agentic_rl.data import arithmetic
from agentic_rl.data.arithmetic import (
  CLOSE,
  EASY,
  HARD,
  OPEN,
  OUTPUT,
  CorpusMix,
  Document,
  document,
  problems,
  question,
)
from agentic_rl.episode import Finish, FinishKind
from agentic_rl.sandbox import Interpreter, InterpreterConfig
from agentic_rl.tools import FencedDialect, InterpreterTool

TEMPLATE = "{problem}\n"


def documents(count: int, mix: CorpusMix, seed: int = 0) -> list[Document]:
  rng = np.random.default_rng(seed)
  return [document(rng, mix, template=TEMPLATE) for _ in range(count)]


def calls(runs: Document) -> list[tuple[str, str]]:
  """Code and stated output of each call."""
  found = []
  for (text, learned), (after, read) in itertools.pairwise(runs):
    if text.startswith(OPEN):
      assert learned and not read, "code is learned, its output is only read"
      assert text.endswith(CLOSE) and after.startswith(OUTPUT) and after.endswith(CLOSE)
      found.append((text.removeprefix(OPEN).removesuffix(CLOSE), after.removeprefix(OUTPUT).removesuffix(CLOSE)))
  return found


def boxed(runs: Document) -> str:
  match = re.fullmatch(r"\\boxed\{(.*)\}", runs[-1][0])
  assert match and runs[-1][1]
  return match.group(1)


def solve(text: str) -> int:
  """The answer to a question's text, read afresh."""
  if text.startswith("sum(i*i) "):
    low, high = map(int, text.removeprefix("sum(i*i) ").split(".."))
    return sum(i**2 for i in range(low, high))
  if text.startswith("digits "):
    a, b = map(int, text.removeprefix("digits ").split("*"))
    return sum(int(c) for c in str(a * b))
  assert re.fullmatch(r"[0-9+*-]+", text)
  return int(eval(text))


RUNNER = """
import contextlib, io, json, sys
for code in json.load(sys.stdin):
  out = io.StringIO()
  try:
    with contextlib.redirect_stdout(out):
      exec(code, {"__name__": "__main__"})
    print(json.dumps(out.getvalue()))
  except Exception as error:
    print(json.dumps(out.getvalue() + f"{type(error).__name__}: {error}"))
"""


def python_prints(codes: list[str]) -> list[str]:
  """What a Python of its own prints for each snippet, or the last line of its traceback."""
  done = subprocess.run([sys.executable, "-I", "-c", RUNNER], input=json.dumps(codes), capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return [json.loads(line).rstrip("\n") for line in done.stdout.splitlines()]


# ---- questions and problems ----


@pytest.mark.parametrize("family", EASY + HARD)
def test_answers_are_right_and_snippets_find_them(family: str):
  rng = np.random.default_rng(0)
  drawn = [question(family, rng, held_out=bool(i % 2)) for i in range(40)]
  firsts = python_prints([q.snippets[0]("") for q in drawn])
  if family == "digits":
    firsts = python_prints([q.snippets[1](output) for q, output in zip(drawn, firsts, strict=True)])
  for q, output in zip(drawn, firsts, strict=True):
    assert q.family == family and len(q.snippets) == (2 if family == "digits" else 1)
    assert q.answer == solve(q.text) == int(output)


def operands(prompt: str) -> set[int]:
  return {int(n) for n in re.findall(r"\d+", prompt.replace("sum(i*i)", ""))}


def test_held_out_hard_problems_share_no_operand_with_training():
  weights = dict.fromkeys(HARD, 1.0)
  train, held = (problems(n, 1, families=weights, held_out=h) for n, h in ((3000, False), (200, True)))
  used = [set().union(*(operands(p.prompt) for p in part)) for part in (train, held)]
  assert len(used[0]) > 600 and len(used[1]) > 80
  assert not used[0] & used[1]
  asked = [operands(runs[0][0]) for runs in documents(2000, CorpusMix(copy=1.0, notebook=0, code=0, easy=0.0))]
  assert len(set().union(*asked)) > 500
  assert not set().union(*asked) & used[1]
  assert {n % 10 for n in used[0]} == {n % 10 for n in used[1]} == set(range(10)), "no last digit gives a side away"


def test_problems_are_distinct_and_verifiable():
  found = problems(360, 4, families=dict.fromkeys(EASY + HARD, 1.0), held_out=False)
  assert len({p.uid for p in found}) == len({p.prompt for p in found}) == 360
  families = collections.Counter(p.source for p in found)
  assert families == dict.fromkeys((f"arithmetic/{f}" for f in EASY + HARD), 60)
  for p in found:
    assert p.answer == str(solve(str(p.prompt))) and p.verifier == "boxed" and p.domain == "math"
    assert p.metadata["difficulty"] == ("easy" if p.source.split("/")[1] in EASY else "hard")
    assert p.uid == f"{p.source}/{p.prompt}"


def test_problems_are_seeded():
  weights = {"product": 0.5, "sum": 0.5}
  first = problems(50, 1, families=weights, held_out=False)
  assert first == problems(50, 1, families=weights, held_out=False)
  assert first != problems(50, 2, families=weights, held_out=False)


def test_easy_problems_are_334_and_no_more():
  assert len(problems(64, 0, families={"table": 1.0}, held_out=False)) == 64
  assert len(problems(270, 0, families={"sum": 1.0}, held_out=True)) == 270
  with pytest.raises(ValueError, match="fewer"):
    problems(65, 0, families={"table": 1.0}, held_out=False)


def test_an_unknown_family_is_refused():
  with pytest.raises(ValueError, match=r"'root'; known: sum, table, product"):
    question("root", np.random.default_rng(0), held_out=False)


# ---- the corpus ----


def test_stated_outputs_are_what_python_prints():
  """All code of the corpus, the wrong and the broken included."""
  found = [c for flaw in (0.0, 1.0) for runs in documents(250, code_with(flaw)) for c in calls(runs)]
  codes, stated = [code for code, _ in found], [output for _, output in found]
  assert len(found) > 500
  assert stated == python_prints(codes)
  kinds = collections.Counter("error" if "Error" in s else "nothing" if not s else "number" for s in stated)
  assert min(kinds[k] for k in ("error", "nothing", "number")) > 20, "each kind of output was seen"


def code_with(flaw: float) -> CorpusMix:
  return CorpusMix(code=1.0, notebook=0.0, copy=0.0, easy=0.3, flaw=flaw)


def test_calls_read_as_the_episode_loop_would_make_them():
  """The dialect finds the same code in the document, and interpreter and frame give the same text back."""
  dialect = FencedDialect(
    prompt_template=TEMPLATE,
    open_fence=OPEN,
    observation_template="```output\n{output}\n```\n",
    stop=(),
    call_budget=4,
    budget_end="free",
    max_observation_tokens=40,
    truncation="head",
  )
  sample = documents(12, code_with(0.0)) + documents(24, code_with(1.0), seed=1)
  words = arithmetic.tokenizer()

  async def check() -> int:
    interpreter = await Interpreter.start(InterpreterConfig(slots=4))
    tool, count = InterpreterTool(interpreter), 0
    try:
      for runs in sample:
        for (text, _), (output, _) in itertools.pairwise(runs):
          if text.startswith(OPEN):
            action = dialect.read(dialect.start(), OPEN, Finish(FinishKind.STOP, OPEN))
            inside = text.removeprefix(OPEN)
            assert inside.count(dialect.close_fence) == 1
            action = dialect.read(action.state, inside, Finish(FinishKind.STOP, dialect.close_fence))
            outcome = await tool.run(action.calls[0].code, session="")
            assert dialect.render_results(action.state, [outcome], words).text == output
            count += 1
    finally:
      await interpreter.close()
    return count

  assert asyncio.run(check()) >= 36


def test_unflawed_documents_are_right():
  for runs in documents(200, code_with(0.0)) + documents(100, CorpusMix(code=0, notebook=0, copy=0)):
    question_text, learned = runs[0]
    assert not learned and question_text.endswith("\n")
    assert boxed(runs) == str(solve(question_text.strip()))
  for runs in documents(100, CorpusMix(code=0, notebook=1.0, copy=0)):
    assert runs[0][0].startswith(OPEN)
    assert boxed(runs) == calls(runs)[-1][1]
  for (asked, read), (copied, learned) in documents(50, CorpusMix(code=0, notebook=0, copy=1.0)):
    assert asked == f"{copied}\n" and learned and not read


def test_flawed_code_is_mostly_wrong():
  runs = documents(400, code_with(1.0))
  right = [boxed(r) == str(solve(r[0][0].strip())) for r in runs]
  assert 0.05 < np.mean(right) < 0.25, "an eighth recovers from an unknown name; a guess or a slip may hit"
  assert all(calls(r) for r in runs)


def test_miscopying_changes_one_digit_and_stays_python():
  rng = np.random.default_rng(0)
  for family in HARD:
    for _ in range(50):
      code = question(family, rng, held_out=False).snippets[0]("12")
      wrong = arithmetic._miscopy(code, rng)
      assert len(wrong) == len(code) and sum(a != b for a, b in zip(code, wrong, strict=True)) == 1
      compile(wrong, "miscopied", "exec")


def test_shares_of_the_corpus():
  mix, count = CorpusMix(), 3000
  kinds: collections.Counter[str] = collections.Counter()
  for runs in documents(count, mix):
    if runs[0][0].startswith(OPEN):
      kinds["notebook"] += 1
    elif calls(runs):
      kinds["code"] += 1
    elif runs[-1][0].startswith("\\boxed"):
      kinds["answer"] += 1
    else:
      kinds["copy"] += 1
  for kind in ("notebook", "code", "copy"):
    assert kinds[kind] / count == pytest.approx(getattr(mix, kind), abs=0.025)


def test_documents_need_no_unknown_piece():
  words = arithmetic.tokenizer()
  (unknown,) = words.encode("?")
  seen = set()
  for runs in documents(1500, CorpusMix()) + documents(300, code_with(1.0)):
    for text, _ in runs:
      ids = words.encode(text)
      assert words.decode(ids) == text
      seen |= set(ids)
  assert unknown not in seen
  assert words.encode("é") == [unknown]
  # Digits, every word of the dialect and of Python that the study is about.
  assert set(words.encode("0123456789") + [words.encode(w)[0] for w in arithmetic._WORDS]) <= seen


def test_the_template_is_filled_as_the_dialect_fills_it():
  rng = np.random.default_rng(0)
  runs = document(rng, CorpusMix(code=0, notebook=0, copy=0), template="{x} {problem} \\boxed{}\n")
  assert re.fullmatch(r"\{x\} [^{}]+ \\boxed\{\}\n", runs[0][0])
