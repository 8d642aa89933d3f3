"""Files of models that were cut, flipped, or made to do harm: is each refused, or read as what was saved?

    python benchmarks/hostile.py --tries 1000 --out hostile.json

A third of the tries cut a good file, a third flip bits of it, and a third change its contents and pack them again, so
that no checksum tells: other values in its document, entries of other names, arrays of other shapes and dtypes, huge
sizes, compressed entries. A try fails where the outcome is neither an error of the library nor a model whose scores are
those that were saved, where it takes more memory than twice the file and a fixed room, or where a file appears. A
changed value may make another model, such as one with another key of its training: that counts as read.
"""

import io
import json
import sys
import tempfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import autodsm as ad

MODEL = Path(__file__).parents[1] / "tests" / "learn" / "kept" / "model-1.autodsm"
ROOM = 32 << 20
"""Bytes beside twice the file: what JAX keeps of a network that it traces."""
VALUES = (None, True, -1, 10**12, 1e308, "x", "../../x", [], {}, [0] * 50, {"array": 0}, {"part": "MLP", "fields": {}})


def cut(content: bytes, rng) -> bytes:
    return content[: rng.integers(len(content))]


def flip(content: bytes, rng) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        changed[rng.integers(len(changed))] ^= 1 << rng.integers(8)
    return bytes(changed)


def repack(content: bytes, rng) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    arrays = [name for name in entries if name.startswith("arrays/")]
    name, kind, compression = arrays[rng.integers(len(arrays))], rng.integers(8), zipfile.ZIP_STORED
    if kind <= 2:
        document = json.loads(entries["document.json"])
        spoil(document, rng)
        entries["document.json"] = json.dumps(document).encode()
    elif kind == 3:
        entries[("/tmp/x", "../x.npy", "arrays/../../x", "C:\\x", "arrays/99.npy")[rng.integers(5)]] = entries[name]
    elif kind == 4:
        entries[name] = packed(np.zeros(rng.integers(0, 6, size=2), ("f4", "f8", "i8", "U3", "c8")[rng.integers(5)]))
    elif kind == 5:
        size = 10 ** int(rng.integers(6, 18))
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size},)}}".ljust(117) + "\n"
        entries[name] = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)
    elif kind == 6:
        entries[name] = packed(np.zeros(10_000_000, np.float32))
        compression = zipfile.ZIP_DEFLATED
    else:
        entries[name] = packed(np.array([{"a": 1}], object))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for each, data in entries.items():
            archive.writestr(each, data)
    return made.getvalue()


def packed(array: np.ndarray) -> bytes:
    stored = io.BytesIO()
    np.save(stored, array, allow_pickle=True)
    return stored.getvalue()


def spoil(node, rng) -> None:
    """Put another value at a random place of a document, or take one away."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[rng.integers(len(keys))]
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.9:
            node = node[key]
        elif rng.random() < 0.2:
            del node[key]
            return
        else:
            node[key] = VALUES[rng.integers(len(VALUES))]
            return


def main(tries: int = 1000, seed: int = 0, model: Path = MODEL, out: Path | None = None) -> int:
    """See the head of this file."""
    rng, content = np.random.default_rng(seed), model.read_bytes()
    y, t = jnp.full(ad.load(model).shape, 0.3), 0.7
    wanted = np.asarray(ad.load(model).score(y, t))
    counts = {"refused": 0, "read as it was": 0, "read as another": 0, "failed": 0}
    failures, most = [], 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "room" / "model.autodsm"
        file.parent.mkdir()
        for i in range(tries):
            make = (cut, flip, repack)[i % 3]
            file.write_bytes(make(content, rng))
            tracemalloc.start()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = np.asarray(ad.load(file).score(y, t))
                equal = found.shape == wanted.shape and np.array_equal(found, wanted)
                outcome = "read as it was" if equal else "read as another"
                if make is not repack and not equal:
                    outcome = "failed"
                    failures.append(f"{i}: {make.__name__}: other scores")
            except ValueError as error:
                outcome = "refused"
                if str(file) not in str(error):
                    outcome = "failed"
                    failures.append(f"{i}: {make.__name__}: {error}")
            except Exception as error:
                outcome = "failed"
                failures.append(f"{i}: {make.__name__}: {type(error).__name__}: {error}")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            most = max(most, peak - 2 * file.stat().st_size)
            if most > ROOM:
                failures.append(f"{i}: {make.__name__}: {peak} bytes")
            if {path.name for path in Path(folder).rglob("*")} != {"room", file.name}:
                failures.append(f"{i}: {make.__name__}: a file appeared")
            counts[outcome] += 1
            if i % 50 == 0:
                jax.clear_caches()
    result = {"tries": tries, "seed": seed, **counts, "bytes beside twice the file": most, "failures": failures}
    text = json.dumps(result, indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
