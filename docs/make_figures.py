"""Runs the commands of the README's first run; writes their output, shortened, and the picture.

    python docs/make_figures.py

Leave the machine alone meanwhile: the speed it prints is in the README afterwards.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs/images/cartpole.png"
COMMAND = Path(sys.executable).with_name("paceline")
BLOCK = re.compile(r"(<!-- example: made by docs/make_figures.py -->\n```console\n)(.*?)(```\n)", re.DOTALL)
SECONDS = 300
WIDTH, COLOURS = 1400, 256  # enough for a few curves, in a third of the bytes


def main() -> None:
    text = README.read_text(encoding="utf-8")
    block = BLOCK.search(text)
    if block is None:
        sys.exit("README.md has no block of the first run")
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for command in re.findall(r"^\$ (.*)$", block[2], re.MULTILINE):
            words = shlex.split(command)
            done = subprocess.run(
                [COMMAND, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            if words[0] != "paceline" or done.returncode:
                sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr}")
            shown += [f"$ {command}", *shorten(done.stdout.splitlines())]
            if words[1] == "plot":
                shrink(Path(folder, words[-1]), PICTURE)
    README.write_text(text[: block.start(2)] + "\n".join([*shown, ""]) + text[block.end(2) :], encoding="utf-8")


def shorten(lines: list[str]) -> list[str]:
    """All but the middle: the first two iterations, the last two lines of progress."""
    progress = [number for number, line in enumerate(lines) if line.startswith(("Iteration", "Evaluation"))]
    return [*lines[: progress[2]], "…", *lines[progress[-2] :]] if len(progress) > 4 else lines


def shrink(source: Path, target: Path) -> None:
    with Image.open(source) as image:
        height = round(image.height * WIDTH / image.width)
        small = image.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
    target.parent.mkdir(exist_ok=True)
    small.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    main()
