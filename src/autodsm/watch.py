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
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line cut short by a kill
                self.rows.append(json.loads(line))
        self.rows = [row for row in self.rows if row["step"] <= step]
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
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} steps/s"),
        TimeRemainingColumn(),
    )
    began, first = time.monotonic(), done
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps, completed=done, loss="…", rate="…")

        def report(done: int, loss: float) -> None:
            rate = (done - first) / max(time.monotonic() - began, 1e-9)
            bar.update(task, completed=done, loss=f"{loss:.4g}", rate=f"{rate:.0f}")

        yield report
