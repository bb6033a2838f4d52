"""FileBackend where it meets the directory: names, rights, full and read-only disks, other processes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_backends.base import Outcome, StorageError
from storage_backends.file import FileBackend
from storage_backends.specs import FileSpec
from storage_backends.testing import BOUNDED_OBJECTS, OBJECT_BYTES, Bench, content_of, numbered

OK, ABSENT, WRONG_SIZE, FAILED, FULL = (
    Outcome.OK,
    Outcome.ABSENT,
    Outcome.WRONG_SIZE,
    Outcome.FAILED,
    Outcome.FULL,
)
CAPACITY_BYTES = BOUNDED_OBJECTS * OBJECT_BYTES
NOBODY = 65534


@pytest.fixture
def opened() -> Iterator[Callable[..., Bench]]:
    """Open a directory; everything is closed at the end."""
    backends: list[FileBackend] = []

    def start(path: Path | str, capacity_bytes: int = 1 << 30) -> Bench:
        backends.append(FileBackend(FileSpec(path=str(path), capacity_bytes=capacity_bytes)))
        return Bench(backends[-1])

    yield start
    for backend in backends:
        backend.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def objects_in(root: Path) -> list[Path]:
    return sorted(path for path in (root / "objects").rglob("*") if not path.is_dir())


def temporaries_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "writing").iterdir() if path.suffix != ".owner")


def the_object(root: Path) -> Path:
    (path,) = objects_in(root)
    return path


# names and rights


def test_whatever_the_keys_files_stay_under_the_root_and_private(
    tmp_path: Path, opened: Callable[..., Bench]
) -> None:
    """SECURITY-05: keys with '..' and '/' never leave the root; files are 0600, directories 0700."""
    root = tmp_path / "outer" / "store"
    mask = os.umask(0)
    try:
        bench = opened(root)
        assert set(bench.write("../../escape", "/etc/escape", "..", "a/../../b", "x/y/z")) == {OK}
    finally:
        os.umask(mask)
    assert os.listdir(root.parent) == ["store"]
    assert sorted(os.listdir(root)) == ["objects", "writing"]
    assert len(objects_in(root)) == 5
    assert all(re.fullmatch("[0-9a-f]{64}", path.name) for path in objects_in(root))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {modes[path] for path in modes if path.is_dir()} == {0o700}
    assert {modes[path] for path in modes if path.is_file()} == {0o600}


def test_the_tilde_is_the_home_directory(
    tmp_path: Path, opened: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY-05: '~' makes no directory of that name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert opened("~/cache").write("k") == [OK]
    assert len(objects_in(tmp_path / "home" / "cache")) == 1
    assert os.listdir(tmp_path) == ["home"]


@pytest.mark.parametrize("path", ["", "~no-such-user/cache"])
def test_a_path_that_names_no_place_is_refused(path: str) -> None:
    with pytest.raises(StorageError, match="write an absolute `path`"):
        FileBackend(FileSpec(path=path))


def test_a_symlink_to_the_directory_is_followed(tmp_path: Path, opened: Callable[..., Bench]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    opened(tmp_path / "link").write("k")
    assert opened(tmp_path / "real").read("k") == [content_of("k")]


def test_a_symlink_in_an_objects_place_is_never_followed(
    tmp_path: Path, opened: Callable[..., Bench]
) -> None:
    """SECURITY-03: nobody makes us read, or overwrite, a file elsewhere."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(OBJECT_BYTES))
    bench = opened(tmp_path / "store")
    bench.write("k")
    the_object(tmp_path / "store").unlink()
    (tmp_path / "store" / "objects").joinpath(*object_place(bench, "k")).symlink_to(secret)
    assert bench.read("k") == [FAILED]
    assert bench.backend.contains(["k"]) == [FAILED]
    assert bench.write("k") == [OK]
    assert bench.read("k") == bench.contents("k")
    assert secret.read_bytes() == bytes(OBJECT_BYTES)


def object_place(bench: Bench, key: str) -> tuple[str, str]:
    """Shard and name, found by writing the key in a directory of its own."""
    with tempfile.TemporaryDirectory() as path, FileBackend(FileSpec(path=path)) as backend:
        Bench(backend).write(key)
        found = the_object(Path(path))
        return found.parent.name, found.name


def test_a_fifo_in_an_objects_place_holds_nobody_up(tmp_path: Path, opened: Callable[..., Bench]) -> None:
    bench = opened(tmp_path)
    bench.write("k")
    place = the_object(tmp_path)
    place.unlink()
    os.mkfifo(place)
    assert bench.read("k") == [FAILED]


def test_what_is_not_ours_is_neither_counted_nor_deleted(
    tmp_path: Path, opened: Callable[..., Bench]
) -> None:
    opened(tmp_path, CAPACITY_BYTES).backend.close()
    strangers = [
        tmp_path / "notes.txt",
        tmp_path / "objects" / "README",
        tmp_path / "objects" / "ab" / "notes",
    ]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(CAPACITY_BYTES))
    bench = opened(tmp_path, CAPACITY_BYTES)
    assert bench.backend.usage().n_objects == 0
    assert bench.write(*numbered(2 * BOUNDED_OBJECTS)) == [OK] * 2 * BOUNDED_OBJECTS
    assert all(path.exists() for path in strangers)


@pytest.mark.parametrize("mode", [0o777, 0o500])
def test_our_directories_rights_are_set_right(
    tmp_path: Path, opened: Callable[..., Bench], mode: int
) -> None:
    """SECURITY-05: open to others, or closed to ourselves, by mistake."""
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects").chmod(mode)
    opened(tmp_path)
    assert stat.S_IMODE((tmp_path / "objects").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory another user's")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    """SECURITY-03: whoever owns it could poison what we read."""
    (tmp_path / "objects").mkdir()
    os.chown(tmp_path / "objects", NOBODY, NOBODY)
    with pytest.raises(StorageError, match="choose another `path`"):
        FileBackend(FileSpec(path=str(tmp_path)))


# directories and disks that cannot be used


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StorageError, match=f"{path}.*remove it or choose another"):
            FileBackend(FileSpec(path=str(path)))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user and return")
@pytest.mark.parametrize("mode", [0o000, 0o500], ids=oct)
def test_a_directory_without_the_rights_is_refused(mode: int) -> None:
    """Unreadable and read-only directories are told at the start, with the remedy; nothing is left behind."""
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o755)
        root = Path(outer) / "store"
        root.mkdir()
        os.chown(root, NOBODY, NOBODY)
        root.chmod(mode)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(StorageError, match=f"{root}.*let the daemon's user"):
                FileBackend(FileSpec(path=str(root)))
        finally:
            os.seteuid(0)
        assert os.listdir(root) == []


def test_a_read_only_disk_is_refused(small_disk: Path) -> None:
    with FileBackend(FileSpec(path=str(small_disk))) as backend:
        Bench(backend).write("k")
    remount(small_disk, "ro")
    with pytest.raises(StorageError, match=f"{small_disk}.*mount it writable or choose another"):
        FileBackend(FileSpec(path=str(small_disk)))


def test_a_disk_that_becomes_read_only_still_serves(
    tmp_path: Path, opened: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = opened(tmp_path)
    bench.write("k")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for call in ("utime", "rename", "unlink"):
        monkeypatch.setattr(f"os.{call}", read_only)
    assert bench.read("k") == bench.contents("k")
    assert bench.backend.contains(["k"]) == [OK]
    assert bench.backend.delete(["k"]) == [FAILED]


def remount(path: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


def test_on_a_full_disk_the_least_recently_used_make_room(
    small_disk: Path, opened: Callable[..., Bench]
) -> None:
    """The capacity was set above what the disk has: the cache goes on within the disk."""
    bench = opened(small_disk, 1 << 30)
    for number in range(12):
        assert bench.write(f"k{number}", nbytes=200_000) == [OK]
    assert bench.read("k11", nbytes=200_000) == bench.contents("k11", nbytes=200_000)
    assert bench.backend.contains(["k0"]) == [ABSENT]
    usage = bench.backend.usage()
    assert usage.used_bytes == usage.n_objects * 200_000 <= 1 << 20


def test_the_capacity_told_is_what_the_disk_leaves(small_disk: Path) -> None:
    """A disk smaller than `capacity_bytes` shows in usage, before it is full."""
    disk_bytes = shutil.disk_usage(small_disk).total
    with FileBackend(FileSpec(path=str(small_disk / "o"), capacity_bytes=8 * disk_bytes)) as backend:
        bench = Bench(backend)
        bench.write("a", "b")
        assert 0 < backend.usage().used_bytes < backend.usage().capacity_bytes <= disk_bytes


def test_a_full_disk_is_full_with_the_remedy_and_nothing_is_left_behind(
    small_disk: Path, opened: Callable[..., Bench]
) -> None:
    bench = opened(small_disk)
    bench.write("kept")
    fill_up(small_disk / "foreign")
    assert bench.write("large", nbytes=1 << 20) == [FULL]
    assert temporaries_in(small_disk) == []
    assert bench.read("kept") == bench.contents("kept")
    with pytest.raises(StorageError, match="free disk space"):
        bench.backend.ping()
    with pytest.raises(StorageError, match="free disk space"):
        FileBackend(FileSpec(path=str(small_disk)))
    assert [path for path in (small_disk / "writing").iterdir() if path.suffix != ".owner"] == []
    (small_disk / "foreign").unlink()
    bench.backend.ping()
    assert bench.write("x") == [OK]


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        free = os.statvfs(path)
        file.write(bytes(free.f_bavail * free.f_frsize))
    assert os.statvfs(path).f_bavail == 0


# eviction (L3-13)


def make_undeletable(path: Path) -> None:
    """As the file system sees it: `unlink` answers an error, whoever asks."""
    path.unlink()
    path.mkdir()


def test_an_undeletable_file_stops_no_eviction(tmp_path: Path, opened: Callable[..., Bench]) -> None:
    """L3-13: the oldest of ten cannot be deleted; twenty more are written within the capacity."""
    bench = opened(tmp_path, CAPACITY_BYTES)
    bench.write("k0")
    make_undeletable(the_object(tmp_path))
    for key in [*numbered(BOUNDED_OBJECTS)[1:], *(f"more{number}" for number in range(20))]:
        assert bench.write(key) == [OK]
        assert bench.backend.usage().used_bytes <= CAPACITY_BYTES
    assert bench.backend.usage().n_objects == BOUNDED_OBJECTS
    bench.backend.ping()


def test_with_everything_stuck_writes_are_full_without_spinning(
    tmp_path: Path, opened: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3-13: and health names the remedy; once files can be deleted again, writing goes on."""
    bench = opened(tmp_path, CAPACITY_BYTES)
    bench.write(*numbered(BOUNDED_OBJECTS))
    stuck = objects_in(tmp_path)
    for path in stuck:
        make_undeletable(path)
    assert bench.write("x") == [FULL]
    tried: list[str] = []
    unlink = os.unlink

    def counted(path: str) -> None:
        tried.append(path)
        unlink(path)

    monkeypatch.setattr("os.unlink", counted)
    assert bench.write("x", "y", "z") == [FULL] * 3
    assert len(tried) == 3
    with pytest.raises(StorageError, match="give the daemon's user the right to delete"):
        bench.backend.ping()
    for path in stuck:
        path.rmdir()
    assert bench.write("x") == [OK]
    bench.backend.ping()


def test_a_lower_capacity_is_kept_from_the_start(tmp_path: Path, opened: Callable[..., Bench]) -> None:
    bench = opened(tmp_path, CAPACITY_BYTES)
    for key in numbered(BOUNDED_OBJECTS):
        bench.write(key)
    bench.backend.close()
    bench = opened(tmp_path, 3 * OBJECT_BYTES)
    assert bench.backend.contains(["k6", "k7", "k8", "k9"]) == [ABSENT, OK, OK, OK]
    assert len(objects_in(tmp_path)) == 3


# damage from outside


def test_a_truncated_object_is_wrong_size_and_writing_again_mends_it(
    tmp_path: Path, opened: Callable[..., Bench]
) -> None:
    """L3-01, L3-07, SECURITY-03: a half or empty file is never taken for the object."""
    bench = opened(tmp_path)
    for left_bytes in (OBJECT_BYTES // 2, 0):
        bench.write("k")
        os.truncate(the_object(tmp_path), left_bytes)
        assert bench.read("k") == [WRONG_SIZE]
        assert bench.write("k") == [OK]
        assert bench.read("k") == bench.contents("k")
        assert bench.backend.usage().used_bytes == OBJECT_BYTES


def test_objects_deleted_from_outside_are_absent_and_count_no_longer_once_met(
    tmp_path: Path, opened: Callable[..., Bench]
) -> None:
    bench = opened(tmp_path, CAPACITY_BYTES)
    bench.write(*numbered(BOUNDED_OBJECTS))
    for path in objects_in(tmp_path):
        path.unlink()
    assert bench.read("k0", "k1") == [ABSENT, ABSENT]
    assert bench.backend.contains(["k2"]) == [ABSENT]
    assert bench.backend.usage().n_objects == BOUNDED_OBJECTS - 2
    assert bench.write(*numbered(2 * BOUNDED_OBJECTS)) == [OK] * 2 * BOUNDED_OBJECTS
    assert len(objects_in(tmp_path)) == BOUNDED_OBJECTS


@pytest.mark.parametrize("removed", ["objects", "writing", "."])
def test_a_directory_removed_from_outside_is_made_again(
    tmp_path: Path, opened: Callable[..., Bench], removed: str
) -> None:
    bench = opened(tmp_path / "store")
    bench.write("k")
    shutil.rmtree(tmp_path / "store" / removed)
    assert bench.write("x", "y") == [OK, OK]
    assert bench.read("x", "y") == bench.contents("x", "y")


# several processes


WRITER = str(Path(__file__).parent / "sharing_writer.py")


@pytest.fixture
def writers() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start sharing_writer.py, up to where the directory is open."""
    started: list[subprocess.Popen[str]] = []

    def start(root: Path, rank: str, capacity_bytes: int = 1 << 30, n: int = 100) -> subprocess.Popen[str]:
        command = [sys.executable, WRITER, str(root), rank, str(capacity_bytes), str(n)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert reads_from(process) == "open"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def reads_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_share_a_directory_and_read_back_their_own_bytes(
    tmp_path: Path,
    opened: Callable[..., Bench],
    writers: Callable[..., subprocess.Popen[str]],
) -> None:
    """L3-10, L3-03: two ranks, the same path, keys of their own and keys that both write."""
    running = [writers(tmp_path, "0"), writers(tmp_path, "1")]
    for process in running:
        tell(process)
    assert [reads_from(process) for process in running] == ["done", "done"]
    for prefix in ("shared", "rank-0", "rank-1"):
        keys = [f"{prefix}/{number}" for number in range(100)]
        bench = opened(tmp_path)
        assert bench.read(*keys) == bench.contents(*keys)
    assert len(objects_in(tmp_path)) == 300
    assert temporaries_in(tmp_path) == []


def test_processes_that_share_a_directory_share_its_capacity(
    tmp_path: Path, writers: Callable[..., subprocess.Popen[str]]
) -> None:
    """Each looks again after writing a quarter of the capacity: together they exceed it by no more."""
    capacity_bytes = 40 * OBJECT_BYTES
    running = [writers(tmp_path, rank, capacity_bytes, 100) for rank in "01"]
    for process in running:
        tell(process)
    assert [reads_from(process) for process in running] == ["done", "done"]
    on_disk = sum(path.stat().st_size for path in objects_in(tmp_path))
    assert 0 < on_disk <= capacity_bytes * 3 // 2


def test_an_object_of_another_process_is_served_and_then_counted(
    tmp_path: Path, opened: Callable[..., Bench]
) -> None:
    ours, theirs = opened(tmp_path), opened(tmp_path)
    theirs.write("k")
    assert ours.backend.contains(["k"]) == [OK]
    assert ours.backend.usage().n_objects == 0
    assert ours.read("k") == ours.contents("k")
    assert ours.backend.usage().n_objects == 1
    ours.backend.delete(["k"])
    assert theirs.read("k") == [ABSENT]


def test_temporaries_of_the_dead_are_cleaned_at_open_those_of_the_living_are_not(
    tmp_path: Path, opened: Callable[..., Bench], writers: Callable[..., subprocess.Popen[str]]
) -> None:
    """L3-08: a half-written file is never visible, and goes when its writer is dead, however it died."""
    dead, living = writers(tmp_path, "0"), writers(tmp_path, "1")
    (first, second) = sorted(path.stem for path in (tmp_path / "writing").iterdir())
    for stem in (first, second):
        (tmp_path / "writing" / f"{stem}.1000000").write_bytes(b"half")
    (tmp_path / "writing" / "0123456789abcdef.3").write_bytes(b"half, and its owner's file is gone")
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    bench = opened(tmp_path)
    (left,) = temporaries_in(tmp_path)
    assert left.partition(".")[0] in (first, second)
    assert bench.backend.usage().n_objects == 0
    tell(living)
    assert reads_from(living) == "done"
    living.kill()
    living.wait()
    opened(tmp_path)
    assert temporaries_in(tmp_path) == []


def test_what_was_published_survives_the_writers_death(
    tmp_path: Path, opened: Callable[..., Bench], writers: Callable[..., subprocess.Popen[str]]
) -> None:
    """L3-05: kill -9, a new process, the same keys: every object is there."""
    process = writers(tmp_path, "0")
    tell(process)
    assert reads_from(process) == "done"
    process.kill()
    process.wait()
    keys = [f"rank-0/{number}" for number in range(100)]
    bench = opened(tmp_path)
    assert bench.read(*keys) == bench.contents(*keys)
    assert bench.backend.usage().n_objects == 200


def test_closing_leaves_nothing_but_objects(tmp_path: Path) -> None:
    with FileBackend(FileSpec(path=str(tmp_path))) as backend:
        Bench(backend).write("a", "b")
        backend.ping()
    assert os.listdir(tmp_path / "writing") == []
    assert len(objects_in(tmp_path)) == 2
