"""``rm-train report``: one HTML page about a run, and its plots as files.

Invariant: the page is self-contained, and the same run gives the same bytes.
"""

import tempfile
from pathlib import Path

from rm_train.run_directory import RunError, read_run, write_whole


def write_run_report(directory: Path, output: Path | None = None, *, text: bool = True) -> tuple[Path, list[Path]]:
    """Write the page (``RUN/report.html`` unless ``output`` names another file) and its plots into a folder beside it.

    Returns the page and the PNGs. ``text=False`` leaves out every word of prompts and answers. Raises RunError.
    """
    run = read_run(directory)
    try:
        from rm_train.report_page import page
        from rm_train.report_plots import plots
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise RunError("the report's plots need matplotlib (pip install 'betterthan[train]')") from None
    target = output or directory / "report.html"
    folder = target.with_suffix("")
    if folder == target or target.is_dir():
        raise RunError(f"{target}: is no name for a page; end it in .html (plots go into a folder of its name)")
    made = list(plots(run))
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, _, png in made:
        picture = folder / f"{name}.png"
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(png)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(picture)
        pictures.append(picture)
    write_whole(target, page(run, made, text=text))
    return target, pictures
