"""A file of arrays and one JSON document: a zip in which nothing is compressed, and nothing is pickled.

    document.json      {"format": 1, "library": {"autodsm": "0.1.0", …}, "arrays": [[dtype, shape], …], …}
    arrays/0.npy …     the arrays that the document refers to by their number

A reader trusts nothing. Entries must have these names, be stored as they are, and take no more bytes together than the
file; an array must have the dtype and the shape that the document names, and as many bytes. Entries are never written
anywhere, so that a path in a name has no meaning. Reading holds the file once, and one array more.
"""

import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .folder import versions

FORMAT = 1
"""Of the file. A release reads all formats up to its own."""
MAX_DOCUMENT = 1 << 22
"""Bytes of the document, at most: ten times those of the largest U-Net. As Python objects JSON is twenty times as
large, which bounds what a hostile document takes to 80 MB."""
DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "bfloat16", "float32", "float64"}
)
_DOCUMENT = "document.json"
_ARRAY = re.compile(r"arrays/(0|[1-9][0-9]{0,6})\.npy")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every entry, so that equal contents are equal files


class ArchiveError(ValueError):
    """A file that is no archive, is damaged, or was written by a later release."""


def write_archive(path: Path, document: dict[str, Any], arrays: list[np.ndarray]) -> None:
    """Whole, or not at all: under a temporary name, renamed when it is complete."""
    for array in arrays:
        if array.dtype.name not in DTYPES:
            raise TypeError(f"an array of dtype {array.dtype} cannot be saved; it must be of numbers.")
    table = [[array.dtype.name, list(array.shape)] for array in arrays]
    whole = {"format": FORMAT, "library": versions(), **document, "arrays": table}
    text = json.dumps(whole, allow_nan=False).encode()
    if len(text) > MAX_DOCUMENT:
        raise ValueError(f"the description of the model takes {len(text)} bytes, more than {MAX_DOCUMENT}.")
    partial = path.with_name(f".{path.name}.tmp")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as file:
        file.writestr(zipfile.ZipInfo(_DOCUMENT, _EPOCH), text)
        for i, array in enumerate(arrays):
            with file.open(
                zipfile.ZipInfo(f"arrays/{i}.npy", _EPOCH), "w", force_zip64=array.nbytes > 1 << 30
            ) as stored:
                np.lib.format.write_array(stored, _plain(array), allow_pickle=False)
    partial.replace(path)


def _plain(array: np.ndarray) -> np.ndarray:
    """In a dtype of numpy's own, contiguous."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # of a number it would make a vector
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def read_archive(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The document and its arrays, or an `ArchiveError` that says what is wrong."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, or is no file.")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            return _read(path, archive, os.fstat(file.fileno()).st_size)
    except ArchiveError:
        raise
    except Exception as error:  # whatever zipfile, json and numpy raise where bytes make no sense
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def damaged(path: Path, reason: str) -> ArchiveError:
    return ArchiveError(f"{path} is damaged, or is no model of autodsm: {reason}. Restore it from a backup.")


def _read(path: Path, archive: zipfile.ZipFile, size: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    entries = archive.infolist()
    for entry in entries:
        if entry.filename != _DOCUMENT and not _ARRAY.fullmatch(entry.filename):
            raise damaged(path, f"it holds {entry.filename!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise damaged(path, f"{entry.filename} is compressed or encrypted")
    if len({entry.filename for entry in entries}) < len(entries):
        raise damaged(path, "two entries have one name")
    if sum(entry.file_size for entry in entries) > size:
        raise damaged(path, "its entries claim more bytes than it has")
    document = _document(path, archive)
    table = document.get("arrays")
    if not isinstance(table, list) or {e.filename for e in entries} != {_DOCUMENT, *map(_name, range(len(table)))}:
        raise damaged(path, "it does not hold the arrays that its document names")
    return document, list(_arrays(path, archive, table))


def _name(i: int) -> str:
    return f"arrays/{i}.npy"


def _document(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    if (size := archive.getinfo(_DOCUMENT).file_size) > MAX_DOCUMENT:
        raise damaged(path, f"its document has {size} bytes")
    try:
        document = json.loads(archive.read(_DOCUMENT))
    except RecursionError:
        raise damaged(path, "its document is nested too deeply") from None
    if not isinstance(document, dict) or type(document.get("format")) is not int:
        raise damaged(path, "its document names no format")
    if document["format"] > FORMAT:
        writer = document.get("library")
        version = writer.get("autodsm") if isinstance(writer, dict) else None
        raise ArchiveError(
            f"{path} has format {document['format']}, written by autodsm {version}, and this release reads formats up "
            f"to {FORMAT}. Install that version or a later one."
        )
    return document


def _arrays(path: Path, archive: zipfile.ZipFile, table: list) -> Iterator[np.ndarray]:
    for i, (dtype, shape) in enumerate(table):
        if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise damaged(path, f"array {i} is said to be {dtype} of shape {shape}")
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        content = archive.read(_name(i))
        header = io.BytesIO(content[:10_000])
        version = np.lib.format.read_magic(header)
        if version != (1, 0):
            raise damaged(path, f"array {i} is of version {version}")
        found, by_columns, kind = np.lib.format.read_array_header_1_0(header)
        if by_columns or found != tuple(shape) or kind != stored:
            raise damaged(path, f"array {i} is {kind} of shape {found}, not {dtype} of shape {tuple(shape)}")
        start = header.tell()
        if len(content) - start != math.prod(shape) * stored.itemsize:
            raise damaged(path, f"array {i} has {len(content) - start} bytes, which are not {found} of {kind}")
        array = np.frombuffer(content, stored, offset=start).reshape(shape)
        yield array.view(jnp.bfloat16) if dtype == "bfloat16" else array
