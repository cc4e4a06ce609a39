"""The nano study, sweeps, and what reads their runs: statistics, figures, the episode viewer."""
