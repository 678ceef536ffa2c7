"""Check `make notebook`, timelines and the widget in JupyterLab and nbconvert; write screenshots.

JupyterLab is that of the extra ``notebook``, which ``make notebook`` installs:

    .venv/bin/python -m pip install -c constraints.txt -e '.[notebook]'
    .venv/bin/python tests/helpers/jupyterlab_check.py .venv/bin/jupyter

It prints a line for each check, and exits with 1 if one fails. It needs Chromium and half a minute.
Screenshots: ``jupyterlab_menu.png``, ``jupyterlab_first_look.png``, ``jupyterlab.png``,
``jupyterlab_widget.png``, ``jupyterlab_untrusted.png``, ``nbconvert.png`` and ``vscode_rules.png``
in ``results/page/``. No VS Code is involved: the last
one shows the output in a document with the rules of its notebooks. The file is longer than 300
lines, as each notebook needs its own steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from notebook_hosts import VS_CODE, framed_html
from playwright.sync_api import Browser, Frame, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results" / "page"
TOKEN = "check"
SIZE = {"width": 1280, "height": 800}
TIMEOUT = 180_000  # milliseconds: a busy machine takes two minutes to show the first page
#: Settings of JupyterLab: no messages of news, and notebooks of the repository stay as they are.
SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "docmanager-extension/plugin": '{"autosave": false}',
}
CELLS = (
    """import pipesim as ps
from pipesim.plot.widget.make_widget import widget
graph = ps.lower(ps.schedule("1f1b", n_devices=4, n_microbatches=8))
costs = ps.Costs(forward=1e-3, backward=2e-3, activation_bytes=1e6)
timeline = ps.simulate(graph, costs)
timeline""",
    """noise = ps.Noise(task=ps.simulation.LogNormal(0.1), seed=1)
ps.Comparison(timeline, ps.simulate(graph, costs, noise=noise))""",
    """view = widget(timeline, layout="steps", height=360)
view""",
    """import time
for step in range(60):
    view.append(ps.simulate(graph, ps.Costs(1e-3 * (1 + step / 30), 2e-3)))
    time.sleep(0.05)""",
    """print(view.version, view.selection.get("action"), list(view.chain().index)[-1:])
view.selected_tasks()""",
)


class Lab(NamedTuple):
    """A running JupyterLab: its address, folder, and Chromium."""

    url: str
    folder: Path
    browser: Browser


class Checks:
    """Prints checks, and counts those that failed."""

    def __init__(self) -> None:
        self.n_failed = 0

    def __call__(self, name: str, holds: object, detail: object = "") -> None:
        """Print one check."""
        self.n_failed += not holds
        print(f"{'ok     ' if holds else 'FAILED '} {name}{f': {detail}' if detail else ''}")


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return the value of a condition as soon as it is true, or its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


@contextmanager
def running_lab(
    folder: Path, command: Callable[[list[str]], Sequence[str | Path]]
) -> Iterator[str]:
    """Run the command of JupyterLab's options, with settings in a folder; give the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    homes = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    home = {f"JUPYTER_{name}": str(folder / ".jupyter" / name) for name in homes}
    home["JUPYTERLAB_SETTINGS_DIR"] = str(folder / ".jupyter" / "settings")
    for name, text in SETTINGS.items():
        path = folder / ".jupyter" / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    options = [
        "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
        f"--IdentityProvider.token={TOKEN}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command(options),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **home},
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        assert until(lambda: answers(f"{url}/api/status?token={TOKEN}"), 120), (
            "JupyterLab does not run"
        )
        yield url
    finally:
        end_kernels(url)
        os.killpg(process.pid, signal.SIGTERM)  # the server too, which make starts
        process.wait(30)


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def end_kernels(url: str) -> None:
    """End the kernels of all notebooks, and with them what widgets show."""
    with urllib.request.urlopen(f"{url}/api/sessions?token={TOKEN}") as answer:
        sessions = json.load(answer)
    for session in sessions:
        address = f"{url}/api/sessions/{session['id']}?token={TOKEN}"
        urllib.request.urlopen(urllib.request.Request(address, method="DELETE"))


def write_notebook(path: Path) -> None:
    """Write the notebook, without outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, path)


@contextmanager
def opened(lab: Lab, path: str, checks: Checks) -> Iterator[Page]:
    """Open a path of JupyterLab that shows a notebook; errors of its page fail a check."""
    page = lab.browser.new_page(viewport=SIZE)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{lab.url}/{path}?token={TOKEN}&reset", timeout=TIMEOUT)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=TIMEOUT)
    page.locator("text=/ipykernel.*Idle/").first.wait_for(timeout=TIMEOUT)
    yield page
    checks("no errors in the page", not errors, errors[:3] or "")
    page.close()


def frames_of(page: Page) -> list[Frame]:
    """Return the frames of timelines."""
    page.evaluate("0")  # its answer comes after events of new frames
    return [frame for frame in page.frames if frame.url == "about:srcdoc"]


def state_of(frame: Frame) -> dict[str, Any]:
    """Return what a frame shows."""
    frame.locator(":root").evaluate("() => new Promise(requestAnimationFrame)")
    state: dict[str, Any] = frame.locator(":root").evaluate("() => pipesimPage.describe()")
    return state


def run_cells(page: Page) -> None:
    """Run all cells, and wait for the last one."""
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
    prompt = page.locator(".jp-Cell .jp-InputPrompt").last
    until(lambda: prompt.inner_text().strip().strip("[]:").isdigit(), 60)
    page.locator(".jp-WindowedPanel-outer").first.evaluate("(panel) => panel.scrollTo(0, 0)")


def keeps_cells(page: Page) -> bool:
    """Press letters that are commands of JupyterLab; return whether they change nothing.

    They cut, insert, and delete cells, make them Markdown, and restart the kernel.
    """
    cells = page.locator(".jp-Notebook .jp-Cell")
    before = cells.count()
    for key in ("x", "b", "m", "a", "d", "d", "c", "0", "0"):
        page.keyboard.press(key)
    return cells.count() == before and not page.locator(".jp-Dialog").count()


def span(frame: Frame) -> float:
    """Return the time that a frame shows."""
    state = state_of(frame)
    return float(state["to"] - state["from"])


def scrolled(page: Page) -> float:
    """Return how far the notebook is scrolled."""
    panel = page.locator(".jp-WindowedPanel-outer").first
    return float(panel.evaluate("(panel) => panel.scrollTop"))


def scroll_back(page: Page) -> None:
    """Scroll the notebook to its beginning."""
    page.locator(".jp-WindowedPanel-outer").first.evaluate("(panel) => panel.scrollTo(0, 0)")
    until(lambda: scrolled(page) == 0, 3)


def check_frames(page: Page, checks: Checks) -> None:
    """Check a timeline in its frame."""
    frames = frames_of(page)
    checks("a timeline and a comparison have frames", len(frames) == 2)
    frame = frames[0]
    box = frame.locator("canvas").first.bounding_box()
    assert box is not None
    place = box["x"] + 130, box["y"] + 120
    page.mouse.move(*place)
    checks("pointing at a task", "forward" in frame.locator(".tip").inner_text())
    check_wheel(page, frame, place, checks)
    page.keyboard.press("0")
    page.mouse.click(*place)
    checks("a click selects a task", until(lambda: state_of(frame)["selected"], 3))
    checks("letters in the frame are no commands of JupyterLab", keeps_cells(page))
    page.locator(".jp-Cell .jp-InputPrompt").first.click()
    page.mouse.move(*place)
    after_click = until(lambda: page.mouse.wheel(0, 80) or scrolled(page) > 0, 3)
    checks("the wheel scrolls again after a click elsewhere", after_click)
    scroll_back(page)
    check_export(page, frame, checks)


def check_wheel(page: Page, frame: Frame, place: tuple[float, float], checks: Checks) -> None:
    """Check that the wheel scrolls the notebook, and zooms with Ctrl."""
    whole = span(frame)
    page.mouse.wheel(0, 80)
    has_scrolled = until(lambda: scrolled(page) > 0, 3)
    checks("the wheel scrolls the notebook", has_scrolled and span(frame) == whole)
    scroll_back(page)
    page.mouse.move(*place)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -80)
    page.keyboard.up("Control")
    checks("with Ctrl it zooms", until(lambda: span(frame) < whole, 3))


def check_export(page: Page, frame: Frame, checks: Checks) -> None:
    """Check that a sandboxed frame gives files."""
    frame.locator("#details").click()
    frame.locator("#tab-export").click()
    for kind in ("svg", "png", "csv"):
        with page.expect_download() as download:
            frame.locator(f"#save-{kind}").click()
        checks(f"export of {kind}", not download.value.failure(), download.value.suggested_filename)
    frame.locator("#details").click()


def check_widget(page: Page, lab: Lab, checks: Checks) -> None:
    """Check the widget: appended steps, selection, keys."""
    host = page.locator(".jp-OutputArea-output canvas").first
    host.scroll_into_view_if_needed()
    step = page.locator(".jp-OutputArea-output .banner span").first
    checks("the loop's last step is shown", until(lambda: step.inner_text() == "step 61", 10))
    box = host.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 100, box["y"] + 90)
    checks("letters in the widget are no commands of JupyterLab", keeps_cells(page))
    page.screenshot(path=OUT / "jupyterlab_widget.png")
    path = lab.folder / "check.ipynb"
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    checks("Ctrl+S in the widget saves", until(lambda: path.stat().st_mtime_ns > before, 10))
    page.locator(".jp-Cell").last.click()
    page.keyboard.press("Control+Enter")
    printed = page.locator(".jp-Cell").last.locator(".jp-OutputArea-output")
    until(lambda: printed.count() == 2 and "None" not in printed.first.inner_text(), 10)
    version, action, chain = printed.first.inner_text().split()
    checks("Python has the selected task", action == "0F0" and chain == "[0]", action)
    checks("60 appended steps are few updates", int(version) < 30, f"{version} updates")


def choose_theme(page: Page, name: str) -> None:
    """Choose a theme of JupyterLab."""
    page.click(".lm-MenuBar-itemLabel:text-is('Settings')")
    page.hover("text=Theme")
    with page.expect_response(lambda answer: answer.request.method == "PUT"):  # it is saved
        page.click(f"text=JupyterLab {name}")
    is_light = str(name == "Light").lower()
    page.wait_for_function(f"document.body.dataset.jpThemeLight === '{is_light}'")


def check_reopened(lab: Lab, checks: Checks) -> None:
    """Check the saved notebook: trusted, dark, and as another file, which is not trusted."""
    path = lab.folder / "check.ipynb"
    notebook = json.loads(path.read_text())
    sizes = [
        sum(len(json.dumps(output)) for output in cell["outputs"]) for cell in notebook["cells"][:3]
    ]
    checks("size of the outputs (bytes)", sizes[0] < 200_000, sizes)
    with opened(lab, "lab/tree/check.ipynb", checks) as page:
        frames = until(lambda: len(frames_of(page)) == 2 and frames_of(page))
        checks("a reopened notebook has its frames", frames and state_of(frames[0])["rows"])
        choose_theme(page, "Dark")
    with opened(lab, "lab/tree/check.ipynb", checks) as page:
        frames = until(lambda: len(frames_of(page)) == 2 and frames_of(page))
        checks("frames are dark in a dark theme", state_of(frames[0])["theme"] == "dark")
        choose_theme(page, "Light")
    notebook["cells"][0]["source"] += ["\n# changed by another"]
    (lab.folder / "untrusted.ipynb").write_text(json.dumps(notebook))
    with opened(lab, "lab/tree/untrusted.ipynb", checks) as page:
        pictures = page.locator(".jp-OutputArea details img")
        until(lambda: pictures.count() == 2, 10)
        page.locator(".jp-OutputArea summary").first.click()
        checks(
            "an untrusted notebook has pictures and no frames",
            pictures.first.is_visible() and not frames_of(page),
        )
        page.screenshot(path=OUT / "jupyterlab_untrusted.png")


def check_make_notebook(jupyter: str, folder: Path, browser: Browser, checks: Checks) -> None:
    """Check the first page of `make notebook`, and a notebook that it lists, run to its end."""

    def command(options: list[str]) -> list[str | Path]:
        installed = "--old-file=.venv/.notebook-stamp"
        where = f"BIN={Path(jupyter).absolute().parent}"
        return ["make", "-C", ROOT, installed, "notebook", where, f"OPTIONS={' '.join(options)}"]

    with (
        running_lab(folder, command) as url,
        opened(Lab(url, folder, browser), "", checks) as page,
    ):
        table = page.locator(".jp-RenderedMarkdown table")
        links, pictures = table.locator("a"), table.locator("img")
        loaded = "(images) => images.filter((image) => image.naturalWidth > 0).length"
        n_listed = len(list((ROOT / "notebooks").glob("*.ipynb"))) - 1
        until(lambda: pictures.evaluate_all(loaded) == n_listed)
        counts = links.count(), pictures.evaluate_all(loaded)
        checks("the menu has a link and a picture a notebook", set(counts) == {n_listed}, counts)
        page.screenshot(path=OUT / "jupyterlab_menu.png")
        links.first.click()
        shown = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        until(lambda: shown.locator("h1").inner_text().startswith("First look"))
        run_cells(page)
        frames = until(lambda: frames_of(page))
        shown.locator("iframe").evaluate("(frame) => frame.scrollIntoView({ block: 'center' })")
        checks("a notebook that it lists shows its timeline", state_of(frames[0])["rows"])
        frames[0].locator("#search").fill("1B2")
        frames[0].locator("#search").press("Enter")
        checks("a search selects a task", until(lambda: state_of(frames[0])["selected"], 10))
        page.screenshot(path=OUT / "jupyterlab_first_look.png")


def check_nbconvert(jupyter: str, lab: Lab, checks: Checks) -> None:
    """Check exports: HTML that is offline, and LaTeX, which takes the picture."""
    convert = [jupyter, "nbconvert", "--log-level=ERROR", str(lab.folder / "check.ipynb"), "--to"]
    subprocess.run([*convert, "html"], check=True)
    context = lab.browser.new_context(offline=True, viewport=SIZE)
    page = context.new_page()
    page.goto((lab.folder / "check.html").as_uri())
    frames = until(lambda: len(frames_of(page)) == 2 and frames_of(page), 10)
    frames[0].locator("canvas").first.wait_for()
    box = page.locator("iframe").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 200, box["y"] + 190)
    checks("HTML by nbconvert works offline", state_of(frames[0])["selected"])
    page.screenshot(path=OUT / "nbconvert.png")
    context.close()
    code = (
        "import nbformat, sys; from nbconvert.preprocessors import ExtractOutputPreprocessor;"
        "from nbconvert.exporters import LatexExporter;"
        "types = LatexExporter().default_config['NbConvertBase']['display_data_priority'];"
        "data = nbformat.read(sys.argv[1], 4).cells[0].outputs[0].data;"
        "print(next(kind for kind in types if kind in data))"
    )
    python = str(Path(jupyter).parent / "python")
    command = [python, "-c", code, str(lab.folder / "check.ipynb")]
    chosen = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    checks("LaTeX by nbconvert takes the picture", chosen == "image/png", chosen)


def check_vs_code(lab: Lab, checks: Checks) -> None:
    """Check the output under the rules of VS Code's notebooks."""
    notebook = json.loads((lab.folder / "check.ipynb").read_text())
    html = "".join(notebook["cells"][1]["outputs"][0]["data"]["text/html"])
    path = lab.folder / "vscode_rules.html"
    path.write_text(framed_html(html, VS_CODE))
    page = lab.browser.new_page(viewport=SIZE)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.goto(path.as_uri())
    frame = until(lambda: len(page.frames) == 3 and page.frames[2])
    frame.locator("canvas").first.wait_for()
    box = frame.locator("canvas").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 200, box["y"] + 120)
    checks("under the rules of VS Code", state_of(frame)["rows"] and not errors, errors[:2] or "")
    page.screenshot(path=OUT / "vscode_rules.png")
    page.close()


def main() -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jupyter", help="the command jupyter of an environment with JupyterLab")
    jupyter, checks = parser.parse_args().jupyter, Checks()
    OUT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        sync_playwright() as playwright,
        running_lab(
            Path(name), lambda options: [jupyter, "lab", f"--ServerApp.root_dir={name}", *options]
        ) as url,
    ):
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        lab = Lab(url, Path(name), browser)
        write_notebook(lab.folder / "check.ipynb")
        with opened(lab, "lab/tree/check.ipynb", checks) as page:
            run_cells(page)
            until(lambda: len(frames_of(page)) == 2)
            page.screenshot(path=OUT / "jupyterlab.png")
            check_frames(page, checks)
            check_widget(page, lab, checks)
            page.keyboard.press("Control+s")
            time.sleep(2)
        end_kernels(url)
        check_reopened(lab, checks)
        check_nbconvert(jupyter, lab, checks)
        check_vs_code(lab, checks)
        check_make_notebook(jupyter, lab.folder / "make", browser, checks)
        browser.close()
    return int(checks.n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
