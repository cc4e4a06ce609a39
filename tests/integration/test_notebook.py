"""The notebook of the study runs from top to bottom."""

from __future__ import annotations

import os
import pathlib

import nbclient
import nbformat

NOTEBOOK = "notebooks/zerotir_nano.ipynb"


def printed(cell: nbformat.NotebookNode) -> str:
  return "".join(output.get("text", "") for output in cell.outputs)


def test_notebook_is_committed_without_outputs(repository: pathlib.Path):
  notebook = nbformat.read(repository / NOTEBOOK, as_version=4)
  nbformat.validate(notebook)
  assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_notebook_runs_at_its_shortest_setting(repository: pathlib.Path, workdir: pathlib.Path):
  notebook = nbformat.read(repository / NOTEBOOK, as_version=4)
  (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
  assert "SETTING" in parameters.source and "WORKDIR" in parameters.source
  parameters.source = f'SETTING = "glance"\nWORKDIR = {str(workdir)!r}'

  # One device, as a user has it. The package is found in the checkout, whether or not it is installed.
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  environment["PYTHONPATH"] = str(repository)
  resources = {"metadata": {"path": str(repository / "notebooks")}}
  nbclient.NotebookClient(notebook, timeout=500, resources=resources).execute(env=environment)

  *_, table, figure, episodes = [cell for cell in notebook.cells if cell.cell_type == "code"]
  assert "accuracy hard" in printed(table)
  assert any("image/png" in output.get("data", {}) for output in figure.outputs)
  assert "── policy, " in printed(episodes)
  assert (workdir / "summary.json").is_file()
