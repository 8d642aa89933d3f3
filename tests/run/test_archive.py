"""Files of arrays and JSON: exact, and read without trust."""

import io
import json
import tracemalloc
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from autodsm.run.archive import ArchiveError, read_archive, write_archive

ARRAYS = [
    np.arange(12.0, dtype=np.float32).reshape(3, 4),
    np.array(2.5),
    np.zeros((0, 3), np.int8),
    np.array([True, False]),
    np.asarray(jnp.array([1.5, -2.25], jnp.bfloat16)),
    np.array([0x7FC12345, 0xFF800001, 0x80000000], np.uint32).view(np.float32),  # a NaN with a payload, −0
    np.asfortranarray(np.arange(6).reshape(2, 3)),
]
ROOM = 4 << 20
"""Bytes that reading may take beside twice those of the file: modules that are imported, and a document of 4 MB at most
with what JSON makes of it, which for these files is small."""


@pytest.fixture
def file(tmp_path):
    write_archive(tmp_path / "a.autodsm", {"hello": [1, "two", None]}, ARRAYS)
    return tmp_path / "a.autodsm"


def same(found):
    for a, b in zip(found, ARRAYS, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def test_arrays_and_document_come_back_to_the_bit(file):
    document, arrays = read_archive(file)
    assert document["hello"] == [1, "two", None]
    same(arrays)
    before = file.read_bytes()
    write_archive(file, {"hello": [1, "two", None]}, ARRAYS)
    assert file.read_bytes() == before  # equal contents, equal files
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_what_is_no_number_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="dtype object cannot be saved"):
        write_archive(tmp_path / "a", {}, [np.array([{}])])
    assert not list(tmp_path.iterdir())


def entries(file):
    with zipfile.ZipFile(file) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def npy(array, **options):
    stored = io.BytesIO()
    np.save(stored, array, **options)
    return stored.getvalue()


def header(text, body=b""):
    """An array of numpy's format with any header."""
    text = text.encode() + b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


F4 = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"


def hostile(name):
    """What is done to the entries of a good file."""

    def document(change):
        def apply(all_entries):
            found = json.loads(all_entries["document.json"])
            change(found)
            all_entries["document.json"] = json.dumps(found).encode()

        return apply

    def put(**entry):
        return lambda all_entries: all_entries.update({k.replace("__", "/"): v for k, v in entry.items()})

    first = "arrays/0.npy"
    deep = b"[" * 200_000
    return {
        "an absolute path": lambda e: e.update({"/tmp/autodsm-was-here": b"x"}),
        "a path upwards": lambda e: e.update({"../../autodsm-was-here": b"x"}),
        "a path upwards inside": lambda e: e.update({"arrays/../../x.npy": b"x"}),
        "a backslash": lambda e: e.update({"arrays\\0.npy": b"x"}),
        "one more array": lambda e: e.update({"arrays/7.npy": npy(np.zeros(3))}),
        "no array": lambda e: e.pop(first),
        "no document": lambda e: e.pop("document.json"),
        "a pickle": lambda e: e.update({first: npy(np.array([{"a": 1}], object), allow_pickle=True)}),
        "a huge shape": lambda e: e.update({first: header(F4 % "(1000000000000,)", b"\0" * 48)}),
        "a shape that overflows": lambda e: e.update({first: header(F4 % f"({2**62}, {2**62})", b"\0" * 48)}),
        "a negative shape": lambda e: e.update({first: header(F4 % "(-3, 4)", b"\0" * 48)}),
        "another shape": lambda e: e.update({first: npy(np.zeros((4, 3), np.float32))}),
        "another dtype": lambda e: e.update({first: npy(np.zeros((3, 4), np.int32))}),
        "the other byte order": lambda e: e.update({first: npy(np.zeros((3, 4), ">f4"))}),
        "columns first": lambda e: e.update({first: npy(np.asfortranarray(ARRAYS[0]))}),
        "code in a header": lambda e: e.update({first: header("__import__('os').system('touch autodsm-was-here')")}),
        "too few bytes": lambda e: e.update({first: e[first][:-1]}),
        "too many bytes": lambda e: e.update({first: e[first] + b"\0"}),
        "an empty array": lambda e: e.update({first: b""}),
        "a document of another kind": lambda e: e.update({"document.json": b"[1]"}),
        "a document that is no text": lambda e: e.update({"document.json": b"\xff\xfe{"}),
        "a deep document": lambda e: e.update({"document.json": deep}),
        "a large document": lambda e: e.update({"document.json": b" " * (1 << 22) + b"{}"}),
        "no format": document(lambda d: d.pop("format")),
        "a table of another kind": document(lambda d: d.update(arrays={"0": 1})),
        "a huge array in the table": document(lambda d: d["arrays"][0].__setitem__(1, [10**12])),
        "a dtype of objects": document(lambda d: d["arrays"][0].__setitem__(0, "object")),
    }[name]


HOSTILE = [
    "an absolute path", "a path upwards", "a path upwards inside", "a backslash", "one more array", "no array",
    "no document", "a pickle", "a huge shape", "a shape that overflows", "a negative shape", "another shape",
    "another dtype", "the other byte order", "columns first", "code in a header", "too few bytes", "too many bytes",
    "an empty array", "a document of another kind", "a document that is no text", "a deep document",
    "a large document", "no format", "a table of another kind", "a huge array in the table", "a dtype of objects",
]  # fmt: skip


def refused(file):
    """Reading it is an error of ours, takes no more memory than it may, and writes nothing."""
    there = sorted(file.parent.rglob("*"))
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveError) as error:
            read_archive(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(file) in str(error.value)
    assert peak < 2 * file.stat().st_size + ROOM
    assert sorted(file.parent.rglob("*")) == there


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused(name, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    content = entries(file)
    hostile(name)(content)
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in content.items():
            archive.writestr(entry, data)
    refused(file)


def test_a_bomb_is_refused(file):
    """40 MB of zeros in 40 kB; and entries that share their bytes, so that all of them together are larger."""
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arrays/7.npy", npy(np.zeros(10_000_000, np.float32)))
    assert file.stat().st_size < 100_000
    refused(file)


def test_entries_that_share_their_bytes_are_refused(tmp_path):
    file = tmp_path / "shared"
    arrays = [np.zeros(100_000, np.float32)] * 20
    write_archive(file, {}, arrays[:1])
    with zipfile.ZipFile(file, "a") as archive:
        first = archive.getinfo("arrays/0.npy")
        for i in range(1, 20):
            again = zipfile.ZipInfo(f"arrays/{i}.npy")
            again.header_offset, again.file_size, again.compress_size, again.CRC = (
                first.header_offset, first.file_size, first.compress_size, first.CRC,
            )  # fmt: skip
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
        archive._didModify = True
    assert file.stat().st_size < 500_000
    refused(file)


def test_a_link_and_a_second_entry_of_one_name_are_refused(file):
    content = file.read_bytes()
    with zipfile.ZipFile(file, "a") as archive:
        link = zipfile.ZipInfo("arrays/link.npy")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    refused(file)
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("document.json", "{}")
    refused(file)


def test_a_later_format_names_its_version(file):
    content = entries(file)
    document = json.loads(content["document.json"]) | {"format": 2, "library": {"autodsm": "9.1.0"}}
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("document.json", json.dumps(document))
    with pytest.raises(ArchiveError, match=r"format 2, written by autodsm 9.1.0, .* up to 1"):
        read_archive(file)


def test_damage_is_an_error_or_harmless(file):
    """A hundred truncations and flipped bits; benchmarks/hostile.py has a thousand, of whole models."""
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    outcomes = {"refused": 0, "read": 0}
    for i in range(100):
        content = bytearray(whole)
        if i % 2:
            content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        else:
            del content[rng.integers(len(content)) :]
        file.write_bytes(content)
        try:
            document, arrays = read_archive(file)
        except ArchiveError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert document["hello"] == [1, "two", None]
        same(arrays)
    assert outcomes["refused"] > 70
