"""A publication is complete or not there, whatever happens to its writer, and damage is noticed."""

from __future__ import annotations

import gc
import json
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from agentic_rl.episode import Publication
from agentic_rl.errors import UserError
from agentic_rl.parallel import MeshShape, make_mesh, shardings
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.train import publication as module
from agentic_rl.train.publication import (
  Publisher,
  check_fits,
  is_disk_full,
  latest,
  open_publication,
  read_params,
  tree_fingerprint,
)

CONFIG = PolicyConfig(vocab_size=32, width=16, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=32)
POLICY = Policy(CONFIG)


@pytest.fixture(scope="module")
def params() -> Any:
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: jax.device_put(rng.random(x.shape, np.float32)), POLICY.abstract_params())


def moved(params: Any, by: float) -> Any:
  return jax.tree.map(lambda x: jax.device_put(np.asarray(x) + np.float32(by)), params)


def equal(a: Any, b: Any) -> bool:
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in leaves)


def complete(directory: pathlib.Path) -> Publication:
  """What LATEST names, read to the last byte."""
  found = latest(directory)
  assert found is not None
  read_params(found)
  return found


def test_a_publication_comes_back_as_it_was(params: Any, tmp_path: pathlib.Path) -> None:
  published = Publisher(tmp_path, CONFIG, "tokens").publish(7, params)
  assert (tmp_path / "LATEST").read_text() == "000007"
  found = latest(tmp_path)
  assert found == published == open_publication(tmp_path / "000007")
  assert found.version == 7 and found.policy == CONFIG.to_dict() and found.fingerprint == tree_fingerprint(params)
  assert equal(read_params(found), params)
  manifest = json.loads((tmp_path / "000007" / "manifest.json").read_text())
  assert manifest["tokenizer"] == "tokens" and len(manifest["checksums"]) == len(jax.tree.leaves(params))


def test_orbax_alone_can_read_it(params: Any, tmp_path: pathlib.Path) -> None:
  published = Publisher(tmp_path, CONFIG, "").publish(0, params)
  assert equal(ocp.PyTreeCheckpointer().restore(pathlib.Path(published.path) / "weights"), params)


def test_it_is_read_onto_another_mesh(params: Any, tmp_path: pathlib.Path) -> None:
  mesh = make_mesh(MeshShape(1, 2, 2), jax.devices()[:4])
  where = shardings(mesh, POLICY.logical_axes(), POLICY.abstract_params())
  published = Publisher(tmp_path, CONFIG, "").publish(0, jax.device_put(params, where))
  assert equal(read_params(published), params)
  other = shardings(make_mesh(MeshShape(1, 4, 1), jax.devices()[:4]), POLICY.logical_axes(), POLICY.abstract_params())
  abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), POLICY.abstract_params(), other
  )
  read = read_params(published, abstract)
  assert equal(read, params)
  assert jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, read, other)) == [True] * len(jax.tree.leaves(read))


def test_the_fingerprint_is_that_of_the_form_and_not_of_the_values(params: Any) -> None:
  assert tree_fingerprint(moved(params, 1.0)) == tree_fingerprint(params) == tree_fingerprint(POLICY.abstract_params())
  assert tree_fingerprint(jax.tree.map(lambda x: x.astype("bfloat16"), params)) != tree_fingerprint(params)
  renamed = dict(params) | {"other": params["embed"]}
  assert tree_fingerprint(renamed) != tree_fingerprint(params)


# ---- retention and replacement ----


def test_the_newest_are_kept(params: Any, tmp_path: pathlib.Path) -> None:
  (tmp_path / "notes").mkdir()  # What is not ours stays.
  publisher = Publisher(tmp_path, CONFIG, "", keep=2)
  for version in (8, 9, 10):
    publisher.publish(version, params)
  assert publisher.versions() == [9, 10] and (tmp_path / "notes").is_dir()
  assert complete(tmp_path).version == 10
  with pytest.raises(ValueError, match="keep=0"):
    Publisher(tmp_path, CONFIG, "", keep=0)


def test_retention_counts_versions_as_numbers(params: Any, tmp_path: pathlib.Path) -> None:
  publisher = Publisher(tmp_path, CONFIG, "", keep=2)
  for version in (999_998, 999_999, 1_000_000):
    publisher.publish(version, params)
  assert publisher.versions() == [999_999, 1_000_000] and complete(tmp_path).version == 1_000_000


def test_a_run_that_went_back_publishes_an_earlier_version(params: Any, tmp_path: pathlib.Path) -> None:
  # Checkpoints may be rarer than publications: a killed run goes back, and its old publications must not outlive that.
  publisher = Publisher(tmp_path, CONFIG, "", keep=2)
  for version in (3, 17, 18):
    publisher.publish(version, params)
  again = publisher.publish(16, moved(params, 1.0))
  assert complete(tmp_path).version == 16 and equal(read_params(again), moved(params, 1.0))
  assert publisher.versions() == [16]


def test_a_version_is_replaced_and_never_read_half(
  params: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  publisher = Publisher(tmp_path, CONFIG, "")
  publisher.publish(1, params)
  publisher.publish(2, params)
  seen: list[int] = []
  remove, replace = module.shutil.rmtree, module.os.replace

  def watch(action: Any) -> Any:
    def watched(*args: Any, **kwargs: Any) -> None:
      seen.append(complete(tmp_path).version)
      action(*args, **kwargs)
      seen.append(complete(tmp_path).version)

    return watched

  monkeypatch.setattr(module.shutil, "rmtree", watch(remove))
  monkeypatch.setattr(module.os, "replace", watch(replace))
  again = publisher.publish(2, moved(params, 1.0))
  assert set(seen) == {1, 2} and complete(tmp_path).version == 2
  assert equal(read_params(again), moved(params, 1.0))


# ---- a writer that dies ----

_WRITER = """
import sys, jax, numpy
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.train import publication
config = PolicyConfig(**CONFIG)
publisher = publication.Publisher(sys.argv[1], config, "")
params = jax.tree.map(lambda x: jax.device_put(numpy.ones(x.shape, x.dtype)), Policy(config).abstract_params())
publisher.publish(4, params)
publication.write_text = lambda *_: (print("here", flush=True), sys.stdin.read())
publisher.publish(5, params)
"""


def test_a_writer_that_is_killed_leaves_the_latest_whole(params: Any, tmp_path: pathlib.Path) -> None:
  # It waits right after Orbax has written version 5, before its manifest is there.
  script = _WRITER.replace("CONFIG", repr(CONFIG.to_dict()))
  process = subprocess.Popen(
    [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  assert process.stdout is not None and process.stdin is not None
  assert process.stdout.readline() == "here\n"
  process.send_signal(signal.SIGKILL)
  process.wait()
  process.stdin.close()
  process.stdout.close()
  assert (tmp_path / ".writing-000005" / "weights").is_dir()
  assert complete(tmp_path).version == 4
  # The next writer clears away what is half and goes on.
  publisher = Publisher(tmp_path, CONFIG, "")
  assert not list(tmp_path.glob(".writing-*"))
  publisher.publish(5, params)
  assert complete(tmp_path).version == 5 and publisher.versions() == [4, 5]


class Killed(BaseException):
  pass


@pytest.mark.parametrize("replacing", [False, True])
def test_a_writer_that_stops_before_any_of_its_steps_leaves_the_latest_whole(
  params: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
  publisher = Publisher(tmp_path, CONFIG, "")
  publisher.publish(3, params)
  publisher.publish(4, params)
  version = 4 if replacing else 5
  for step in range(100):
    count = 0

    def stepwise(action: Any, step: int = step) -> Any:
      def stopped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > step:
          raise Killed
        return action(*args, **kwargs)

      return stopped

    with monkeypatch.context() as patch:
      for owner, name in (
        (module.os, "replace"),
        (module.os, "fsync"),
        (module.shutil, "rmtree"),
        (ocp.Checkpointer, "save"),
        (pathlib.Path, "mkdir"),
      ):
        patch.setattr(owner, name, stepwise(getattr(owner, name)))
      try:
        publisher.publish(version, params)
      except Killed:
        pass
      else:
        break
    assert complete(tmp_path).version in ((3, 4) if replacing else (4, 5))
    publisher = Publisher(tmp_path, CONFIG, "")
  assert step >= 5 and complete(tmp_path).version == version


# ---- damage ----


def files_of(published: Publication) -> list[pathlib.Path]:
  return [p for p in sorted((pathlib.Path(published.path) / "weights").rglob("*")) if p.is_file()]


def test_damage_is_noticed_or_harmless(params: Any, tmp_path: pathlib.Path) -> None:
  published = Publisher(tmp_path, CONFIG, "").publish(0, params)
  noticed = 0
  # The largest files hold the weights, the smallest but needed one says where they are.
  files = sorted(files_of(published), key=lambda p: p.stat().st_size)
  for file in [*files[-2:], next(p for p in files if p.name == "manifest.ocdbt")]:
    content = file.read_bytes()
    middle = len(content) // 2
    for damaged in (content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :], content[:middle], None):
      file.unlink()
      if damaged is not None:
        file.write_bytes(damaged)
      try:
        assert equal(read_params(published), params)
      except UserError as error:
        assert "000000 is damaged: " in str(error) and "\n" not in str(error)
        noticed += 1
      file.write_bytes(content)
  assert noticed >= 6
  assert equal(read_params(published), params)


def test_a_leaf_that_is_not_what_was_published_is_named(params: Any, tmp_path: pathlib.Path) -> None:
  published = Publisher(tmp_path, CONFIG, "").publish(0, params)
  manifest = tmp_path / "000000" / "manifest.json"
  values = json.loads(manifest.read_text())
  for change in ({"layers/mlp/up": 1}, {"head": 1}):
    manifest.write_text(json.dumps({**values, "checksums": {**values["checksums"], **change}}))
    with pytest.raises(UserError, match=f"is damaged: {next(iter(change))} differs from its checksum"):
      read_params(published)
    read_params(published, verify=False)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"version": 1}', "\x00"])
def test_a_directory_without_a_manifest_is_no_publication(tmp_path: pathlib.Path, content: str | None) -> None:
  if content is not None:
    (tmp_path / "manifest.json").write_text(content)
  with pytest.raises(UserError, match=r"is not a complete publication: manifest.json is missing or broken"):
    open_publication(tmp_path)
  assert latest(tmp_path) is None
  (tmp_path / "LATEST").write_text("000003")
  with pytest.raises(UserError, match="000003 is not a complete publication"):
    latest(tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"width": 32, "layers": 3}, "policy.width=16, the config says 32"),
    ({"layers": 3}, "policy.layers=2, the config says 3"),
    ({"qk_norm": True}, "policy.qk_norm=False, the config says True"),
    ({"vocab_size": 33}, "policy.vocab_size=32, the config says 33"),
  ],
)
def test_weights_of_another_shape_are_refused_by_the_first_option_that_differs(
  change: dict[str, Any], message: str
) -> None:
  published = Publication(0, "somewhere", "", CONFIG.to_dict())
  with pytest.raises(UserError, match=message):
    check_fits(published, PolicyConfig.from_dict(CONFIG.to_dict() | change))


def test_how_a_policy_is_computed_does_not_decide_what_fits() -> None:
  published = Publication(0, "somewhere", "", CONFIG.to_dict())
  check_fits(published, PolicyConfig.from_dict(CONFIG.to_dict() | {"dtype": "bfloat16", "remat": "layer"}))
  with pytest.raises(UserError, match="another kind of policy: unknown policy option 'expertise'"):
    check_fits(Publication(0, "somewhere", "", CONFIG.to_dict() | {"expertise": 4}), CONFIG)


# ---- disks ----


def test_a_full_disk_is_a_user_error_and_loses_nothing(params: Any, small_disk: pathlib.Path) -> None:
  publisher = Publisher(small_disk, CONFIG, "", keep=2)
  with pytest.raises(UserError, match=r"is full: version [0-9]+ could not be published; make room") as caught:
    for version in range(20):
      publisher.publish(version, moved(params, version))
  assert "\n" not in str(caught.value)
  found = complete(small_disk)
  assert equal(read_params(found), moved(params, found.version))
  assert not list(small_disk.glob(".writing-*"))  # The half of it would keep the disk full.
  shutil.rmtree(small_disk / f"{publisher.versions()[0]:06d}")
  publisher.publish(found.version + 1, params)  # With room made it goes on.
  assert complete(small_disk).version == found.version + 1


def test_a_disk_that_fills_up_while_weights_are_written_loses_nothing(
  params: Any, small_disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  publisher = Publisher(small_disk, CONFIG, "", keep=2)
  publisher.publish(0, params)
  room = sum(x.nbytes for x in jax.tree.leaves(params)) // 2
  (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
  usage = shutil.disk_usage(small_disk)
  with monkeypatch.context() as patch:  # as if another had filled it just after the look
    patch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    with pytest.raises(UserError, match="is full: version 1 could not be published; make room"):
      publisher.publish(1, params)
  assert complete(small_disk).version == 0
  (small_disk / "ballast").unlink()
  gc.collect()  # the failed writers let go of their files
  publisher.publish(1, moved(params, 1))
  assert equal(read_params(complete(small_disk)), moved(params, 1)) and not list(small_disk.glob(".writing-*"))


def test_what_means_a_full_disk() -> None:
  assert is_disk_full(OSError(28, "No space left on device"))
  assert is_disk_full(OSError(122, "Disk quota exceeded"))
  assert is_disk_full(OSError(27, "File too large"))
  outer = RuntimeError("saving failed")
  outer.__cause__ = ValueError("RESOURCE_EXHAUSTED: Error writing")
  assert is_disk_full(outer)
  assert not is_disk_full(OSError(13, "Permission denied")) and not is_disk_full(ValueError("shapes differ"))


def test_a_directory_that_cannot_be_made_is_a_user_error(tmp_path: pathlib.Path) -> None:
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"publication directory .* cannot be made"):
    Publisher(tmp_path / "file" / "publications", CONFIG, "")
