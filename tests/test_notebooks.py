"""The tutorial: every notebook runs, and its student version fails where the exercises are, and nowhere else."""

from __future__ import annotations

import ast
import json
import shutil
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from examples import make_student
from tests.notebook import ANSI

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = [path for path in sorted(EXAMPLES.glob("[0-9][0-9]_*.ipynb")) if path.name[:2] not in ("00", "04")]
"""Those of the tutorial; the quickstart and the debugging notebook have tests of their own."""
SCALE = "0.1"
"""Of the work: fewer steps, smaller models, shorter messages."""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def saved():
    """A folder for what a notebook saves, 1.6 GB, which does not stay as those of `tmp_path` do."""
    with tempfile.TemporaryDirectory(prefix="ddl-tutorial-") as folder:
        yield folder


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def tagged(cell: nbformat.NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def with_attempts(path: Path) -> nbformat.NotebookNode:
    """The notebook, with what the student version has for each exercise and its check before the solution."""
    notebook, student = read(path), make_student.student_version(read(path))
    cells: list[nbformat.NotebookNode] = []
    begins = 0
    for number, cell in enumerate(notebook.cells):
        if tagged(cell, "exercise"):
            begins = len(cells)
        cells.append(cell)
        if tagged(cell, "check"):
            count = len(cells) - begins
            attempt = student.cells[number + 1 - count : number + 1]
            cells[begins:begins] = [nbformat.from_dict({**tried, "id": f"try-{tried['id']}"}) for tried in attempt]
    notebook.cells = cells
    return notebook


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run it in its folder; raises where a cell fails that does not have the tag `raises-exception`."""
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(EXAMPLES)}},
        extra_arguments=["--log-level=ERROR"],
    ).execute()


@every_notebook
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_all_cells_run_and_a_check_fails_until_its_exercise_is_solved(path, monkeypatch, saved) -> None:
    monkeypatch.setenv("DDL_TUTORIAL_SCALE", SCALE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DDL_TUTORIAL_FOLDER", saved)
    notebook = with_attempts(path)
    execute(notebook)
    attempts = [cell for cell in notebook.cells if cell.id.startswith("try-") and tagged(cell, "check")]
    assert attempts
    for cell in notebook.cells:
        if cell.cell_type == "code":
            errors = [output for output in cell.outputs if output.output_type == "error"]
            assert len(errors) == (cell in attempts), cell.source
            told = [ANSI.sub("", f"{error.ename}: {error.evalue}") for error in errors]
            assert all("NotImplementedError: TODO" in text for text in told), told


@pytest.fixture
def named(smollm2, tmp_path, monkeypatch):
    """Model and data as the hub has them, in folders: a small one with SmolLM2's tokenizer, and Alpaca's columns."""
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(smollm2, model, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((model / "config.json").read_text())
    small = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(config | small | {"num_key_value_heads": 2, "head_dim": 12}))
    data.mkdir()
    rows = [
        {"instruction": f"Add {n}.", "input": f"{n}", "output": f"{2 * n} it is.", "text": f"{n} " * 90}
        for n in range(300)
    ]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return {"model_name = None": f"model_name = {str(model)!r}", "data_name = None": f"data_name = {str(data)!r}"}


@pytest.mark.mpi
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "last"), [("01_train_from_scratch", "right: "), ("02_fine_tune", "questions =")])
def test_model_and_data_are_loaded_by_the_names_of_the_first_cell(name, last, named, monkeypatch) -> None:
    monkeypatch.setenv("DDL_TUTORIAL_SCALE", SCALE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(EXAMPLES / f"{name}.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for line, other in named.items():
        assert line in cells[0].source
        cells[0].source = cells[0].source.replace(line, other)
    end = next(number for number, cell in enumerate(cells) if last in cell.source) + 1
    notebook.cells = [*cells[:end], nbformat.v4.new_code_cell("%ddl stop")]
    execute(notebook)
    shown = "\n".join(output.text for output in cells[end - 1].outputs if output.output_type == "stream")
    assert ("ln(49152)" if name.startswith("01") else "8 examples to learn from") in shown


@every_notebook
def test_the_student_version_is_up_to_date(path) -> None:
    student = make_student.STUDENT / path.name
    assert student.read_text(encoding="utf-8") == make_student.text_of(path), "run: make student"


@every_notebook
def test_nothing_but_its_check_needs_an_exercise_so_that_a_student_can_go_on_without(path) -> None:
    solved: set[str] = set()
    for cell in read(path).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(python(cell.source))
        if tagged(cell, "exercise"):
            solved |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        elif not tagged(cell, "check"):
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not solved & used, cell.source


@every_notebook
def test_its_parameters_come_first_and_it_is_saved_without_outputs(path) -> None:
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [tagged(cell, "parameters") for cell in code] == [True] + [False] * (len(code) - 1)
    assert not [cell for cell in code if cell.outputs or cell.execution_count]


@every_notebook
def test_the_student_version_shows_no_solution_and_its_links_lead_somewhere(path) -> None:
    teacher, student = read(path), read(make_student.STUDENT / path.name)
    solutions = [solution for cell in teacher.cells for solution in solved_lines(cell.source)]
    assert solutions
    text = "\n".join(cell.source for cell in student.cells)
    assert not [solution for solution in solutions if solution in text]
    prose = "\n".join(cell.source for cell in student.cells if cell.cell_type == "markdown")
    targets = [link.split("#")[0] for link in make_student.LINK.findall(prose) if "://" not in link]
    assert not [target for target in targets if not (make_student.STUDENT / target).exists()]


def solved_lines(source: str) -> list[str]:
    """The solutions in a cell, each as one text."""
    parts = source.split(make_student.SOLUTION + "\n")[1:]
    return [part.split(make_student.END)[0].strip() for part in parts]


def python(source: str) -> str:
    """A cell without its magics and shell lines."""
    lines = source.splitlines()
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def test_the_words_of_the_todo_stand_in_the_error() -> None:
    source = "def f(x):\n    # TODO: double x,\n    # by adding\n    # SOLUTION\n    return x + x\n    # END\nf"
    wanted = "    raise NotImplementedError('TODO: double x, by adding')"
    assert make_student.without_solution(source).splitlines()[3:] == [wanted, "f"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("# TODO: a\n# SOLUTION\nx", "without # END"),
        ("x\n# END", "without # SOLUTION"),
        ("x\n# SOLUTION\ny\n# END", "without a # TODO"),
        ("# TODO: a\n# SOLUTION\n# SOLUTION\n# END", "a second"),
    ],
)
def test_marks_that_do_not_fit_are_an_error(source, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_student.without_solution(source)


def test_a_solution_needs_the_tag_by_which_it_is_found() -> None:
    cell = nbformat.v4.new_code_cell("# TODO: a\n# SOLUTION\nx = 1\n# END")
    with pytest.raises(make_student.MarkError, match="cell 0: the tag 'exercise'"):
        make_student.student_version(nbformat.v4.new_notebook(cells=[cell]))
