"""Files that hold compiled kernels: whose files are trusted, and whether they are complete.

A library runs whatever it likes as soon as it is loaded, and ends the process if it was cut short.
So it is sealed: a stamp that says what it was built from and for, and a digest of all of it, follow the
library in the same file, where loaders ignore them. Nothing is loaded before its digest is checked,
and the cache, which nobody names explicitly, is used only where no other user could write.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from ...errors import KernelsError

_MAGIC: Final = b"hmpx-kernels-1\n"
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_LENGTH_BYTES: Final = 4

#: Kernels take about 100 KB; what is much larger is something else, such as /dev/zero.
_MOST_BYTES: Final = 1 << 26

#: A process that was killed while it wrote can't remove its file; others do after so long.
_ABANDONED_S: Final = 3600.0

#: Where Linux shows open files by their descriptors.
_DESCRIPTORS: Final = Path("/proc/self/fd")


@dataclass(frozen=True)
class Stamp:
    """What a library was built from and for.

    Attributes:
        source: The digest of the C file: how kernels are called, and which values they give.
        system: The operating system and the machine's architecture.
        features: Instruction sets that the processor must have, by the system's names.
    """

    source: str
    system: str
    features: tuple[str, ...]


def seal(library: bytes, stamp: Stamp) -> bytes:
    """Returns the content of a file that `unseal` accepts."""
    text = json.dumps(asdict(stamp)).encode()
    content = library + text + len(text).to_bytes(_LENGTH_BYTES, "big") + _MAGIC
    return content + hashlib.sha256(content).digest()


def unseal(content: bytes) -> Stamp:
    """Returns the stamp of a sealed library.

    Raises:
        KernelsError: The file is damaged, or was never sealed.
    """
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if not body.endswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        raise KernelsError("it is damaged, or was not written by `hmpx kernels --build`")
    end = len(body) - len(_MAGIC) - _LENGTH_BYTES
    length = int.from_bytes(body[end : end + _LENGTH_BYTES], "big")
    try:
        fields = json.loads(body[end - length : end])
        return Stamp(fields["source"], fields["system"], tuple(fields["features"]))
    except (ValueError, KeyError, TypeError) as error:
        raise KernelsError("its stamp can't be read") from error


def read(path: Path) -> bytes:
    """Returns the content of the regular file at ``path``, whoever owns it.

    Raises:
        KernelsError: It can't be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _content(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KernelsError(error.strerror) from error


def load(path: Path) -> ctypes.CDLL:
    """Returns the library at ``path``, whose content must have been checked.

    Raises:
        KernelsError: The system's loader refuses it.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsError(str(error)) from error


def write(path: Path, content: bytes) -> None:
    """Puts a file that others may read at ``path``, whole or not at all.

    Raises:
        KernelsError: It can't be written.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _write(folder, path.name, content, mode=0o644)
        finally:
            os.close(folder)
    except OSError as error:
        raise KernelsError(f"{path} can't be written: {error.strerror}") from error


#: How the names of files begin that are being written.
_UNFINISHED: Final = ".unfinished-"


class PrivateFolder:
    """A folder of this user's, or of root's, that no other user can write to.

    It is kept open, and its files are reached through the descriptor: whoever can write to a folder
    further up could make the path mean another folder once this one has been checked.
    """

    def __init__(self, path: Path) -> None:
        """Opens the folder.

        Raises:
            KernelsError: It is missing, or other users could have written to it.
        """
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags)
        except OSError as error:
            reason = "it is a symbolic link" if path.is_symlink() else error.strerror
            raise KernelsError(f"{path} can't be used: {reason}") from error
        try:
            _check_private(os.fstat(self._descriptor))
        except KernelsError as error:
            self.close()
            raise KernelsError(f"{path} can't be used: {error}") from error

    @classmethod
    def create(cls, path: Path) -> PrivateFolder:
        """Returns the folder at ``path``, which is made if it is missing, like those above it.

        Raises:
            KernelsError: It can't be made, or other users could have written to it.
        """
        try:
            for each in (*reversed(path.parents), path):
                if not each.exists():
                    with contextlib.suppress(FileExistsError):  # another process was faster
                        each.mkdir(mode=0o700)
        except OSError as error:
            raise KernelsError(f"{path} can't be made: {error.strerror}") from error
        return cls(path)

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self._descriptor)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if there is none.

        Raises:
            KernelsError: It is not a regular file, or another user could have written it.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KernelsError(error.strerror) from error
        try:
            _check_private(os.fstat(descriptor))
            return _content(descriptor)
        except OSError as error:
            raise KernelsError(error.strerror) from error
        finally:
            os.close(descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Puts a file into the folder, whole or not at all, in place of any other of its name.

        Raises:
            KernelsError: It can't be written.
        """
        self._remove_abandoned()
        try:
            _write(self._descriptor, name, content, mode=0o600)
        except OSError as error:
            raise KernelsError(f"{self.path / name} can't be written: {error.strerror}") from error

    def load(self, name: str) -> ctypes.CDLL:
        """Returns a library of the folder's, whose content must have been checked.

        Raises:
            KernelsError: The system's loader refuses it.
        """
        folder = _DESCRIPTORS / str(self._descriptor)
        if not folder.is_dir():
            _check_parents(self.path)
            folder = self.path
        try:
            return load(folder / name)
        except KernelsError as error:
            raise KernelsError(str(error).replace(str(folder), str(self.path))) from error

    def load_once(self, content: bytes) -> ctypes.CDLL:
        """Returns a library loaded from its content; its file is removed.

        Raises:
            KernelsError: It can't be written, or the system's loader refuses it.
        """
        # Under a new name each time: loaders return what they have loaded under the same name.
        name = _unfinished()
        try:
            self.write(name, content)
            return self.load(name)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)

    def _remove_abandoned(self) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self._descriptor):  # noqa: PTH208  # it has no path
                if not name.startswith(_UNFINISHED):
                    continue
                status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                if time.time() - status.st_mtime > _ABANDONED_S:
                    os.unlink(name, dir_fd=self._descriptor)


def _write(folder: int, name: str, content: bytes, mode: int) -> None:
    """Writes a file under another name first, so that no process ever finds half of it."""
    unfinished = _unfinished()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _removed_on_error(folder, unfinished):
        with os.fdopen(os.open(unfinished, flags, mode, dir_fd=folder), "wb") as file:
            file.write(content)
        os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)


def _unfinished() -> str:
    return f"{_UNFINISHED}{secrets.token_hex(8)}"


@contextlib.contextmanager
def _removed_on_error(folder: int, name: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def _content(descriptor: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise KernelsError("it is not a regular file")
    if status.st_size > _MOST_BYTES:
        raise KernelsError("it is too large to be a library of kernels")
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(_MOST_BYTES)


def _check_private(status: os.stat_result) -> None:
    """Raises KernelsError if a user other than this one and root could have written there."""
    if status.st_uid not in (0, os.geteuid()):
        raise KernelsError(f"it belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise KernelsError(f"other users can write to it (mode {mode:o}; remove it, or chmod go-w)")


def _check_parents(path: Path) -> None:
    """Raises KernelsError if another user could put something else in the place of ``path``.

    In a sticky folder such as /tmp, only its owner can move a file away.
    """
    for parent in path.resolve().parents:
        status = parent.stat()
        is_sticky = status.st_mode & stat.S_ISVTX and status.st_uid in (0, os.geteuid())
        try:
            if not is_sticky:
                _check_private(status)
        except KernelsError as error:
            raise KernelsError(f"{parent} can't be used: {error}") from error
