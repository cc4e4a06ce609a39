"""Publications: one immutable, complete, versioned set of policy weights on disk, written by Orbax.

    publications/000012/weights/      Orbax checkpoint of the parameters, readable by Orbax alone
    publications/000012/manifest.json version, fingerprint, a checksum for every leaf, policy configuration
    publications/LATEST               name of the newest complete publication

A publication is written under a temporary name and renamed when it is complete: readers see all of it or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from agentic_rl.episode import Publication
from agentic_rl.errors import UserError
from agentic_rl.policy import Params, PolicyConfig

_TEMPORARY = ".writing-"


def _handler() -> ocp.PyTreeCheckpointHandler:
  # Compression costs more time than the bytes it saves on a local disk (measured: 3 to 4 times slower).
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def tree_fingerprint(params: Params) -> str:
  """Hash of the tree's paths, shapes and dtypes; equal for checkpoints that fit the same policy."""
  leaves = [(name, tuple(x.shape), str(x.dtype)) for name, x in _named_leaves(params)]
  return hashlib.sha256(json.dumps(sorted(leaves)).encode()).hexdigest()[:16]


def _named_leaves(params: Params) -> list[tuple[str, Any]]:
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in flat]


def _checksum(array: np.ndarray) -> int:
  return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1))


class Publisher:
  """Writes publications under a directory and keeps the newest few."""

  def __init__(self, directory: str | os.PathLike[str], policy: PolicyConfig, tokenizer: str, *, keep: int = 2):
    """Args:
    directory: Where publications lie; on a RAM disk if speed matters more than surviving a reboot.
    policy: Configuration of the policy, stored with each publication.
    tokenizer: Fingerprint of the tokenizer, stored with each publication.
    keep: Newest publications to keep.
    """
    if keep < 1:
      raise ValueError(f"at least one publication must be kept, got keep={keep}")
    self.directory = pathlib.Path(directory).absolute()
    self._policy, self._tokenizer, self._keep = policy, tokenizer, keep
    self.directory.mkdir(parents=True, exist_ok=True)
    for half in self.directory.glob(f"{_TEMPORARY}*"):  # left by a writer that was killed
      shutil.rmtree(half)

  def publish(self, version: int, params: Params) -> Publication:
    """Writes one version and makes it the latest. A version that exists already is replaced.

    Raises:
      UserError: If the disk is full. Older publications stay as they are.
    """
    final = self.directory / f"{version:06d}"
    half = self.directory / f"{_TEMPORARY}{version:06d}"
    shutil.rmtree(half, ignore_errors=True)
    try:
      half.mkdir(parents=True)
      with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(half / "weights", args=ocp.args.PyTreeSave(params))
      manifest = {
        "version": version,
        "fingerprint": tree_fingerprint(params),
        "policy": self._policy.to_dict(),
        "tokenizer": self._tokenizer,
        "checksums": {name: _checksum(np.asarray(x)) for name, x in _named_leaves(params)},
      }
      write_text(half / "manifest.json", json.dumps(manifest, indent=1))
      if final.exists():
        shutil.rmtree(final)
      os.replace(half, final)
      write_text(self.directory / "LATEST", final.name)
    except (OSError, ValueError) as error:
      shutil.rmtree(half, ignore_errors=True)
      if not is_disk_full(error):
        raise
      raise UserError(
        f"the disk of {self.directory} is full: version {version} could not be published; make room and start again "
        f"(earlier publications and checkpoints are intact)"
      ) from error
    for old in sorted(p for p in self.directory.iterdir() if p.is_dir() and p.name.isdigit())[: -self._keep]:
      shutil.rmtree(old)
    return Publication(version, str(final), manifest["fingerprint"], manifest["policy"])


def is_disk_full(error: BaseException) -> bool:
  """Whether an error, or what caused it, says that no space is left: Orbax's writers do not all raise `OSError`."""
  seen: BaseException | None = error
  while seen is not None:
    if getattr(seen, "errno", None) in (28, 122) or any(
      s in str(seen) for s in ("No space left on device", "RESOURCE_EXHAUSTED", "Disk quota exceeded")
    ):
      return True
    seen = seen.__cause__ or seen.__context__
  return False


def latest(directory: str | os.PathLike[str]) -> Publication | None:
  """The newest complete publication of a directory, None if there is none."""
  directory = pathlib.Path(directory).absolute()
  pointer = directory / "LATEST"
  if not pointer.is_file():
    return None
  return open_publication(directory / pointer.read_text().strip())


def open_publication(path: str | os.PathLike[str]) -> Publication:
  """Reads a publication's manifest.

  Raises:
    UserError: If there is no complete publication at `path`.
  """
  manifest = pathlib.Path(path) / "manifest.json"
  try:
    values = json.loads(manifest.read_text())
    return Publication(values["version"], str(pathlib.Path(path).absolute()), values["fingerprint"], values["policy"])
  except (OSError, json.JSONDecodeError, KeyError) as error:
    raise UserError(f"{path} is not a complete publication: {manifest.name} is missing or broken") from error


def read_params(publication: Publication, abstract: Params | None = None, *, verify: bool = True) -> Params:
  """Restores a publication's parameters.

  Args:
    publication: What to read.
    abstract: `ShapeDtypeStruct`s with shardings to restore into; host arrays if None.
    verify: Compare every leaf with the checksum of the manifest.

  Raises:
    UserError: If a leaf differs from its checksum.
  """
  path = pathlib.Path(publication.path) / "weights"
  with ocp.Checkpointer(_handler()) as checkpointer:
    if abstract is None:
      metadata = checkpointer.metadata(path).item_metadata.tree
      restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
      params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    else:
      restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
      params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args))
  if verify:
    checksums = json.loads((pathlib.Path(publication.path) / "manifest.json").read_text())["checksums"]
    for name, leaf in _named_leaves(params):
      if checksums.get(name) != _checksum(np.asarray(leaf)):
        raise UserError(f"publication {publication.path} is damaged: {name} differs from its checksum; publish it again")
  return params


def check_fits(publication: Publication, policy: PolicyConfig) -> None:
  """Raises `UserError` naming the first option in which a publication's policy differs from `policy`."""
  published = PolicyConfig.from_dict(publication.policy).architecture()
  for name, value in policy.architecture().items():
    if published[name] != value:
      raise UserError(
        f"the weights at {publication.path} have policy.{name}={published[name]!r}, the config says {value!r}; "
        f"use the config that they were trained with, or other weights"
      )


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file so that readers see the old text or the new one."""
  temporary = path.with_name(f"{path.name}.writing")
  with temporary.open("w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
