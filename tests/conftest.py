"""What all tests share: a runtime folder of their own, and kernels with ranks."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from tests.notebook import Notebook


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder():
    """Clusters of the tests live in a folder of their own, so that they meet no other cluster of this user."""
    with tempfile.TemporaryDirectory(prefix="ddl-tests-") as folder:
        before = dict(os.environ)
        os.environ["JUPYTER_RUNTIME_DIR"] = folder
        os.environ["IPYTHONDIR"] = f"{folder}/ipython"
        yield
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def smollm2():
    """Folder of the real pretrained model, converted once a checkout; two test processes wait for one another."""
    script = Path(__file__).parents[1] / "examples" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("smollm2", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.convert()
    except module.NotInstalledError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def notebook():
    """A notebook without ranks."""
    book = Notebook()
    yield book
    book.close()


@pytest.fixture(scope="module")
def ranks2():
    """A notebook with two ranks; tests of a module share them."""
    book = Notebook()
    shown = book.run("%ddl start -n 2", timeout=90)
    assert shown.ename is None, shown.text
    yield book
    book.close()
