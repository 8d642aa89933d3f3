"""Random calls of every public function: is what comes back right, or refused by name?

    python benchmarks/fuzz.py --cases 2000 --seed 0 --out fuzz.json      # started again, it goes on
    python benchmarks/fuzz.py --only 137 --seed 0                        # one case here, with its traceback

Outcomes: "right", as an exact answer says; "finite", where none is known; "refused" by an error that the library
raises itself; "foreign", any other error; "silent NaN"; "silent wrong"; "hang", no end within the limit; "crash", the
process died. The exit code says whether there are hangs, crashes, silent answers, or too many foreign errors.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tyro
from fuzz_outcomes import BAD, OUTCOMES

FOREIGN = 0.01
"""The largest share of foreign errors."""
LIMIT = 240.0
"""Seconds of computing for one case; the slowest that ends, a training of a tabulated target, takes a third of it."""
PATIENCE = 10.0
"""Times the limit that a case may take by the clock: a machine with other work gives it a part of its cores, and what
waits forever computes nothing."""
LIFE = 120
"""Cases of one process: what it has compiled is forgotten with it."""


class Worker:
    """A process that runs cases, one after the other, and is started again where one did not end."""

    def __init__(self, seed: int):
        self.seed, self.count = seed, 0
        self.process: subprocess.Popen | None = None

    def run(self, number: int, limit: float) -> dict:
        if self.process is None or self.count >= LIFE:
            self.stop()
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.count += 1
        began = time.monotonic()
        try:
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
            line = self._answer(limit)
        except queue.Empty:
            line, outcome, detail = None, "hang", f"no end within {limit:g} s of computing"
        except BrokenPipeError:
            line, outcome, detail = None, "crash", "the process had died"
        else:
            outcome, detail = "crash", f"the process died, code {self.process.poll()}"
        if line:
            return json.loads(line)
        self.stop()
        return {"case": number, "outcome": outcome, "detail": detail, "seconds": time.monotonic() - began}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _start(self) -> None:
        command = [sys.executable, __file__, "--seed", str(self.seed), "--worker"]
        kept = {"JAX_TRACEBACK_FILTERING": "off", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **kept},
        )  # fmt: skip
        self.count = 0
        self.lines: queue.Queue = queue.Queue()
        threading.Thread(target=_read, args=(self.process.stdout, self.lines), daemon=True).start()
        if self._answer(LIMIT) != "ready\n":
            raise RuntimeError("a worker did not start; run one case with --only to see why.")

    def _answer(self, limit: float) -> str | None:
        """The next line of the process, or `queue.Empty` when it has computed or waited for too long."""
        assert self.process is not None
        began, before = time.monotonic(), computed(self.process.pid)
        while True:
            try:
                return self.lines.get(timeout=min(1.0, limit))
            except queue.Empty:
                waited, after = time.monotonic() - began, computed(self.process.pid)
                if waited > PATIENCE * limit or (after - before if after else waited) > limit:
                    raise


def computed(pid: int) -> float:
    """Seconds that a process has computed; 0 where the system does not say."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _read(stream: Any, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def serve(seed: int) -> None:
    """Cases by number from standard input, outcomes to standard output; what a case prints goes nowhere."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from fuzz_outcomes import run_case

    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        out.write(json.dumps(run_case(seed, int(line))) + "\n")
        out.flush()


def campaign(cases: list[int], seed: int, path: Path, *, workers: int, limit: float) -> dict[int, dict]:
    """Outcomes by case; those in the file are not run again."""
    found = _kept(path, seed)
    left = iter([number for number in cases if number not in found])
    lock, total = threading.Lock(), len(cases)
    with path.open("a") as file:

        def work():
            worker = Worker(seed)
            try:
                while (number := _next(left, lock)) is not None:
                    row = worker.run(number, limit)
                    with lock:
                        found[number] = row
                        file.write(json.dumps(row) + "\n")
                        file.flush()
                        if sys.stderr.isatty() or row["outcome"] in BAD:
                            done = sum(number in found for number in cases)
                            print(f"{done}/{total} case {number}: {row['outcome']}", file=sys.stderr)
            finally:
                worker.stop()

        threads = [threading.Thread(target=work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {number: found[number] for number in cases if number in found}


def _next(left, lock) -> int | None:
    with lock:
        return next(left, None)


def _kept(path: Path, seed: int) -> dict[int, dict]:
    """The rows of a file that was begun before, of the same seed and the same code."""
    from autodsm.app.report import code

    about = {"seed": seed, "code": code()}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about) + "\n")
        return {}
    first, *rows = path.read_text().splitlines()
    if json.loads(first) != about:
        raise SystemExit(f"{path} was begun with another seed or other code: remove it, or name another --out.")
    whole = [row for row in rows if row.endswith("}")]  # the last one was being written when the run was stopped
    path.write_text("".join(f"{line}\n" for line in (first, *whole)))
    return {row["case"]: row for row in map(json.loads, whole)}


def table(rows: dict[int, dict]) -> str:
    counts = Counter(row["outcome"] for row in rows.values())
    lines = [f"{name:>14} {counts[name]:5d}" for name in OUTCOMES]
    return "\n".join([*lines, f"{'cases':>14} {len(rows):5d}"])


def worst(rows: dict[int, dict], seed: int, most: int = 15) -> str:
    """The first of each kind of bad outcome: by function, and by what is wrong."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows.values():
        if row["outcome"] in BAD or row["outcome"] == "foreign":
            groups.setdefault((BAD.get(row["outcome"], 9), row.get("name"), row.get("kind")), []).append(row)
    order = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    lines = []
    for _, group in order[:most]:
        row = group[0]
        lines.append(f"{row['outcome']} ({len(group)}): {row.get('call', '')}\n    {row['detail']}")
        lines.append(f"    python benchmarks/fuzz.py --only {row['case']} --seed {seed}")
    return "\n".join(lines)


def main(
    cases: int = 2000,
    seed: int = 0,
    out: Path | None = None,
    trainings: int = 100,
    workers: int = 2,
    limit: float = LIMIT,
    only: int | None = None,
    worker: bool = False,
) -> int:
    """See the head of this file; `trainings` is how many of the cases may be calls of `fit`."""
    if worker:
        serve(seed)
        return 0
    if only is not None:
        from fuzz_outcomes import show_case

        return show_case(seed, only)
    from fuzz_cases import EVERY, is_training

    from autodsm.app.report import code
    from autodsm.run.folder import versions

    out = Path("runs") / f"fuzz-seed-{seed}.json" if out is None else out
    chosen = [number for number in range(cases) if not is_training(number) or number // EVERY < trainings]
    rows = campaign(chosen, seed, out.with_suffix(".jsonl"), workers=workers, limit=limit)
    counts = Counter(row["outcome"] for row in rows.values())
    summary = {"seed": seed, "cases": len(rows), "trainings": sum(map(is_training, rows)), "outcomes": dict(counts)}
    summary |= {"code": code(), "versions": versions()}
    summary["bad"] = [row for row in rows.values() if row["outcome"] in BAD or row["outcome"] == "foreign"]
    out.write_text(json.dumps(summary, indent=1) + "\n")
    print(table(rows), worst(rows, seed), f"Written: {out}", sep="\n\n")
    return int(any(counts[name] for name in BAD) or counts["foreign"] > FOREIGN * len(rows))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
