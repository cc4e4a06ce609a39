"""Scaling analysis, figures and the episode viewer: reads what runs have written, trains nothing itself."""
