"""The Flax decoder, its log-probabilities, and Hugging Face import and export."""

from agentic_rl.policy.config import COMPUTATION, PolicyConfig
from agentic_rl.policy.decoder import Params, Policy
from agentic_rl.policy.logprobs import token_logprobs

__all__ = ["COMPUTATION", "Params", "Policy", "PolicyConfig", "token_logprobs"]
