"""Weights from and to Hugging Face directories: Llama (SmolLM2 too), Qwen2 / Qwen2.5, Qwen3 and Qwen3-MoE.

One table (`table`) names every parameter on both sides; import, export and the checks all read it. Matrices differ by
a transposition (`[out, in]` there, `[in, heads, head width]` here) and by the axes of layers and experts, so a round
trip is exact. Both directions stream: import reads for each device the pieces that it holds, export writes one shard at
a time.
"""

from agentic_rl.policy.huggingface.load import load, read_config
from agentic_rl.policy.huggingface.save import save, write_directory
from agentic_rl.policy.huggingface.table import huggingface_config, policy_config

__all__ = ["huggingface_config", "load", "policy_config", "read_config", "save", "write_directory"]
