"""What is seen and heard of a run while it goes on: its metrics file, its progress bar, signals that stop it."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Metrics:
    """The rows of a run, and the file they are in, one line of JSON each; with no file, the rows alone."""

    def __init__(self, path: Path | None, step: int):
        """Rows up to `step` are kept; later ones, of steps that will be taken again, leave the file too."""
        self.path, self.rows = path, []
        if path is None or not path.exists():
            return
        self.rows = [row for row in read_rows(path) if row["step"] <= step]
        whole = "".join(json.dumps(row) + "\n" for row in self.rows)
        if whole != path.read_text(errors="replace"):
            partial = path.with_suffix(".tmp")
            partial.write_text(whole)
            partial.replace(path)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics file, but for a last line that a kill cut short."""
    lines = path.read_text(errors="replace").splitlines()
    rows = [_row(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        at = rows.index(None)
        raise ValueError(
            f"{path} is damaged: line {at + 1} is no row of metrics, {lines[at][:40]!r}. Remove this line, or "
            "restore the file from a backup. The trained weights are in the checkpoints, and are not affected."
        )
    return [row for row in rows if row is not None]


def _row(line: str) -> dict | None:
    """A row with the numbers that every row has, or None."""
    with contextlib.suppress(json.JSONDecodeError):
        row = json.loads(line)
        names = ("step", "loss", "steps_per_s")
        if isinstance(row, dict) and all(isinstance(row.get(name), int | float) for name in names):
            return row
    return None


@contextlib.contextmanager
def interruption(*, enabled: bool) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set while the block runs; a second one acts at once."""
    event = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield event
        return

    def on_signal(number, frame):
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():  # None: one that Python did not install, and cannot put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def announce(text: str, *, shown: bool) -> None:
    """A line about what begins and takes long."""
    if shown:
        print(text, flush=True)


@contextlib.contextmanager
def progress_bar(steps: int, shown: bool, done: int) -> Iterator[Callable[[int, float], None]]:
    """A function that shows the step and the loss."""
    if not shown:
        yield lambda done, loss: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    began, first = time.monotonic(), done
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps, completed=done, state="compiling …")

        def report(done: int, loss: float) -> None:
            rate = (done - first) / max(time.monotonic() - began, 1e-9)
            bar.update(task, completed=done, state=f"loss {loss:.4g} {rate:.0f} steps/s")

        yield report
