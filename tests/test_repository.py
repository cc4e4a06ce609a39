"""Rules that hold for the whole repository (CONTRIBUTING.md)."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import tomllib
import types
from collections.abc import Iterator

import ml_collections
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST_FILE = 600
LONGEST_LAUNCH_SCRIPT = 79
PLACES = ("agentic_rl", "benchmarks", "configs", "docs", "launch", "notebooks", "tests", ".ci")
KINDS = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".json", ".ipynb", ".slurm", ""}
NOTES_TO_SELF = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")


def texts() -> Iterator[pathlib.Path]:
  """Every text file that belongs to the project; virtual environments and runs do not."""
  yield from (p for p in sorted(ROOT.iterdir()) if p.is_file() and (p.suffix in KINDS or p.name == ".gitignore"))
  for place in PLACES:
    for path in sorted((ROOT / place).rglob("*")):
      if path.is_file() and path.suffix in KINDS and "__pycache__" not in path.parts:
        yield path


def relative(paths: list[pathlib.Path]) -> list[str]:
  return [str(p.relative_to(ROOT)) for p in paths]


TEXTS = list(texts())
MARKDOWN = [p for p in TEXTS if p.suffix == ".md"]
LAUNCH = sorted((ROOT / "launch").glob("*.py"))
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py") if p.name != "__init__.py")


def load(path: pathlib.Path) -> types.ModuleType:
  """Imports a file by its path, as `--config=` does."""
  spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_no_file_is_long():
  files = [p for p in TEXTS if p.name != "LICENSE" and p.suffix not in (".ipynb", ".json")]
  long = [p for p in files if len(p.read_text().splitlines()) > LONGEST_FILE]
  assert not long, f"split these by what they do: {relative(long)}"


def test_no_notes_to_self():
  found = [p for p in TEXTS if NOTES_TO_SELF.search(p.read_text())]
  assert not found, f"do it now or say in the documentation that it is not there: {relative(found)}"


def test_no_file_of_leftovers():
  names = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
  assert not [p for p in TEXTS if p.name in names], "name a module after what it does"


def test_launch_scripts_are_short():
  assert LAUNCH
  long = [p for p in LAUNCH if len(p.read_text().splitlines()) > LONGEST_LAUNCH_SCRIPT]
  assert not long, f"the work belongs into the package: {relative(long)}"


@pytest.mark.parametrize("path", CONFIGS, ids=relative(CONFIGS))
def test_every_config_is_locked_and_says_how_to_run_it(path: pathlib.Path):
  module = load(path)
  command = re.search(r"\blaunch/|^ *make \w", module.__doc__ or "", flags=re.MULTILINE)
  assert command, "the docstring gives the command, the hardware and the result to expect"
  if path.parent.name == "sweeps":
    assert (ROOT / module.get_sweep().config).is_file()
    return
  config = module.get_config()
  assert isinstance(config, ml_collections.ConfigDict)
  assert config.is_locked, "an unknown key must be refused: call config.lock()"
  with pytest.raises(AttributeError):
    config.no_such_key = 1


def anchors(path: pathlib.Path) -> set[str]:
  """Names that GitHub gives to the headings of a page."""
  text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
  headings = re.findall(r"^#{1,6} +(.+?)\s*$", text, flags=re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(path: pathlib.Path) -> list[str]:
  """Links and pictures of a page that lead to no file, or to no heading, of the checkout."""
  text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
  dead = []
  for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
    if re.match(r"[a-z]+:", link):
      continue
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
      dead.append(link)
  return dead


@pytest.mark.parametrize("path", MARKDOWN, ids=relative(MARKDOWN))
def test_links_lead_somewhere(path: pathlib.Path):
  assert not dead_links(path)


def test_the_link_check_finds_dead_links(tmp_path: pathlib.Path):
  (tmp_path / "other.md").write_text("# One heading, `two` words\n")
  page = tmp_path / "page.md"
  page.write_text(
    "[a](other.md) [b](gone.md) [c](other.md#one-heading-two-words) [d](other.md#gone) [e](https://example.org)\n"
    "```\n[f](not/a/link)\n```\n![g](gone.png)\n"
  )
  assert dead_links(page) == ["gone.md", "other.md#gone", "gone.png"]


def test_paths_named_in_the_documentation_exist():
  """`agentic_rl/...`, `launch/...` and their like in back quotes are files, modules or folders of the checkout."""
  missing = []
  for page in MARKDOWN:
    for name in re.findall(
      r"`((?:agentic_rl|benchmarks|configs|docs|launch|notebooks|tests)/[\w./-]*)`", page.read_text()
    ):
      if not (ROOT / name).exists():
        missing.append(f"{page.relative_to(ROOT)}: {name}")
  assert not missing


def test_extras_are_complete():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = set(project["optional-dependencies"])
  assert {"cuda", "tpu", "plan-tpu", "plan-gpu", "sglang", "notebooks", "smollm2", "parity", "dev"} <= extras
  assert project["license"] == "Apache-2.0"
  assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_continuous_integration_runs_lint_and_tests():
  script = ROOT / ".ci" / "run"
  assert script.stat().st_mode & 0o111, ".ci/run must be executable"
  assert re.search(r"^make lint$.*^make test$", script.read_text(), flags=re.MULTILINE | re.DOTALL)
