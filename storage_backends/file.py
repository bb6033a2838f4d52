"""FileBackend: one file per object in a directory; the embedded default.

Owns everything under `<path>/objects` and `<path>/writing` and touches nothing else there. The files are
the truth: what this process counts in memory only bounds bytes and orders eviction, so processes may
share a directory. Never looks into an object.

* **Names.** An object's file is named by the SHA-256 of its key, so a key of any length and content
  ('..', '/', NUL) is one safe name under the root, and equal keys meet.
* **Publication.** Bytes go to a temporary that no other writer has, then `rename` shows the whole object
  at once. Temporaries of dead writers go at the next open.
* **Flushing.** There is no fsync. What was published survives the death of every process (it is in the
  kernel's page cache). A power loss may lose recent objects, or leave one empty or with wrong bytes: the
  length and the checksum in each frame turn that into a miss. A cache need not pay an fsync per object.
* **Recency** is the file's modification time, set at each read and write, so it survives restarts and
  is shared. Other processes' files are counted at open, when met, and, while another process has the
  directory open, again after each quarter of the capacity written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence

from storage_backends.base import Item, Outcome, StorageBackend, StorageError, Usage
from storage_backends.claims import Claim, clean_dead_writers
from storage_backends.ledger import Ledger
from storage_backends.specs import FileSpec

_NAME = re.compile(r"[0-9a-f]{64}\Z")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE = bytes(4096)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FileBackend(StorageBackend):
    """A directory with a byte capacity. Files are 0600, its two subdirectories 0700."""

    def __init__(self, spec: FileSpec) -> None:
        """Raises StorageError, naming the directory and the remedy, when it cannot be read and written."""
        self._root = _absolute(spec.path)
        self._objects = os.path.join(self._root, "objects")
        self._writing = os.path.join(self._root, "writing")
        self._ledger = Ledger(spec.capacity_bytes)
        self._unchecked_bytes = 0
        """Written since the directory was last looked through."""
        self._mutex = threading.Lock()
        """Over the ledger and every change of a name, so that both always agree on this process's doings."""
        self._buffer = memoryview(b"")
        self._claim: Claim | None = None
        try:
            self._make_directories()
            clean_dead_writers(self._writing)
            self._claim = Claim(self._writing)
            self._write_probe(self._claim)
            self._look_through()
        except OSError as error:
            self.close()
            raise self._unusable(error) from error

    def register(self, buffer: memoryview) -> None:
        self._buffer = buffer.cast("B")

    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._contains_one(key) for key in keys]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._read_one(item) for item in items]

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._write_one(item) for item in items]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._delete_one(key) for key in keys]

    def usage(self) -> Usage:
        """The capacity told is what the disk really leaves, where that is less than what was configured."""
        with self._mutex:
            used_bytes, capacity_bytes = self._ledger.used_bytes, self._ledger.capacity_bytes
            n_objects = self._ledger.n_objects
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._root)
            capacity_bytes = min(capacity_bytes, used_bytes + disk.f_bavail * disk.f_frsize)
        return Usage(n_objects, used_bytes, capacity_bytes)

    def ping(self) -> None:
        try:
            self._write_probe(self._open_claim())
        except OSError as error:
            raise self._unusable(error) from error
        with self._mutex:
            stuck = self._ledger.longest_stuck()
            if stuck is not None and self._ledger.oldest() is None:
                raise StorageError(
                    f"storage directory {self._root} is full and nothing in it can be deleted, for instance "
                    f"{self._path(stuck)}: give the daemon's user the right to delete these files"
                )

    def close(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()
        self._buffer = memoryview(b"")

    # one item at a time

    def _contains_one(self, key: str) -> Outcome:
        try:
            found = os.stat(self._path(_object_name(key)), follow_symlinks=False)
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError:
            return Outcome.FAILED
        return Outcome.OK if stat.S_ISREG(found.st_mode) else Outcome.FAILED

    def _read_one(self, item: Item) -> Outcome:
        name = _object_name(item.key)
        try:
            fd = os.open(self._path(name), _READ_FLAGS)
        except FileNotFoundError:
            with self._mutex:
                self._ledger.forget(name)
            return Outcome.ABSENT
        except OSError:
            return Outcome.FAILED
        try:
            return self._deliver(fd, name, item)
        except OSError:
            return Outcome.FAILED
        finally:
            os.close(fd)

    def _deliver(self, fd: int, name: str, item: Item) -> Outcome:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not item.lies_in(len(self._buffer)):
            return Outcome.FAILED
        if found.st_size != item.nbytes:
            return Outcome.WRONG_SIZE
        if not _fill(fd, self._buffer[item.offset : item.offset + item.nbytes]):
            return Outcome.WRONG_SIZE
        with contextlib.suppress(OSError):  # a disk that has become read-only still serves
            _stamp(fd)
        self._count_use(name, item.nbytes)
        return Outcome.OK

    def _write_one(self, item: Item) -> Outcome:
        if not item.lies_in(len(self._buffer)):
            return Outcome.FAILED
        name = _object_name(item.key)
        if self._is_stored(name, item.nbytes):
            return Outcome.OK
        with self._mutex:
            if not self._make_room(item.nbytes):
                return Outcome.FULL
            self._ledger.reserved_bytes += item.nbytes
        try:
            return self._store(name, self._buffer[item.offset : item.offset + item.nbytes])
        finally:
            with self._mutex:
                self._ledger.reserved_bytes -= item.nbytes
            self._look_again_if_shared()

    def _delete_one(self, key: str) -> Outcome:
        name = _object_name(key)
        with self._mutex:
            try:
                os.unlink(self._path(name))
            except FileNotFoundError:
                self._ledger.forget(name)
                return Outcome.ABSENT
            except OSError:
                return Outcome.FAILED
            self._ledger.forget(name)
            return Outcome.OK

    # publication

    def _store(self, name: str, content: memoryview) -> Outcome:
        """Publish; once more after making disk room, or after somebody removed the directories."""
        problem = self._publish(name, content)
        if problem == errno.ENOENT:
            with contextlib.suppress(OSError):  # then the next try meets the same and tells
                self._make_directories()
            problem = self._publish(name, content)
        elif problem in _NO_ROOM and self._free_disk(content.nbytes):
            problem = self._publish(name, content)
        if problem in _NO_ROOM:
            return Outcome.FULL
        return Outcome.FAILED if problem else Outcome.OK

    def _publish(self, name: str, content: memoryview) -> int:
        """The errno of what went wrong, 0 for nothing. Leaves the whole object or nothing."""
        temporary = self._open_claim().temporary_path()
        try:
            _create(temporary, content)
            with self._mutex:
                self._rename(temporary, name)
                self._ledger.add(name, content.nbytes)
                self._unchecked_bytes += content.nbytes
        except OSError as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            return error.errno or errno.EIO
        return 0

    def _rename(self, temporary: str, name: str) -> None:
        try:
            os.rename(temporary, self._path(name))
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.mkdir(os.path.dirname(self._path(name)), 0o700)
            os.rename(temporary, self._path(name))

    def _is_stored(self, name: str, nbytes: int) -> bool:
        """Whether that object, of that length, is there already; then it counts as used just now."""
        path = self._path(name)
        try:
            found = os.stat(path, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                return False
            _stamp(path)
        except OSError:
            return False
        self._count_use(name, nbytes)
        return True

    def _count_use(self, name: str, nbytes: int) -> None:
        with self._mutex:
            if not self._ledger.touch(name, nbytes) and os.path.lexists(self._path(name)):
                self._ledger.add(name, nbytes)  # another process wrote it

    # room

    def _make_room(self, nbytes: int) -> bool:
        """With the mutex held: evict until `nbytes` more fit. Where that cannot be, nothing is evicted."""
        if self._ledger.excess_bytes(nbytes) > 0:
            self._retry_one_stuck()
        excess_bytes = self._ledger.excess_bytes(nbytes)
        return excess_bytes <= 0 or self._evict(excess_bytes)

    def _free_disk(self, nbytes: int) -> bool:
        """The disk is full before the capacity is: give up as much as is to be written."""
        with self._mutex:
            return self._evict(nbytes)

    def _evict(self, need_bytes: int) -> bool:
        """With the mutex held: delete the least recently used. One that cannot be deleted steps aside."""
        if need_bytes > self._ledger.evictable_bytes:
            return False
        freed_bytes = 0
        while freed_bytes < need_bytes and (oldest := self._ledger.oldest()) is not None:
            name, nbytes = oldest
            if self._discard(name):
                freed_bytes += nbytes
        return freed_bytes >= need_bytes

    def _retry_one_stuck(self) -> None:
        """One per eviction, so that a directory full of stuck objects costs each write one attempt."""
        name = self._ledger.longest_stuck()
        if name is not None:
            self._discard(name)

    def _discard(self, name: str) -> bool:
        try:
            os.unlink(self._path(name))
        except FileNotFoundError:
            pass  # another process was faster
        except OSError:
            self._ledger.set_aside(name)
            return False
        self._ledger.forget(name)
        return True

    # the directory

    def _make_directories(self) -> None:
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        for path in (self._objects, self._writing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.stat(path, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise StorageError(
                    f"storage directory {self._root}: {path} is not a directory of the daemon's user; "
                    "choose another `path`"
                )
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.chmod(path, 0o700)

    def _look_through(self) -> None:
        """Count what is there, in the order of use, and evict down to the capacity."""
        with self._mutex:
            self._ledger.start_again((name, nbytes) for _, name, nbytes in sorted(_scan(self._objects)))
            self._unchecked_bytes = 0
            self._make_room(0)

    def _look_again_if_shared(self) -> None:
        if self._unchecked_bytes * 4 < self._ledger.capacity_bytes:
            return
        with contextlib.suppress(OSError):  # ping tells of a directory that cannot be read
            self._unchecked_bytes = 0
            if self._open_claim().others_alive():
                self._look_through()

    def _write_probe(self, claim: Claim) -> None:
        path = claim.temporary_path()
        try:
            _create(path, memoryview(_PROBE))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _open_claim(self) -> Claim:
        if self._claim is None:
            raise StorageError(f"storage directory {self._root} is closed")
        return self._claim

    def _path(self, name: str) -> str:
        return f"{self._objects}/{name[:2]}/{name}"

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(
            f"storage directory {self._root} cannot be used: {error.strerror} "
            f"({error.filename or self._root}): {_REMEDIES.get(error.errno or 0, 'choose another `path`')}"
        )


_REMEDIES = {
    errno.EACCES: "let the daemon's user read, write and enter it, or choose another `path`",
    errno.EPERM: "let the daemon's user read, write and enter it, or choose another `path`",
    errno.EROFS: "the file system is read-only: mount it writable or choose another `path`",
    errno.ENOSPC: "free disk space, lower `capacity_bytes` or choose another `path`",
    errno.EDQUOT: "the user's quota is used up: raise it, lower `capacity_bytes` or choose another `path`",
    errno.ENOTDIR: "a part of `path` is a file: remove it or choose another `path`",
    errno.EEXIST: "`path` is a file: remove it or choose another `path`",
}


def _absolute(path: str) -> str:
    expanded = os.path.expanduser(path)
    if not path or expanded.startswith("~"):
        raise StorageError(f"storage directory {path!r}: no such home directory; write an absolute `path`")
    return os.path.abspath(expanded)


def _object_name(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp(file: int | str) -> None:
    """Used just now, finer than the kernel's own stamps, which tie within a timer tick. Raises OSError."""
    now_ns = time.time_ns()
    os.utime(file, ns=(now_ns, now_ns))


def _scan(objects: str) -> Iterator[tuple[int, str, int]]:
    """Time of last use, name and size of every object. What is no object of ours is left alone."""
    for shard in os.scandir(objects):
        if not shard.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(shard):
            if _NAME.match(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another process deleted it just now
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_mtime_ns, entry.name, found.st_size


def _fill(fd: int, target: memoryview) -> bool:
    """Read exactly the target from the file's start. False when the file is shorter than it said."""
    done = 0
    while done < len(target):
        n_read = os.preadv(fd, [target[done:]], done)
        if n_read == 0:
            return False
        done += n_read
    return True


def _create(path: str, content: memoryview) -> None:
    """A new file with that content, used just now. On OSError it may be there in part."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < len(content):
            done += os.write(fd, content[done:])
        _stamp(fd)
    finally:
        os.close(fd)
