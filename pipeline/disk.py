"""Durable writing on a local disk: names that are given once, and folders whose names are on the disk."""

from __future__ import annotations

import errno
import os


def link_new(temporary: str, final: str) -> bool:
    """Give a complete file its name, unless something has it: of several processes one gets True."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        if os.path.isdir(final):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), final) from None
        # NFS can say so of a request that it has done, when its first answer was lost: our file has two names then.
        return os.stat(temporary).st_nlink > 1
    return True


def fsync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot do this for a folder
            raise
    finally:
        os.close(descriptor)
