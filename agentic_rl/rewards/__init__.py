"""Verifiers: from a finished episode to a reward."""

from agentic_rl.rewards.boxed import BoxedVerifier, last_boxed, parse_number
from agentic_rl.rewards.reward import Reward, Verifier, get_verifier, register_verifier

__all__ = ["BoxedVerifier", "Reward", "Verifier", "get_verifier", "last_boxed", "parse_number", "register_verifier"]
