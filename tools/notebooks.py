"""Execute the notebooks and store their outputs, so that they show where nothing is executed.

``python tools/notebooks.py`` does so for all of them, and ``python tools/notebooks.py 07_plan`` for
one. It takes minutes. Stored outputs have no times, paths, widgets, nor what went to standard
error, and figures of few colours.

Outputs that are simulated are the same each time. A cell that measures has the tag ``measured``.
Its outputs, and those of later cells that use its variables, are kept while the notebook's code is
that which made them; ``--measured`` renews them. So is the notebook's time on the first page.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
FIRST_PAGE = FOLDER / "00_start_here.ipynb"
#: Pictures of the first page, by notebook.
PICTURES = FOLDER / "pictures"
STORE = "python tools/notebooks.py"
N_COLOURS = 32
PICTURE_WIDTH = 320  # pixels
MAX_WIDTH = 1000  # pixels of a figure
#: Figures are drawn with few pixels: those that are made smaller take more bytes.
KERNEL = "--InlineBackend.print_figure_kwargs={'bbox_inches': 'tight', 'dpi': 90}"
#: Key of the notebook's metadata: the digest of the code that made the outputs.
DIGEST = "code_of_outputs"
#: Prints the CPU seconds of a kernel and of its processes that have ended.
CLOCK = "import os\nprint(sum(os.times()[:4]))"
#: Times on the first page.
SECONDS = 5, 10, 20, 30, 60, 120, 300
_EMBEDDED = re.compile(r'src="data:image/png;base64,([^"]+)"')
#: Addresses of objects, and seconds that a search for plans took.
_VARYING = re.compile(r"(?<=\b0x)[0-9a-f]{6,}|(?<= invalid; )[\d.]+(?= m?s)")


def code_cells(document: Any) -> list[Any]:
    """Return the cells with code."""
    return [cell for cell in document.cells if cell.cell_type == "code"]


def digest(document: Any) -> str:
    """Return the digest of a notebook's code."""
    text = "\0".join(cell.source for cell in code_cells(document))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measured_cells(cells: Sequence[Any]) -> set[int]:
    """Return the numbers of the cells that measure."""
    return {k for k, cell in enumerate(cells) if "measured" in cell.metadata.get("tags", ())}


def varying_cells(cells: Sequence[Any], roots: set[int]) -> set[int]:
    """Return ``roots``, and the numbers of later cells that use variables which those set."""
    names: set[str] = set()
    varying = set()
    for k, cell in enumerate(cells):
        varies = k in roots
        for statement in ast.parse(cell.source).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            nodes = list(ast.walk(statement))
            used = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
            bound = {
                x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
            }
            bound |= {x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)}
            varies |= bool(used & names)
            names = names | bound if varies else names - bound
        if varies:
            varying.add(k)
    return varying


def small_png(data: bytes, width: int = MAX_WIDTH) -> bytes:
    """Return a picture in few colours, at most ``width`` pixels wide."""
    with Image.open(io.BytesIO(data)) as image:
        picture = image.convert("RGBA")
        paper = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(paper, picture).convert("RGB")
    if picture.width > width:
        size = width, round(picture.height * width / picture.width)
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.quantize(N_COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def stored_outputs(outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a cell as they are stored."""
    stored: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            text = _VARYING.sub("...", output.text)
            if stored and stored[-1].output_type == "stream":
                stored[-1].text += text
            else:
                stored.append(nbformat.v4.new_output("stream", name="stdout", text=text))
            continue
        data = {
            kind: _VARYING.sub("...", x) for kind, x in output.data.items() if kind[:5] == "text/"
        }
        embedded = _EMBEDDED.search(data.get("text/html", ""))
        if png := output.data.get("image/png") or (embedded and embedded[1]):
            # The page of a timeline, which stays out, needs scripts.
            data = {"text/plain": data["text/plain"]}
            data["image/png"] = base64.b64encode(small_png(base64.b64decode(png))).decode()
        if data and not any("widget" in kind for kind in output.data):
            kind = {"data": data, "metadata": {}}
            stored.append(nbformat.v4.new_output(output.output_type, **kind))
    return stored


def forms(outputs: Sequence[Any]) -> list[str]:
    """Return what kind each output of a cell is: text, table or figure."""
    kinds = []
    for output in outputs:
        data = output.get("data", ())
        kinds.append(
            "figure" if "image/png" in data else "table" if "text/html" in data else "text"
        )
    return kinds


def texts(outputs: Sequence[Any]) -> list[str]:
    """Return the texts of a cell's outputs, of tables as HTML; figures have none.

    Plain text of a table has as many columns as the terminal in which pandas was loaded.
    """
    return [
        output.get("text") or output.data.get("text/html", output.data["text/plain"])
        for output, form in zip(outputs, forms(outputs), strict=True)
        if form != "figure"
    ]


def headings(outputs: Sequence[Any]) -> list[list[str]]:
    """Return the names of columns of a cell's tables, and the first word of its other texts."""
    words = []
    for text in texts(outputs):
        head = re.search("<thead>(.*?)</thead>", text, re.DOTALL)
        shown = re.sub("<[^>]*>", " ", head[1] if head else text)
        names = re.findall(r"\b(?!True|False)[A-Za-z_]{2,}", shown)
        words.append(names if head else names[:1])
    return words


def differences(document: Any, executed: Any, varying: set[int]) -> Iterator[str]:
    """Yield how the stored outputs of a notebook differ from those of its execution.

    Of ``varying`` cells only the kinds of outputs and their `headings` count.
    """
    if document.metadata.get(DIGEST) != digest(document):
        yield "its code was changed after its outputs were stored"
    pairs = zip(code_cells(document), code_cells(executed), strict=True)
    for k, (cell, again) in enumerate(pairs):
        outputs = stored_outputs(again.outputs)
        place = f"code cell {k} ({cell.source.splitlines()[0]!r} ...)"
        if forms(cell.outputs) != forms(outputs):
            yield f"{place}: stored {forms(cell.outputs)}, executed {forms(outputs)}"
            continue
        shown = headings if k in varying else texts
        if shown(cell.outputs) != shown(outputs):
            yield f"{place}: stored\n{shown(cell.outputs)}\nexecuted\n{shown(outputs)}"


def execute(document: Any) -> tuple[Any, float]:
    """Return a notebook, executed in an empty folder, and its CPU seconds."""
    import nbclient

    timed = nbformat.from_dict(document)
    timed.cells = [*timed.cells, nbformat.v4.new_code_cell(CLOCK)]
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            timed,
            timeout=1800,  # seconds a cell
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            extra_arguments=[KERNEL],
        )
        executed = client.execute()
    return executed, float(executed.cells.pop().outputs[0].text)


def store(path: Path, *, measured: bool) -> float:
    """Execute a notebook, and write it with its outputs; return its CPU seconds."""
    document = nbformat.read(path, as_version=4)
    cells = code_cells(document)
    kept: set[int] = set()
    executed, seconds = execute(document)
    if not measured and document.metadata.get(DIGEST) == digest(document):
        kept = varying_cells(cells, measured_cells(cells))
    else:
        time = min(SECONDS, key=lambda time: abs(time - seconds))
        row = rf"(\({path.name}\) \| )\d+( s \|)"
        FIRST_PAGE.write_text(re.sub(row, rf"\g<1>{time}\2", FIRST_PAGE.read_text()))
    for k, (cell, again) in enumerate(zip(cells, code_cells(executed), strict=True)):
        outputs = stored_outputs(again.outputs)
        if k not in kept or forms(cell.outputs) != forms(outputs):
            cell.outputs = outputs
        cell.execution_count = None
    document.metadata[DIGEST] = digest(document)
    nbformat.write(document, path)
    figures = (
        x.data["image/png"]
        for cell in cells
        for x in cell.outputs
        if "image/png" in x.get("data", ())
    )
    if figure := next(figures, None):
        PICTURES.mkdir(exist_ok=True)
        picture = small_png(base64.b64decode(figure), PICTURE_WIDTH)
        (PICTURES / f"{path.stem}.png").write_bytes(picture)
    return seconds


def main() -> None:
    """Store the outputs of the notebooks that the command line names, or of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="notebooks, such as 07_plan; all without")
    parser.add_argument("--measured", action="store_true", help="renew measured outputs too")
    arguments = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in arguments.names]
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        seconds = store(path, measured=arguments.measured)
        print(f"{path.stem}: {seconds:.0f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
