"""Makes docs/panel.png: the training cell of the quickstart as a browser shows it, after `make demo` has run it.

    python docs/picture.py [STRATEGY]

Of the cell's output it keeps the panel of one strategy and the table that compares them all, and nothing is drawn by
hand. Needs Chromium on PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from PIL import Image, ImageChops

ROOT = Path(__file__).parents[1]
RAN = ROOT / "build" / "00_quickstart.ipynb"
PICTURE = ROOT / "docs" / "panel.png"
WIDTH, HEIGHT, MARGIN = 1000, 2000, 12
"""Of the browser's window, in CSS pixels, and the space that is left around the cell."""


def training_cell(strategy: str) -> nbformat.NotebookNode:
    """A notebook of the one cell, with the panel of one strategy and the table."""
    notebook = nbformat.read(RAN, as_version=4)
    cell = next(cell for cell in notebook.cells if "ddl.backward" in cell.source)
    pictures = [output for output in cell.outputs if "text/html" in output.get("data", {})]
    panel = next(output for output in pictures if output["data"]["text/plain"].startswith(strategy))
    cell.outputs = [panel, pictures[-1]]
    notebook.cells = [cell]
    return notebook


def photograph(html: str, folder: Path) -> Image.Image:
    """The page as Chromium draws it, at twice the resolution."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("picture: no Chromium on PATH; Debian: apt-get install chromium")
    page, picture = folder / "page.html", folder / "page.png"
    page.write_text(html, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2",
               f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"]  # fmt: skip
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
    return Image.open(picture).convert("RGB")


def trimmed(picture: Image.Image) -> Image.Image:
    """Without the empty space around the content."""
    white = Image.new("RGB", picture.size, "white")
    left, top, right, bottom = ImageChops.difference(picture, white).getbbox()
    width, height = picture.size
    edge = 2 * MARGIN
    return picture.crop((max(0, left - edge), max(0, top - edge), min(width, right + edge), min(height, bottom + edge)))


def main() -> None:
    """Render and save."""
    html, _ = HTMLExporter().from_notebook_node(training_cell(sys.argv[1] if len(sys.argv) > 1 else "zero:3"))
    with tempfile.TemporaryDirectory() as folder:
        picture = trimmed(photograph(html, Path(folder)))
    picture.quantize(128, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(f"picture: {PICTURE} {picture.size[0]}x{picture.size[1]}")


if __name__ == "__main__":
    main()
