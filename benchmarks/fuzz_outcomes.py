"""What became of a case of `fuzz.py`: one of the outcomes, and a line about it."""

import ast
import functools
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autodsm

BAD = {"crash": 0, "hang": 1, "silent wrong": 2, "silent NaN": 3}
"""Outcomes of which there must be none, the worst first."""
OUTCOMES = ("right", "finite", "refused", "foreign", *reversed(BAD))
ROOT = Path(autodsm.__file__).parent
_LONG = 24
"""Characters of a text that is found in no other's messages by accident."""


def outcome_of(call: Callable[[], Any], check: Callable[[Any], str | None] | None, *, pointwise: bool) -> dict:
    """Run `call`, and say what became of it. `pointwise`: a NaN is the answer to the NaN that was asked for."""
    import jax

    try:
        result = jax.block_until_ready(call())
    except Exception as error:
        return of_error(error)
    if not pointwise and (where := not_finite(result)):
        return {"outcome": "silent NaN", "kind": "", "detail": where}
    if check is None:
        return {"outcome": "finite", "kind": "", "detail": ""}
    wrong = check(result)
    return {"outcome": "silent wrong" if wrong else "right", "kind": "", "detail": wrong or ""}


def of_error(error: Exception) -> dict:
    where = traceback.extract_tb(error.__traceback__)[-1]
    kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
    text = " ".join(str(error).split())[:300]
    return {"outcome": "refused" if is_refusal(error) else "foreign", "kind": kind, "detail": f"{kind}: {text}"}


def is_refusal(error: BaseException) -> bool:
    """True for an error that a `raise` of the library raised, or whose text, in a compiled function, is its own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    if not frames or not str(error):
        return False
    file = Path(frames[-1].f_code.co_filename)
    if file.is_relative_to(ROOT) and any(first <= lines[-1] <= last for first, last in _raises(file)):
        return True
    return "RuntimeError" in type(error).__name__ and any(text in str(error) for text in _texts())


@functools.cache
def _raises(file: Path) -> tuple[tuple[int, int], ...]:
    """First and last lines of the `raise` statements of a file."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in nodes if isinstance(node, ast.Raise))


@functools.cache
def _texts() -> tuple[str, ...]:
    """Long pieces of text in the library's functions, of which messages are made; no docstrings."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose:
                found += [node.value.strip()] * (len(node.value.strip()) >= _LONG)
    return tuple(found)


def not_finite(result: Any) -> str:
    """Which part of a result holds a NaN or an infinity, as text; empty if none does."""
    import jax
    import numpy as np

    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if isinstance(leaf, float | complex | np.ndarray | np.number | jax.Array):
            array = np.asarray(leaf)
            if array.dtype.kind in "fc" and not np.all(np.isfinite(array)):
                bad = int(np.sum(~np.isfinite(array)))
                return f"result{jax.tree_util.keystr(path)}: {bad} of {array.size} numbers are not finite"
    return ""


def run_case(seed: int, number: int) -> dict:
    """One case, with its outcome, as a row for a file."""
    began = time.monotonic()
    try:
        case = _case(seed, number)
    except Exception as error:  # a case takes processes and marginals from the library too
        about, found = {"case": number, "name": "making a case", "call": ""}, of_error(error)
    else:
        about = {"case": number, "name": case.name, "call": str(case)}
        pointwise = case.pointwise and case.mutated is not None
        found = outcome_of(lambda: case.call(**case.arguments), case.check, pointwise=pointwise)
    return {**about, **found, "seconds": round(time.monotonic() - began, 2)}


def show_case(seed: int, number: int) -> int:
    """One case in this process, with the traceback of what is raised."""
    case = _case(seed, number)
    print(case)
    try:
        print(case.call(**case.arguments))
    except Exception:
        traceback.print_exc()
    found = run_case(seed, number)
    print(f"\n{found['outcome']}: {found['detail']}")
    return int(found["outcome"] in BAD)


def _case(seed: int, number: int):
    import fuzz_forward  # noqa: F401
    import fuzz_learning  # noqa: F401
    import fuzz_uses  # noqa: F401
    from fuzz_cases import make

    return make(seed, number)
