"""A folder to one process alone: of two, one would undo the other's work."""

import contextlib
import errno
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
# Of file systems that know no locks, as some that machines share: there, no folder is ever taken
_UNKNOWN = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


class FolderBusy(RuntimeError):
    """Another process is at work in the folder, which the message names."""


@contextlib.contextmanager
def claimed(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """The folder to this process, until the end or its death. Args: patience: seconds to wait for another process.

    Raises: FolderBusy where another process has it for longer.
    """
    deadline = time.monotonic() + patience
    with open(folder / LOCK, "w") as lock:
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise FolderBusy(f"{folder} is at work in another process; wait for it, or end it")
            time.sleep(0.2)
        yield


def is_claimed(folder: Path) -> bool:
    """Whether a process is at work in a folder."""
    if not (folder / LOCK).is_file():
        return False
    with open(folder / LOCK) as lock:
        return not _locked(lock)


def _locked(lock) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    return True
