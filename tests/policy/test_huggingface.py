from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.numpy")

from safetensors.numpy import load_file, save_file  # noqa: E402

from agentic_rl.errors import UserError  # noqa: E402
from agentic_rl.parallel import MeshShape, make_mesh, shardings  # noqa: E402
from agentic_rl.policy import Policy, PolicyConfig, huggingface  # noqa: E402
from agentic_rl.policy.huggingface import load as load_function  # noqa: E402
from agentic_rl.policy.rope import RopeScaling  # noqa: E402

load_module = sys.modules[load_function.__module__]

LLAMA = PolicyConfig(
  vocab_size=11, width=12, layers=2, heads=4, kv_heads=2, head_width=6, mlp_width=10, tied_embeddings=False
)
CONFIGS = {
  "llama": LLAMA,
  "smollm2": dataclasses.replace(LLAMA, kv_heads=1, head_width=2, tied_embeddings=True, rope_theta=1e5),
  "qwen2": dataclasses.replace(LLAMA, heads=2, qkv_bias=True, rope_theta=1e6),
  "qwen3": dataclasses.replace(LLAMA, head_width=8, qk_norm=True, tied_embeddings=True),
  "qwen3_moe": dataclasses.replace(
    LLAMA, qk_norm=True, experts=4, experts_per_token=2, expert_width=8, normalize_experts=False
  ),
  "llama3": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, 16, 1.0, 4.0)),
  "yarn": dataclasses.replace(LLAMA, heads=2, qkv_bias=True, rope_scaling=RopeScaling("yarn", 4.0, 16)),
  "linear": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("linear", 2.0)),
  "sliding": dataclasses.replace(LLAMA, qk_norm=True, sliding_window=5, sliding_layers=(False, True)),
}


def random_params(config: PolicyConfig, seed: int = 0, dtype: object = np.float32) -> dict:
  """Every value different, biases and norms too, so that no two places can be mixed up unseen."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.standard_normal(x.shape).astype(np.float32).astype(dtype), Policy(config).abstract_params()
  )


def assert_same_bits(a: dict, b: dict) -> None:
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def edit(directory: pathlib.Path, change) -> None:
  """Rewrites the weights of a directory after `change(tensors)`."""
  tensors = load_file(directory / "model.safetensors")
  change(tensors)
  save_file(tensors, directory / "model.safetensors")


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
  return huggingface.save(tmp_path / "model", LLAMA, random_params(LLAMA), max_length=32)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip_is_exact(name: str, dtype: type, tmp_path: pathlib.Path):
  config, params = CONFIGS[name], random_params(CONFIGS[name], dtype=dtype)
  path = huggingface.save(tmp_path / "model", config, params, max_length=32)
  read_config, read = huggingface.load(path, dtype=dtype)
  assert read_config == config
  assert_same_bits(read, params)


def test_matrices_lie_transposed_under_their_names(saved: pathlib.Path):
  params, tensors = random_params(LLAMA), load_file(saved / "model.safetensors")
  q, o = params["layers"]["attention"]["q"][1], params["layers"]["attention"]["o"][1]
  q_there = tensors["model.layers.1.self_attn.q_proj.weight"]
  o_there = tensors["model.layers.1.self_attn.o_proj.weight"]
  assert q_there.shape == (24, 12) and o_there.shape == (12, 24)
  for d, h, c in [(0, 0, 0), (5, 1, 2), (11, 3, 5)]:
    assert q_there[h * 6 + c, d] == q[d, h, c]
    assert o_there[d, h * 6 + c] == o[h, c, d]
  down = params["layers"]["mlp"]["down"][0]
  assert tensors["model.layers.0.mlp.down_proj.weight"][3, 7] == down[7, 3]
  assert tensors["lm_head.weight"].shape == (11, 12)


def test_shards_are_written_with_an_index_and_read_back(tmp_path: pathlib.Path):
  params = random_params(LLAMA)
  path = huggingface.save(tmp_path / "model", LLAMA, params, max_length=32, shard_bytes=3000)
  shards = sorted(path.glob("*.safetensors"))
  index = json.loads((path / "model.safetensors.index.json").read_text())
  assert len(shards) > 2
  assert [s.name for s in shards] == sorted(set(index["weight_map"].values()))
  assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
  assert all(sum(x.nbytes for x in load_file(s).values()) <= 3000 for s in shards)
  assert_same_bits(huggingface.load(path)[1], params)
  shards[1].unlink()
  with pytest.raises(UserError, match=shards[1].name):
    huggingface.load(path)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("shape", [MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(2, 2, 2)])
def test_devices_get_their_own_pieces(name: str, shape: MeshShape, tmp_path: pathlib.Path, monkeypatch):
  config = dataclasses.replace(CONFIGS[name], vocab_size=12)
  params = random_params(config)
  path = huggingface.save(tmp_path / "model", config, params, max_length=32)
  policy = Policy(config)
  mesh = make_mesh(shape, jax.devices()[: shape.data * shape.fsdp * shape.tensor])
  where = shardings(mesh, policy.logical_axes(), policy.abstract_params())
  sizes: list[int] = []
  read_piece = load_module._Checkpoint.read

  def count(self, *args):
    array = read_piece(self, *args)
    sizes.append(array.size)
    return array

  monkeypatch.setattr(load_module._Checkpoint, "read", count)
  _, read = huggingface.load(path, shardings=where)
  assert_same_bits(jax.tree.map(np.asarray, read), params)
  assert jax.tree.map(lambda x: x.sharding, read) == where
  leaves = jax.tree.leaves(read)
  assert sum(sizes) == sum(x.size for x in leaves)  # copies are not read again
  assert max(sizes) <= max(x.addressable_shards[0].data.size for x in leaves)


def test_options_of_the_computation_are_kept(saved: pathlib.Path):
  config, _ = huggingface.load(saved, remat="layer", unroll_layers=True)
  assert config == dataclasses.replace(LLAMA, remat="layer", unroll_layers=True)


def test_missing_extra_and_wrong_shaped_tensors_are_named(saved: pathlib.Path):
  def change(tensors: dict) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    tensors["model.norm.weight"] = np.zeros(13, np.float32)

  edit(saved, change)
  with pytest.raises(UserError) as error:
    huggingface.load(saved)
  message = str(error.value)
  assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
  assert "1 extra: model.layers.0.self_attn.q_proj.bias" in message
  assert "model.norm.weight is (13,), not (12,)" in message


def test_a_value_that_is_not_finite_is_named(saved: pathlib.Path):
  edit(saved, lambda tensors: tensors["model.layers.1.input_layernorm.weight"].__setitem__(3, np.nan))
  with pytest.raises(UserError, match=r"model\.layers\.1\.input_layernorm\.weight .*not finite"):
    huggingface.load(saved)


def test_quantised_weights_are_named(saved: pathlib.Path):
  edit(saved, lambda tensors: tensors.update({"model.norm.weight": np.ones(12, np.int8)}))
  with pytest.raises(UserError, match=r"model\.norm\.weight in model\.safetensors is I8"):
    huggingface.load(saved)


def test_a_config_that_lacks_something_is_named(saved: pathlib.Path):
  values = json.loads((saved / "config.json").read_text())
  del values["num_attention_heads"]
  (saved / "config.json").write_text(json.dumps(values))
  with pytest.raises(UserError, match=r"config\.json has no 'num_attention_heads'"):
    huggingface.load(saved)
  (saved / "config.json").write_text("{")
  with pytest.raises(UserError, match=r"config\.json is not JSON"):
    huggingface.load(saved)


def test_windows_are_read_in_both_forms():
  values = huggingface.huggingface_config(CONFIGS["sliding"], max_length=32)
  assert huggingface.policy_config(values) == CONFIGS["sliding"]
  del values["layer_types"]
  assert huggingface.policy_config(values) == CONFIGS["sliding"]  # by max_window_layers
  assert not huggingface.policy_config({**values, "use_sliding_window": False}).sliding_layers
  assert not huggingface.policy_config({**values, "max_window_layers": 2}).sliding_layers


def test_a_tied_head_may_be_there_where_it_is_the_embedding(tmp_path: pathlib.Path):
  config = CONFIGS["smollm2"]
  path = huggingface.save(tmp_path / "model", config, random_params(config), max_length=32)
  edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
  assert_same_bits(huggingface.load(path)[1], random_params(config))
  edit(path, lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), 5.0))
  with pytest.raises(UserError, match="differs from the embedding"):
    huggingface.load(path)


def test_a_damaged_file_is_named(saved: pathlib.Path):
  (saved / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
  with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
    huggingface.load(saved)


def test_directories_without_a_model_are_refused(tmp_path: pathlib.Path):
  with pytest.raises(UserError, match=r"no config\.json"):
    huggingface.load(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(huggingface.huggingface_config(LLAMA, max_length=32)))
  with pytest.raises(UserError, match=r"no model\.safetensors"):
    huggingface.load(tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "gpt2"}, "model_type 'gpt2'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rope type 'longrope'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "a variant of yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor of a rope scaling must be at least 1"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({"mlp_only_layers": [1]}, r"dense layers \[1\]"),
    ({"num_key_value_heads": 3}, r"kv_heads \(3\) must divide"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
  ],
)
def test_what_the_decoder_does_not_have_is_refused(change: dict, message: str):
  values = {**huggingface.huggingface_config(LLAMA, max_length=32), **change}
  with pytest.raises(UserError, match=message):
    huggingface.policy_config(values)


def test_published_configs_are_read():
  qwen3 = {  # the shape of Qwen3-0.6B
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
  }
  config = huggingface.policy_config(qwen3)
  assert Policy(config).parameter_count() == 596_049_920
  assert config.qk_norm and not config.qkv_bias and config.head_width == 128 and config.rope_theta == 1e6
  newer = {**qwen3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
  del newer["rope_theta"]
  assert huggingface.policy_config(newer) == config
  del newer["head_dim"]
  assert huggingface.policy_config(newer).head_width == 64


def test_export_checks_the_tree_and_leaves_nothing_behind(tmp_path: pathlib.Path):
  params = random_params(LLAMA)
  with pytest.raises(ValueError, match="no leaf layers/attention/q_norm"):
    huggingface.save(tmp_path / "a", dataclasses.replace(LLAMA, qk_norm=True), params, max_length=32)
  with pytest.raises(ValueError, match="does not: head"):
    huggingface.save(tmp_path / "a", dataclasses.replace(LLAMA, tied_embeddings=True), params, max_length=32)
  with pytest.raises(ValueError, match=r"embed/table is \(11, 12\)"):
    huggingface.save(tmp_path / "a", dataclasses.replace(LLAMA, vocab_size=12), params, max_length=32)

  def failing():
    yield "a", np.zeros(3, np.float32)
    raise OSError("No space left on device")

  with pytest.raises(OSError, match="No space"):
    huggingface.write_directory(tmp_path / "a", failing(), {})
  assert list(tmp_path.iterdir()) == []


def test_export_never_overwrites(saved: pathlib.Path):
  with pytest.raises(UserError, match="exists already"):
    huggingface.save(saved, LLAMA, random_params(LLAMA, 1), max_length=32)
  assert_same_bits(huggingface.load(saved)[1], random_params(LLAMA))


def test_no_family_has_both_norm_and_bias():
  with pytest.raises(ValueError, match="cannot be exported"):
    huggingface.huggingface_config(dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True), max_length=32)
