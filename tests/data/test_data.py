"""Images: verified imports, draws that follow from the key, and what is refused."""

import hashlib
import io
import tarfile

import jax
import numpy as np
import pytest

import autodsm as ad
from autodsm.app import cli
from autodsm.data import Images
from autodsm.data import cifar10_files as cifar10
from autodsm.learn.train import is_traceable

KEY = jax.random.key(0)
RECORDS = 4


@pytest.fixture
def files(monkeypatch) -> dict[str, bytes]:
    """Six small files in CIFAR-10's format, and their checksums in place of the published ones."""
    rng = np.random.default_rng(0)
    found = {name: rng.integers(0, 256, RECORDS * cifar10.RECORD, np.uint8).tobytes() for name in cifar10.CHECKSUMS}
    sums = {name: hashlib.md5(content).hexdigest() for name, content in found.items()}
    monkeypatch.setattr(cifar10, "CHECKSUMS", sums)
    monkeypatch.setattr(cifar10, "RECORDS", RECORDS)
    return found


def archive(path, entries, *, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def sources(tmp_path, files):
    """The forms in which users have it."""
    yield write(tmp_path / "plain", files)
    write(tmp_path / "nested" / "cifar-10-batches-bin", files)
    yield tmp_path / "nested"
    yield archive(tmp_path / "official.tar.gz", {f"cifar-10-batches-bin/{name}": c for name, c in files.items()})
    packed = {"package/package.json": b"{}"} | {f"package/cifar-10-batches-bin/{n}": c for n, c in files.items()}
    yield archive(tmp_path / "package.tgz", packed)
    yield archive(tmp_path / "plain.tar", files, mode="w")


def test_import_from_folders_and_archives(files, tmp_path):
    for i, source in enumerate(sources(tmp_path, files)):
        into = tmp_path / "into" / str(i)
        cifar10.import_from(source, into)
        assert {path.name: path.read_bytes() for path in into.iterdir()} == files
    assert not list((tmp_path / "into").glob(".import-*"))


def hostile(tmp_path, files):
    inside = {f"a/{name}": content for name, content in files.items()}
    yield archive(tmp_path / "up.tar.gz", inside | {"../../evil": b"x"}), "points out of the archive"
    yield archive(tmp_path / "root.tar.gz", inside | {"/etc/evil": b"x"}), "points out of the archive"
    linked = archive(tmp_path / "link.tar", inside, mode="w")
    with tarfile.open(linked, "a") as tar:
        link = tarfile.TarInfo("a/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    yield linked, "is a link or a device"
    whole = archive(tmp_path / "whole.tar.gz", inside).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    yield tmp_path / "cut.tar.gz", "cut short"
    (tmp_path / "text.tar.gz").write_text("not an archive")
    yield tmp_path / "text.tar.gz", "cannot be read as an archive"
    few = dict(list(inside.items())[:5])
    yield archive(tmp_path / "few.tar.gz", few), "does not hold test_batch.bin"
    twice = inside | {"b/test_batch.bin": files["test_batch.bin"]}
    yield archive(tmp_path / "twice.tar.gz", twice), "holds test_batch.bin twice"
    wrong = inside | {"a/test_batch.bin": bytes(len(files["test_batch.bin"]))}
    yield archive(tmp_path / "wrong.tar.gz", wrong), "MD5"
    yield archive(tmp_path / "short.tar.gz", inside | {"a/test_batch.bin": b"short"}), "has 5 bytes"
    yield write(tmp_path / "cut", files | {"test_batch.bin": files["test_batch.bin"][:-1]}), "cut short"
    yield tmp_path / "nowhere", "does not exist"


def test_bad_sources_leave_nothing(files, tmp_path):
    for source, text in hostile(tmp_path, files):
        with pytest.raises((ValueError, FileNotFoundError), match=text):
            cifar10.import_from(source, tmp_path / "into" / "cifar-10")
        assert list((tmp_path / "into").iterdir()) == [], source


def test_a_failed_import_keeps_what_was_there(files, tmp_path):
    into = write(tmp_path / "into", files)
    with pytest.raises(ValueError, match="MD5"):
        cifar10.import_from(write(tmp_path / "bad", {n: c[::-1] for n, c in files.items()}), into)
    assert {path.name: path.read_bytes() for path in into.iterdir()} == files


def test_the_official_archive_is_fetched(files, tmp_path, monkeypatch):
    official = archive(tmp_path / "official.tar.gz", {f"cifar-10-batches-bin/{name}": c for name, c in files.items()})
    monkeypatch.setattr(cifar10, "OFFICIAL", official.as_uri())
    said = []
    cifar10.download(tmp_path / "into", said.append)
    assert {path.name: path.read_bytes() for path in (tmp_path / "into").iterdir()} == files
    assert said[0] == f"downloading {official.as_uri()}"
    monkeypatch.setattr(cifar10, "OFFICIAL", (tmp_path / "nowhere.tar.gz").as_uri())
    with pytest.raises(ValueError, match=r"nowhere.tar.gz could not be fetched .* give it as --from FILE"):
        cifar10.download(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_command(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTODSM_DATA", str(tmp_path / "cache"))
    source = write(tmp_path / "plain", files)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["autodsm", "data", "cifar10", *map(str, arguments)])
        cli.main()

    with pytest.raises(FileNotFoundError, match=r"autodsm data cifar10 --from.*AUTODSM_DATA"):
        ad.data.cifar10()
    run("--from", source)
    assert "verified, in" in capsys.readouterr().out
    assert len(ad.data.cifar10("train")) == 5 * RECORDS
    for arguments in ((), ("--from", source, "--download")):
        with pytest.raises(SystemExit, match="2"):
            run(*arguments)
        assert "either --from PATH" in capsys.readouterr().err
    (tmp_path / "cache" / "cifar-10" / "test_batch.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 bytes"):
        ad.data.cifar10("test")


def test_cifar10_is_what_the_files_hold(files, tmp_path):
    folder = write(tmp_path / "plain", files)
    images = ad.data.cifar10("train", folder)
    record = np.frombuffer(files["data_batch_2.bin"], np.uint8).reshape(RECORDS, -1)[1, 1:].reshape(3, 32, 32)
    np.testing.assert_array_equal(images.pixels([RECORDS + 1])[0], record)
    state = np.asarray(images.states([RECORDS + 1], key=KEY))[0]
    np.testing.assert_array_equal(np.floor((state.astype(np.float64) + 1) * 128), record)
    assert len(ad.data.cifar10("test", folder)) == RECORDS
    with pytest.raises(ValueError, match="Did you mean 'train'"):
        ad.data.cifar10("trian", folder)


def test_draws_follow_from_the_key():
    images = ad.data.digits()
    first, again, other = (np.asarray(images(jax.random.key(k), 50)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (50, 1, 8, 8)
    assert first.dtype == np.float32
    assert np.all(np.abs(first) <= 1)
    assert not np.array_equal(first, other)
    assert not is_traceable(images)  # it reads files: called between rounds


def test_dequantization_is_uniform():
    """Within a level, u is uniform; the level is kept."""
    images = ad.data.digits("test")
    states = np.asarray(images.states(np.arange(len(images)), key=KEY), np.float64)
    place = (states + 1) * 17 / 2
    np.testing.assert_array_equal(np.floor(place), images.pixels(np.arange(len(images))))
    u = place % 1
    n = u.size
    assert abs(u.mean() - 0.5) < 4.5 * np.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 4.5 * np.sqrt(1 / 180 / n)


def test_half_of_the_images_are_flipped():
    marked = np.zeros((1, 1, 2, 2), np.uint8)
    marked[..., 0] = 1
    images = Images((marked,), (1, 2, 2), 2, True, range(1))
    left = np.asarray(images(KEY, 4000))[:, 0, 0, 0] > 0
    assert abs(left.mean() - 0.5) < 4.5 * 0.5 / np.sqrt(4000)


def test_hosts_draw_for_themselves():
    """From one key, hosts take other images and other noise; a host takes the same again."""
    halves = [ad.data.digits().shard(i, 2) for i in range(2)]
    first, second = (np.asarray(half(KEY, 64), np.float64) for half in halves)
    np.testing.assert_array_equal(first, halves[0](KEY, 64))
    u, v = (((draw + 1) * 17 / 2) % 1 for draw in (first, second))  # noise of dequantization
    assert abs(np.corrcoef(u.ravel(), v.ravel())[0, 1]) < 4.5 / np.sqrt(u.size)


def test_images_to_test_on_are_not_flipped(files, tmp_path):
    folder = write(tmp_path / "plain", files)
    assert ad.data.cifar10("train", folder).flip
    test = ad.data.cifar10("test", folder)
    drawn = np.floor((np.asarray(test(KEY, 50), np.float64) + 1) * 128)
    every = test.pixels(np.arange(len(test)))
    assert all((image == every).all(axis=(1, 2, 3)).any() for image in drawn)


def test_splits_and_shards_part_the_images():
    train, test = ad.data.digits(), ad.data.digits("test")
    assert (len(train), len(test)) == (1438, 359)
    shards = [train.shard(i, 3) for i in range(3)]
    assert sum(map(len, shards)) == len(train)
    for i, shard in enumerate(shards):
        every_third = train.pixels(np.arange(i, len(train), 3))
        np.testing.assert_array_equal(shard.pixels(np.arange(len(shard))), every_third)
    with pytest.raises(ValueError, match="index=3"):
        train.shard(3, 3)
    with pytest.raises(IndexError, match="1438"):
        train.pixels([1438])
