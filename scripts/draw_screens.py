"""Takes the pictures of screens in docs/: what a terminal and a browser show of real runs.

    python scripts/draw_screens.py preview        # docs/preview.png
    python scripts/draw_screens.py tensorboard runs/quickstart        # docs/tensorboard.png

`preview` runs `python -m llmx.data --preview` in a pseudo terminal; rich turns its colors into
HTML. `tensorboard` serves the event files below the folder of a run with TensorBoard (pip install
tensorboard). A Chromium without a window shows each page (apt-get install chromium), and its
picture is reduced to 256 colors.
"""

import argparse
import contextlib
import io
import os
import pathlib
import pty
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import PIL.Image
import PIL.ImageChops
import rich.console
import rich.terminal_theme
import rich.text

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PREVIEW = (
    "python", "-m", "llmx.data", "--preview", "6", "--source", "configs/quickstart_chat.jsonl",
    "--format", "chat", "--chat-template", "configs/quickstart_chat.jinja",
)  # fmt: skip
COLUMNS = 100
# Without smoothing, of the tags that have such names.
TAGS = "#scalars&_smoothingWeight=0&tagFilter=loss%7Cgrad_norm%7Clearning_rate"
BACKGROUND = (24, 24, 24)
GRAY, GREEN, LIGHT = (150, 150, 150), (120, 220, 90), (235, 235, 235)
# Of the eight colors and their bright forms; the preview has green and bright black.
THEME = rich.terminal_theme.TerminalTheme(
    BACKGROUND, LIGHT, [LIGHT, LIGHT, GREEN, *[LIGHT] * 5], [GRAY, *[LIGHT] * 7]
)
PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>body {{ background: {background};
color: {foreground}; margin: 18px; font: 18px/1.4 "DejaVu Sans Mono", monospace }}
pre {{ font: inherit; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }}
{stylesheet}</style><pre><code style="font: inherit">{code}</code></pre>"""


def main() -> None:
    """Takes one picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("preview", "tensorboard"))
    parser.add_argument("workdir", nargs="?", help="of the run, for tensorboard")
    options = parser.parse_args()
    if options.what == "preview":
        with tempfile.TemporaryDirectory() as scratch:
            page = pathlib.Path(scratch, "page.html")
            page.write_text(as_html(f"$ {' '.join(PREVIEW)}\n" + in_terminal(PREVIEW)))
            take(page.as_uri(), DOCS / "preview.png", height=720)
    elif not options.workdir:
        parser.error("tensorboard WORKDIR: name the work directory of a run")
    else:
        with served(pathlib.Path(options.workdir)) as url:
            take(f"{url}/{TAGS}", DOCS / "tensorboard.png", height=770)


def in_terminal(command: tuple[str, ...]) -> str:
    """What a command writes to a terminal."""
    parts = []

    def read(descriptor: int) -> bytes:
        parts.append(os.read(descriptor, 1 << 16))
        return parts[-1]

    code = pty.spawn([sys.executable, *command[1:]], read)
    if code:
        raise SystemExit(f"{' '.join(command)} has ended with status {code}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def as_html(text: str) -> str:
    """A page with the colors of a dark terminal."""
    console = rich.console.Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(rich.text.Text.from_ansi(text), soft_wrap=True)
    return console.export_html(theme=THEME, code_format=PAGE)


@contextlib.contextmanager
def served(workdir: pathlib.Path) -> Iterator[str]:
    """The address of a TensorBoard that shows the folder of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = ["--logdir", str(workdir.parent), "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *logs])
    try:
        deadline = time.monotonic() + 60
        while server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        time.sleep(5)  # until it has read the files
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def take(url: str, file: pathlib.Path, *, height: int) -> None:
    """A picture of a page, 1200 pixels wide."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        raw = pathlib.Path(scratch, "screen.png")
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={scratch}/profile", f"--window-size=1200,{height}",
             "--virtual-time-budget=20000", f"--screenshot={raw}", url],
            check=True, timeout=180, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        image = PIL.Image.open(raw).convert("RGB")
        empty = PIL.Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
        _, _, _, bottom = PIL.ImageChops.difference(image, empty).getbbox()
        image = image.crop((0, 0, image.width, min(image.height, bottom + 18)))
        image.quantize(256).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
