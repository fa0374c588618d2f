"""What all tests share: a runtime folder of their own, and kernels with ranks."""

from __future__ import annotations

import os
import tempfile

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
