"""Take the README's pictures of the server's page: ``python scripts/screenshots.py CHECKPOINT`` writes docs/images/.

Starts ``rm-server`` on the checkpoint, drives Debian's Chromium through Playwright, and looks at every page 390 pixels
wide as well: nothing may stick out to the side. ``--narrow DIR`` keeps those pictures too.

Invariant: a page that reports an error or is wider than its window, or whose tables are cut off, fails the script.
"""

import argparse
import base64
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
READY = "rm-server ready on "
MAX_BYTES = 250_000
MAX_HEIGHT = 1800
"""A long page's picture ends with the last card that is above this."""
_HEIGHT = """most => {
  const cards = [...document.querySelectorAll("main > section:not([hidden]) .card")];
  const bottoms = cards.map(card => card.getBoundingClientRect().bottom + scrollY);
  return Math.ceil(16 + Math.max(...bottoms.filter(bottom => bottom + 16 <= most)));
}"""
_CUT_TABLES = '[...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth).length'
PAGES: dict[str, Literal["light", "dark"]] = {"playground": "light", "checkpoint": "light", "live": "dark"}
QUESTION = "I can't concentrate while studying."
ANSWERS = [
    "Work in blocks of twenty-five minutes and take a short break after each. Put your phone in another room.",
    "Sprinkle baking soda inside, leave it overnight, and tap it out in the morning. Put your phone in another room.",
]
WORDS = ("work", "break", "phone", "morning", "room", "short", "often", "never", "because", "perhaps", "quiet", "desk")


def main() -> int:
    arguments = _arguments()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("screenshots: error: no chromium on the PATH (Debian: apt-get install chromium)", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    with _server(arguments.checkpoint) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        problems: list[str] = []
        for width, height, folder in ((1280, 1000, arguments.out), (390, 844, arguments.narrow)):
            for name, scheme in PAGES.items():
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
                page.on("pageerror", lambda error: problems.append(str(error)))
                problems.extend(_take(page, url, name, width, folder))
                context.close()
        browser.close()
    for problem in problems:
        print(f"screenshots: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Take the pictures of the server's page for the README.")
    parser.add_argument("checkpoint", help="what to serve")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="default: docs/images")
    parser.add_argument("--narrow", type=Path, help="also keep the pictures 390 pixels wide, in this folder")
    return parser.parse_args()


def _take(page: Any, url: str, name: str, width: int, folder: Path | None) -> list[str]:
    """Show a page with something on it; returns what is wrong with it."""
    state = {"mode": "chat", "turns": [{"role": "user", "text": QUESTION}], "answers": [{"text": a} for a in ANSWERS]}
    encoded = base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    page.goto(f"{url}/#playground={encoded}" if name == "playground" else f"{url}/#{name}")
    if name == "playground":
        page.get_by_role("button", name="Score", exact=True).click()
        page.wait_for_selector("#heat .heat")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    elif name == "live":
        page.wait_for_selector("text=Following the server.")
        _load(url)
        page.wait_for_timeout(1500)
    else:
        page.wait_for_selector("#page-checkpoint .chart, #page-checkpoint .card")
        page.wait_for_timeout(300)
    problems = []
    reach = page.evaluate("document.documentElement.scrollWidth")
    if reach > width:
        problems.append(f"{name}: is {reach} pixels wide in a window of {width}")
    if cut := page.evaluate(_CUT_TABLES):
        problems.append(f"{name}: {cut} tables are cut off at {width} pixels")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        height = page.evaluate(_HEIGHT, MAX_HEIGHT if width > 390 else 20_000)
        clip = {"x": 0, "y": 0, "width": width, "height": height}
        page.screenshot(path=path, full_page=True, clip=clip)
        # Flat colours: a palette does, at a third of the bytes.
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        if path.stat().st_size > MAX_BYTES and width > 390:
            problems.append(f"{path}: {path.stat().st_size} bytes are over the limit of {MAX_BYTES}")
    return problems


def _load(url: str) -> None:
    """Some seconds of groups, so that the lines of the live page have something to show."""
    generator = random.Random(0)

    def group() -> dict[str, Any]:
        answers = [" ".join(generator.choices(WORDS, k=generator.randint(5, 60))) + "." for _ in range(6)]
        answers.append(generator.choice(ANSWERS))
        return {"prompt": [{"role": "user", "content": QUESTION}], "completions": answers}

    def work() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            for _ in range(12):
                client.post("/score", json=group())

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    httpx.post(f"{url}/score", json={"texts": ["x"], "reward_id": "sha256:another"})


@contextmanager
def _server(checkpoint: str) -> Iterator[str]:
    command = [str(Path(sys.executable).with_name("rm-server")), checkpoint, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith(READY)), None)
        if line is None:
            raise SystemExit(f"screenshots: error: rm-server did not start (exit {process.wait()})")
        yield line.removeprefix(READY).strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
