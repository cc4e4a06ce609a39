"""Reinforcement learning of language models that reason with a Python interpreter, in JAX."""

__version__ = "0.1.0"
