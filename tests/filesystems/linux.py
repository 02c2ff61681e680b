"""System calls that Python has no names for: mounts, loop devices, a list of mounts of one's own."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
_MS_PRIVATE, _MS_REC = 1 << 18, 1 << 14
_LOOP_CONTROL, _LOOP_CTL_GET_FREE = "/dev/loop-control", 0x4C82
_LOOP_CONFIGURE, _LOOP_CLR_FD = 0x4C0A, 0x4C01
_LO_FLAGS_DIRECT_IO = 16
# struct loop_config: fd, block_size, loop_info64 (of which only lo_flags is set), reserved.
_LOOP_CONFIG = struct.Struct("<II 40x 12x I 176x 64x")
_BTRFS_CONTROL, _BTRFS_IOC_FORGET_DEV = "/dev/btrfs-control", 0x50009405
_BTRFS_NAME = struct.Struct("<q4088s")
_PATIENCE = 100


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


@functools.cache
def own_mounts() -> None:
    """From now on nobody else sees what this process mounts, and it goes with the process."""
    _check(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _check(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "/")


def mount(source: str, target: str, kind: str, options: str = "") -> None:
    _check(_LIBC.mount(source.encode(), target.encode(), kind.encode(), 0, options.encode()), f"mount of {source}")


def unmount(target: str) -> None:
    _check(_LIBC.umount2(target.encode(), 0), f"unmount of {target}")


def sync_all_of(descriptor: int) -> None:
    """Writes all that the file system of a descriptor has in memory."""
    _check(_LIBC.syncfs(descriptor), "syncfs")


def attach_loop(path: str) -> str:
    """A loop device on a file, past the page cache: what is written to it is written to the file at once."""
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_PATIENCE):
            device = _free_loop()
            descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(descriptor, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(backing, 512, _LO_FLAGS_DIRECT_IO))
                return device
            except OSError as error:
                if error.errno != errno.EBUSY:  # another process was faster
                    raise
            finally:
                os.close(descriptor)
        raise OSError(errno.EBUSY, "no loop device is free", _LOOP_CONTROL)
    finally:
        os.close(backing)


def _free_loop() -> str:
    control = os.open(_LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        return f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
    finally:
        os.close(control)


def detach_loop(device: str) -> None:
    descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _LOOP_CLR_FD)
    finally:
        os.close(descriptor)


def forget_btrfs(device: str) -> None:
    """Makes btrfs forget what it has read from a device: an older state is to come."""
    control = os.open(_BTRFS_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(control, _BTRFS_IOC_FORGET_DEV, bytearray(_BTRFS_NAME.pack(0, device.encode())))
    finally:
        os.close(control)
