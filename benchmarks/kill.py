"""Trainings that are stopped by signals at random moments: do they end with the parameters of one that never was?

    python benchmarks/kill.py --signals 20 --out kill.json

A tiny training in a folder is a process of its own. It gets SIGINT, SIGTERM or SIGKILL while it starts, while it
trains, or while it saves a checkpoint, is started again, and so on until it is finished. Its parameters are then
compared, bit for bit, with those of a training without signals. A signal has lost something when the newest whole
checkpoint is earlier after it than before, or when the folder cannot be gone on with. The exit code says whether any
was lost or any run differs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

STEPS, EVERY = 4000, 200
"""Of a training, and from one checkpoint to the next: seconds of training, a tenth of them in `save`."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL)
"""SIGKILL twice as often: it is the one that nothing can be done about."""
MOMENTS = ("start", "training", "training", "saving", "saving")
LIMIT = 300.0
"""Seconds for a child to come to an end, or to the moment of its signal."""


def train(folder: Path) -> None:
    """The training, and its parameters in `parameters.npz` when it is finished."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autodsm as ad

    process = ad.Process(lambda y, t: -y + jnp.sin(y), 0.7, t1=1.0)
    network = ad.network.MLP((2,), ad.Clock(process), key=jax.random.key(1), width=8, depth=1)
    starts = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    model = ad.fit(
        process, starts, key=jax.random.key(0), objective=ad.LocalDSM(process, schedule=ad.FromZero()),
        network=network, steps=STEPS, batch_size=8, out=folder / "run", checkpoint_every=EVERY, progress=False,
    )  # fmt: skip
    leaves = jax.tree.leaves((model.score, model.last))
    arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    arrays["losses"] = np.array([row["loss"] for row in model.history])
    np.savez(folder / "parameters.npz", **arrays)  # pyright: ignore[reportArgumentType]


class Sent(NamedTuple):
    """A signal, and what became of the run."""

    signal: str
    moment: str
    before: int
    """The step of the newest whole checkpoint."""
    after: int


def newest(folder: Path) -> int:
    """The step of the newest checkpoint whose files are what their sums say."""
    from autodsm.run.checkpoint import Checkpoints, _damage

    folders = reversed(Checkpoints(folder / "run" / "checkpoints")._folders())
    return next((int(path.name.rstrip("+")) for path in folders if not _damage(path)), 0)


def start(folder: Path, cache: Path) -> subprocess.Popen:
    kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, __file__, "--child", str(folder)]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(command, env={**os.environ, **kept}, stdout=log, stderr=log)


def strike(child: subprocess.Popen, folder: Path, rng: random.Random, moments=MOMENTS) -> Sent | None:
    """Send a signal at one of the moments; None if the child was finished before."""
    moment, number = rng.choice(moments), rng.choice(SIGNALS)
    rows = folder / "run" / "metrics.jsonl"
    size, began = (rows.stat().st_size if rows.exists() else 0), time.monotonic()
    if moment == "start":
        time.sleep(rng.uniform(0.2, 6.0))
    else:
        while child.poll() is None and not (rows.exists() and rows.stat().st_size > size):
            _patience(began)
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 2.0))
    if moment == "saving":
        saving = folder / "run" / "checkpoints" / "tmp-new"
        while child.poll() is None and not saving.exists():
            _patience(began)
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.05))
    before = newest(folder)
    if child.poll() is not None:
        return None
    child.send_signal(number)
    child.wait(LIMIT)
    return Sent(number.name, moment, before, newest(folder))


def _patience(began: float) -> None:
    if time.monotonic() - began > LIMIT:
        raise TimeoutError(f"a training did not begin within {LIMIT:g} s; see log.txt in its folder.")


def same(first: Path, second: Path) -> bool:
    """True when two finished trainings have the same parameters and losses, bit for bit."""
    import numpy as np

    with np.load(first / "parameters.npz") as a, np.load(second / "parameters.npz") as b:
        return set(a) == set(b) and all(a[name].tobytes() == b[name].tobytes() for name in a)


def main(
    signals: int = 20,
    seed: int = 0,
    moment: Literal["any", "start", "training", "saving"] = "any",
    out: Path | None = None,
    child: Path | None = None,
) -> int:
    """See the head of this file; `moment` is where all signals are to come."""
    if child is not None:
        train(child)
        return 0
    rng, sent, runs, equal, lost = random.Random(seed), [], 0, 0, 0
    moments = MOMENTS if moment == "any" else (moment,)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        whole.mkdir()
        if start(whole, Path(place) / "cache").wait(LIMIT):
            raise RuntimeError((whole / "log.txt").read_text()[-2000:])
        while len(sent) < signals:
            folder = Path(place) / str(runs)
            folder.mkdir()
            runs += 1
            code, patience = 1, rng.randint(1, 4)  # signals for this run
            while code:
                process = start(folder, Path(place) / "cache")
                given = strike(process, folder, rng, moments) if patience and len(sent) < signals else None
                patience -= 1
                if given is not None:
                    sent.append(given)
                    lost += given.after < given.before
                    print(f"{len(sent)}/{signals}", *given, flush=True)
                    # A signal that came when all was done leaves a finished training.
                    code = int(not (folder / "parameters.npz").exists())
                elif code := process.wait(LIMIT):
                    print((folder / "log.txt").read_text()[-2000:])
                    lost += 1
                    break
            equal += not code and same(whole, folder)
    summary = {"seed": seed, "moment": moment, "signals": len(sent), "runs": runs, "equal": equal, "lost": lost}
    if out is not None:
        every = [one._asdict() for one in sent]
        out.write_text(json.dumps({**summary, "sent": every}, indent=1) + "\n")
    print(summary)
    return int(equal < runs or lost > 0)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
