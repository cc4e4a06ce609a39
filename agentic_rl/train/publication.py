"""Publications: one immutable, complete, versioned set of policy weights on disk, written by Orbax.

    publications/000012/weights/      Orbax checkpoint of the parameters, readable by Orbax alone
    publications/000012/manifest.json version, fingerprint, a checksum for every leaf, policy configuration
    publications/LATEST               name of the newest complete publication

A publication is written under a temporary name and renamed when it is complete: readers see all of it or none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import shutil
import time
import zlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from agentic_rl.episode import Publication
from agentic_rl.errors import UserError
from agentic_rl.policy import Params, PolicyConfig

_TEMPORARY = ".writing-"
_METADATA_BYTES = 8192  # that Orbax writes beside each leaf, rounded up to blocks
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
  return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def weights_fingerprint(publication: Publication) -> str:
  """Hash of a publication's values: equal for equal weights, whatever their version and place."""
  manifest = json.loads((pathlib.Path(publication.path) / "manifest.json").read_text())
  return hashlib.sha256(json.dumps(manifest["checksums"], sort_keys=True).encode()).hexdigest()[:16]


class Publisher:
  """Writes publications under a directory and keeps the newest few."""

  def __init__(self, directory: str | os.PathLike[str], policy: PolicyConfig, tokenizer: str, *, keep: int = 2):
    """Args:
    directory: Where publications lie; on a RAM disk if speed matters more than surviving a reboot.
    policy: Configuration of the policy, stored with each publication.
    tokenizer: Fingerprint of the tokenizer, stored with each publication.
    keep: Newest publications to keep.

    Raises:
      UserError: If the directory cannot be made.
    """
    if keep < 1:
      raise ValueError(f"at least one publication must be kept, got keep={keep}")
    self.directory = pathlib.Path(directory).absolute()
    self._policy, self._tokenizer, self._keep = policy, tokenizer, keep
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise UserError(f"the publication directory {self.directory} cannot be made: {error.strerror}") from error
    for half in self.directory.glob(f"{_TEMPORARY}*"):  # left by a writer that was killed
      shutil.rmtree(half)

  def publish(self, version: int, params: Params) -> Publication:
    """Writes one version and makes it the latest. A version that exists already is replaced.

    Later versions are deleted: they belong to iterations that a run which went back to its checkpoint does anew.

    Raises:
      UserError: If the disk is full. Older publications stay as they are.
    """
    final = self.directory / f"{version:06d}"
    half = self.directory / f"{_TEMPORARY}{version:06d}"
    shutil.rmtree(half, ignore_errors=True)
    try:
      # Orbax's writers that run out of space leave a dozen tracebacks of their threads: better not to begin.
      named = _named_leaves(params)
      needed = sum(x.nbytes for _, x in named) + _METADATA_BYTES * len(named)
      if needed > shutil.disk_usage(self.directory).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      half.mkdir(parents=True)
      with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save(half / "weights", args=ocp.args.PyTreeSave(params))
      manifest: dict[str, Any] = {
        "version": version,
        "fingerprint": tree_fingerprint(params),
        "policy": self._policy.to_dict(),
        "tokenizer": self._tokenizer,
        "checksums": {name: _checksum(np.asarray(x)) for name, x in _named_leaves(params)},
      }
      write_text(half / "manifest.json", json.dumps(manifest, indent=1))
      if final.exists():
        # A directory cannot be replaced in one step, so that for a moment the version before is the latest again.
        self._point_to(max((v for v in self.versions() if v < version), default=None))
        shutil.rmtree(final)
      os.replace(half, final)
      self._point_to(version)
    except (OSError, ValueError) as error:
      _remove_half(half)
      if not is_disk_full(error):
        raise
      raise UserError(
        f"the disk of {self.directory} is full: version {version} could not be published; make room and start again "
        f"(earlier publications and checkpoints are intact)"
      ) from error
    kept = [v for v in self.versions() if v <= version][-self._keep :]
    for other in self.versions():
      if other not in kept:
        shutil.rmtree(self.directory / f"{other:06d}")
    return Publication(version, str(final), manifest["fingerprint"], manifest["policy"])

  def versions(self) -> list[int]:
    """The versions that lie in the directory, in rising order."""
    return sorted(int(p.name) for p in self.directory.iterdir() if p.is_dir() and p.name.isdigit())

  def _point_to(self, version: int | None) -> None:
    pointer = self.directory / "LATEST"
    if version is None:
      pointer.unlink(missing_ok=True)
    else:
      write_text(pointer, f"{version:06d}")


def _remove_half(half: pathlib.Path) -> None:
  """Removes what a failed write has left, as often as the writer's threads, which end on their own, bring it back."""
  absent = 0
  for _ in range(100):
    absent = 0 if half.exists() else absent + 1
    if absent == 5:
      return
    shutil.rmtree(half, ignore_errors=True)
    time.sleep(0.02)


def is_disk_full(error: BaseException) -> bool:
  """Whether an error, or what caused it, says that no more can be written: the disk, a quota or a file size limit.

  Orbax's writers do not all raise `OSError`, so that messages count as well.
  """
  seen: BaseException | None = error
  while seen is not None:
    if getattr(seen, "errno", None) in _FULL or any(
      text in str(seen) for text in ("RESOURCE_EXHAUSTED", *map(os.strerror, _FULL))
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
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(
      f"{path} is not a complete publication: {manifest.name} is missing or broken; name a directory like "
      f"runs/base/publications/000000"
    ) from error


def read_params(publication: Publication, abstract: Params | None = None, *, verify: bool = True) -> Params:
  """Restores a publication's parameters.

  Args:
    publication: What to read.
    abstract: `ShapeDtypeStruct`s with shardings to restore into; host arrays if None.
    verify: Compare every leaf with the checksum of the manifest.

  Raises:
    UserError: If the weights cannot be read, or a leaf is missing or differs from its checksum.
  """
  path = pathlib.Path(publication.path) / "weights"
  try:
    with ocp.Checkpointer(_handler()) as checkpointer:
      if abstract is None:
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
          raise ValueError("Orbax finds no tree in it")
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
      else:
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args))
  except (OSError, ValueError, KeyError) as error:
    reason = str(error).split("\n", 1)[0][:200]
    raise UserError(f"publication {publication.path} is damaged: {reason}; publish it again") from error
  if verify:
    checksums = json.loads((pathlib.Path(publication.path) / "manifest.json").read_text())["checksums"]
    found = {name: _checksum(np.asarray(leaf)) for name, leaf in _named_leaves(params)}
    for name in sorted(checksums.keys() | found.keys()):
      if checksums.get(name) != found.get(name):
        raise UserError(
          f"publication {publication.path} is damaged: {name} differs from its checksum; publish it again"
        )
  return params


def holds(publication: Publication, params: Params) -> bool:
  """Whether a publication was made from exactly these parameters, by its checksums."""
  manifest = json.loads((pathlib.Path(publication.path) / "manifest.json").read_text())
  checksums: dict[str, int] = manifest["checksums"]
  return checksums == {name: _checksum(np.asarray(leaf)) for name, leaf in _named_leaves(params)}


def check_fits(publication: Publication, policy: PolicyConfig) -> None:
  """Raises `UserError` naming the first option in which a publication's policy differs from `policy`."""
  try:
    published = PolicyConfig.from_dict(publication.policy).architecture()
  except (TypeError, ValueError) as error:
    raise UserError(f"the weights at {publication.path} are of another kind of policy: {error}") from error
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
