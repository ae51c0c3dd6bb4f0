"""Every notebook runs from a clean kernel, and its committed outputs are fit to be read by others.

`.venv/bin/python -m tests.test_notebooks` runs them again and keeps the outputs.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICKSTART = "01_quickstart.ipynb"
CELL_S = 300  # a cell may take so long on a very busy machine
SIZE_LIMIT = 300_000
PUBLIC = {"swarm", "swarm.figures", "swarm.render", "swarm.sync", "routing.errors"}

# Run after the last cell, to see what pictures do not tell.
PROBES = {
    QUICKSTART: """
import json
import os

figure = plots.token_figure(session.traces, session.recoveries, {"peer killed": killed_at})
axes = figure.axes[0]
print(json.dumps({
    "kernel": os.getpid(),
    "returncodes": {peer.peer_id: peer.process.returncode for peer in peers.peers},
    "victim": victim.peer_id,
    "undisturbed": undisturbed,
    "recovered": recovered,
    "before": [hop.peer_id for hop in change.before],
    "after": [hop.peer_id for hop in change.after],
    "mark": axes.lines[0].get_xdata()[0],
    "series": {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers},
    "numbers": [bar.get_x() + bar.get_width() / 2 for bar in axes.containers[0]],
}))
""",
}


def run(path: Path, scratch: Path, more: Sequence[str] = ()) -> NotebookNode:
    """From a clean kernel: this interpreter, whatever kernelspecs the user has. Raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.cells += [new_code_cell(source) for source in more]
    kernels = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # leaves ipykernel's own, of this interpreter
        connection_file=str(scratch / "kernel.json"),
        transport="ipc",  # sockets beside that file: no port is taken
    )
    client = NotebookClient(
        notebook,
        km=kernels,
        timeout=CELL_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(scratch)}},
    )
    return client.execute(cleanup_kc=True)  # the kernel ends, however this ends


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.name)
def executed(request: pytest.FixtureRequest) -> tuple[str, NotebookNode]:
    name = request.param.name
    # A folder with a short name: that of a socket must not be longer than about 100 characters.
    with tempfile.TemporaryDirectory(prefix="nb-") as folder, pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(variable, folder)  # no start-up files, no settings, nothing left in the user's
        more = [PROBES[name]] if name in PROBES else []
        return name, run(request.param, Path(folder), more)


def outputs(notebook: NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(notebook: NotebookNode, cell_id: str) -> str:
    cell = next(cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def figures(notebook: NotebookNode) -> list[str]:
    return [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]


def test_there_are_notebooks():
    assert QUICKSTART in [path.name for path in NOTEBOOKS]


@pytest.mark.processes
def test_runs_from_a_clean_kernel_without_errors_or_warnings(executed):
    _, notebook = executed
    kinds = [output.output_type for output in outputs(notebook)]
    assert kinds and "error" not in kinds
    assert [output.text for output in outputs(notebook) if output.get("name") == "stderr"] == []


@pytest.fixture
def quickstart(executed) -> NotebookNode:
    name, notebook = executed
    if name != QUICKSTART:
        pytest.skip("about another notebook")
    return notebook


@pytest.fixture
def facts(quickstart) -> dict[str, Any]:
    return json.loads(quickstart.cells[-1].outputs[0].text)


@pytest.mark.processes
def test_quickstart_tells_how_the_start_gets_on(quickstart):
    lines = text_of(quickstart, "start").splitlines()
    served = [re.fullmatch(r"peer \w{6} serves blocks (\S+) after [\d.]+ s", line) for line in lines[1:]]
    assert [match and match[1] for match in served] == ["0:15", "15:30", "15:30"]


@pytest.mark.processes
def test_quickstart_answers_and_the_kill_does_not_change_a_token(quickstart, facts):
    answer = text_of(quickstart, "generate")
    assert "Paris" in answer and text_of(quickstart, "kill") == answer
    assert len(facts["undisturbed"]) > 20 and facts["recovered"] == facts["undisturbed"]
    assert text_of(quickstart, "same").endswith("True\n")


@pytest.mark.processes
def test_quickstart_really_kills_a_peer_in_use_and_leaves_nothing_running(quickstart, facts):
    victim = facts["victim"]
    assert facts["returncodes"][victim] == -9
    assert victim == facts["before"][-1] and victim not in facts["after"]
    assert len(facts["returncodes"]) == 3 and None not in facts["returncodes"].values()
    assert text_of(quickstart, "close").endswith("0\n")
    assert not psutil.pid_exists(facts["kernel"])


@pytest.mark.processes
def test_quickstart_draws_the_stall_where_the_peer_was_killed(quickstart, facts):
    assert len(figures(quickstart)) == 3
    recovery = facts["series"]["recovery"]
    stalled = [number for number, height in zip(facts["numbers"], recovery, strict=True) if height > 0]
    assert stalled[0] == pytest.approx(facts["mark"] + 0.5) == pytest.approx(21)
    # How high it stands is not said: a spare that still holds the prompt of a cell before needs no replay.
    assert len(stalled) == 1


@pytest.mark.processes
def test_quickstart_shows_tables_of_peers_blocks_and_hops(quickstart):
    tables = [output.data["text/plain"] for output in outputs(quickstart) if "text/html" in output.get("data", {})]
    shown = "\n".join(tables)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for words in ("serving", "15:30", "only one peer serves 0:15", "compute ms", "before", "after"):
        assert words in plain
    assert "15:30" in tables[-1] and "swarm serve" in tables[-1]  # the blocks that nobody serves, and what to do


# -- as committed ------------------------------------------------------------------------------------------------


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def committed(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_committed_is_small_and_holds_nothing_of_the_machine_it_ran_on(committed):
    text = committed.read_text()
    assert len(text) < SIZE_LIMIT
    images_removed = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"/(home|root|Users|tmp|work|usr)/|\\\\Users|site-packages|Traceback", images_removed)


def test_committed_was_run_from_top_to_bottom(committed):
    cells = [cell for cell in nbformat.read(committed, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


def test_uses_public_names_only(committed):
    notebook = nbformat.read(committed, as_version=4)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    ours = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            ours.add(node.module)
        elif isinstance(node, ast.Import):
            ours |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
    assert {name for name in ours if name.split(".")[0] in ("swarm", "peer", "routing", "tests")} <= PUBLIC


def _keep_outputs() -> None:
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as scratch:
            notebook = run(path, Path(scratch))
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(notebook, path)


if __name__ == "__main__":
    _keep_outputs()
