"""Crash states of real file systems: ext4, XFS and btrfs on a disk that logs every write and every flush.

The disk is a file that :mod:`~tests.filesystems.block_file` serves through FUSE, with a loop device on it
(:mod:`~tests.filesystems.device`). The log is taken below the file system, so it has what any process did: the
background writer is a process of its own here, and nothing of the library is replaced. :mod:`~tests.filesystems.states`
chooses what a loss of power leaves: all that was flushed, and any part of what was not.
:mod:`~tests.filesystems.trial` mounts each of these states and reads it with the library.
``make test-filesystems`` goes through thousands of them (:mod:`~tests.filesystems.campaign`).

:mod:`tests.crash.power_loss` is the other witness: it knows what POSIX allows, and these file systems promise more.
This one knows what they do.
"""
