"""Two machines on one: network namespaces, and a link between them whose delay is kept by this process.

The kernel's own delay (`tc … netem`) is a module that many machines lack; TUN devices are nearly everywhere.
Needs root.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = tuple(f"clipctl-{side}-{os.getpid()}" for side in "ab")  # tests in other processes have their own
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
_NETWORK = 0x40000000  # CLONE_NEWNET
PACKET_BYTES = 65536


class Link:
    """Packets from one side come out of the other, later. Counts the bytes of each side."""

    def __init__(self, delay_s, bytes_per_s=float("inf")):
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self._free = [0.0, 0.0]  # when each side has sent all that it was given
        self.sent_bytes = [0, 0]
        self._ends = [_open_tun(name) for name in NAMES]
        self._waiting, self._number = [], 0  # (when it is due, a number that keeps the order, to whom, packet)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self):
        while not self._stopped.is_set():
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 0.05
            readable, _, _ = select.select(self._ends, [], [], min(wait_s, 0.05))
            for end in readable:
                side = self._ends.index(end)
                with suppress(BlockingIOError):
                    packet = os.read(end, PACKET_BYTES)
                    self.sent_bytes[side] += len(packet)
                    self._number += 1
                    self._free[side] = max(time.monotonic(), self._free[side]) + len(packet) / self.bytes_per_s
                    due = self._free[side] + self.delay_s
                    heapq.heappush(self._waiting, (due, self._number, 1 - side, packet))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, side, packet = heapq.heappop(self._waiting)
                with suppress(OSError):
                    os.write(self._ends[side], packet)


def _open_tun(namespace):
    """A device inside a namespace; its other end is a file here."""
    with open("/proc/self/ns/net") as home, open(f"/var/run/netns/{namespace}") as there:
        _enter(there)
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"link0", _TUN_WITHOUT_HEADER))
        finally:
            _enter(home)
    return tun


def _enter(namespace):
    """For this thread; Python itself can only since 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def two_machines(delay_s, bytes_per_s=float("inf")):
    """Two namespaces that reach each other with a delay each way; commands run there with `inside(side)`."""
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        with Link(delay_s, bytes_per_s) as link:
            for name, own, other in zip(NAMES, ADDRESSES, reversed(ADDRESSES), strict=True):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "addr", "add", own, "peer", other, "dev", "link0")
                _ip("-n", name, "link", "set", "link0", "mtu", "60000", "up")
            yield link
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def inside(side):
    """The beginning of a command that runs on one of the machines."""
    return ["ip", "netns", "exec", NAMES[side]]


def can_be_made():
    """Whether this machine lets us."""
    try:
        with two_machines(0.0):
            return True
    except (OSError, subprocess.CalledProcessError, FileNotFoundError):
        return False


def _ip(*words):
    subprocess.run(["ip", *words], capture_output=True, check=True)
