"""CIFAR-10 (Krizhevsky, 2009): its official binary version, imported from what the user has, and verified.

Six files of 10,000 records, each a label and 3×32×32 bytes. They are copied into a folder only after every one of them
has the published checksum; archives are read file by file, and nothing in them says where anything is written.
"""

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path, PurePosixPath

RECORD, RECORDS = 3073, 10_000
CHECKSUMS = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Where data are kept unless the user names a folder: AUTODSM_DATA, or autodsm in the user's cache."""
    if given := os.environ.get("AUTODSM_DATA"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autodsm"


def default_folder() -> Path:
    return cache_folder() / "cifar-10"


def check_folder(folder: Path) -> None:
    """Refuse a folder that does not hold all files in their full length."""
    missing = [name for name in CHECKSUMS if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"CIFAR-10 is not in {folder} ({', '.join(missing)} missing). Import it: autodsm data cifar10 --from PATH, "
            "where PATH is a folder or an archive of its binary version; or --download. Data are kept in the folder "
            "that the variable AUTODSM_DATA names, or else in the user's cache."
        )
    for name in CHECKSUMS:
        if (size := (folder / name).stat().st_size) != RECORD * RECORDS:
            raise ValueError(f"{folder / name} has {size} bytes instead of {RECORD * RECORDS}. Import CIFAR-10 again.")


def import_from(source: Path, into: Path, report: Callable[[str], object] = lambda text: None) -> None:
    """Copy the six files from a folder or an archive (.tar.gz, .tgz, .tar), all of them verified, or nothing."""
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist. Give a folder or an archive with CIFAR-10's binary version.")
    into.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".import-", dir=into.parent))
    try:
        found: set[str] = set()
        for name, stream in _files_in_folder(source) if source.is_dir() else _files_in_archive(source):
            if name in found:
                raise ValueError(f"{source} holds {name} twice. Give the binary version of CIFAR-10 alone.")
            report(f"verifying {name}")
            _copy_verified(name, stream, staged / name, source)
            found.add(name)
        if missing := [name for name in CHECKSUMS if name not in found]:
            raise ValueError(f"{source} does not hold {', '.join(missing)}: not the binary version of CIFAR-10.")
        into.mkdir(exist_ok=True)
        for name in CHECKSUMS:
            (staged / name).replace(into / name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{source} cannot be read as an archive, or is cut short: {error}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def download(into: Path, report: Callable[[str], object] = lambda text: None) -> None:
    """Fetch the official archive, and import it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "cifar-10-binary.tar.gz"
        report(f"downloading {OFFICIAL}")
        try:
            with urllib.request.urlopen(OFFICIAL, timeout=60) as answer, archive.open("wb") as file:
                shutil.copyfileobj(answer, file, _CHUNK)
        except OSError as error:
            raise ValueError(
                f"{OFFICIAL} could not be fetched ({error}). Fetch it elsewhere, and give it as --from FILE."
            ) from None
        import_from(archive, into, report)


def _files_in_folder(folder: Path) -> Iterator[tuple[str, BufferedIOBase]]:
    for name in CHECKSUMS:
        path = next((p for p in (folder / name, folder / "cifar-10-batches-bin" / name) if p.is_file()), None)
        if path is not None:
            with path.open("rb") as stream:
                yield name, stream


def _files_in_archive(path: Path) -> Iterator[tuple[str, BufferedIOBase]]:
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            place = PurePosixPath(member.name)
            if place.is_absolute() or ".." in place.parts:
                raise ValueError(f"{path} is refused: its entry {member.name!r} points out of the archive.")
            if not (member.isfile() or member.isdir()):
                raise ValueError(f"{path} is refused: its entry {member.name!r} is a link or a device, not a file.")
            if place.name in CHECKSUMS and member.isfile():
                if member.size != RECORD * RECORDS:
                    raise ValueError(f"{path}: {member.name} has {member.size} bytes, not {RECORD * RECORDS}.")
                stream = archive.extractfile(member)
                assert isinstance(stream, BufferedIOBase)  # of a file there is one
                yield place.name, stream


def _copy_verified(name: str, stream: BufferedIOBase, target: Path, source: Path) -> None:
    digest, size = hashlib.md5(usedforsecurity=False), 0
    with target.open("wb") as file:
        while block := stream.read(_CHUNK):
            digest.update(block)
            size += len(block)
            if size > RECORD * RECORDS:
                break
            file.write(block)
    if size != RECORD * RECORDS:
        raise ValueError(f"{name} in {source} has not {RECORD * RECORDS} bytes: it is cut short, or something else.")
    if (got := digest.hexdigest()) != CHECKSUMS[name]:
        raise ValueError(f"{name} in {source} has the MD5 {got}, not the published {CHECKSUMS[name]}: it is damaged.")
