"""The processes that train together, and what they tell each other: PyTorch's process group under `torchrun`.

Rank 0 plans, owns the run directory, writes and saves; the others load their part of each batch, compute its embeddings
and pass its gradients on. What depends on a clock or a signal is decided together, so that all take the same step.
"""

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn import Parameter

from clipctl.errors import ClipctlError, DeviceError, TrainingError
from clipctl.hardware import cpu

T = TypeVar("T")
WAIT_S = 300.0  # for the slowest, to arrive or in a step; one that is gone is noticed at once
LONG_WAIT_S = 6 * 3600.0  # where others wait while one works: it plans, indexes, evaluates or saves
BUCKET_BYTES = 25 * 2**20  # gradients that are sent together


@dataclass(frozen=True)
class World:
    """This process among `size`, numbered from 0; `local_rank` and `local_size` count those of this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # --- tensors --------------------------------------------------------------------------------------------------

    def place_of(self, pairs: int) -> tuple[slice, list[int]]:
        """Which rows of the whole batch the pairs of this process are, and how many each process has."""
        counts = [int(count) for count in self.gather(torch.tensor([pairs]), [1] * self.size)]
        first = sum(counts[: self.rank])
        return slice(first, first + pairs), counts

    def gather(self, tensor: Tensor, counts: list[int]) -> Tensor:
        """The rows of all processes, in the order of their ranks; `counts` says how many each has."""
        longest = max(counts)
        padded = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place: the same bits everywhere."""
        dist.all_reduce(tensor)
        return tensor

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Until all are here."""
        dist.barrier()

    def wait_at_most(self, seconds: float) -> None:
        """How long this process waits for the others from now on, before it takes them for lost."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def place_on(self, device: str) -> str:
        """This process's own device of a kind, and no more threads than its part of the cores."""
        torch.set_num_threads(threads_each(self.local_size))
        return f"cuda:{self.local_rank}" if device == "cuda" else device

    # --- facts ----------------------------------------------------------------------------------------------------

    def ask(self, *numbers: int) -> list[tuple[int, ...]]:
        """What every process says, in the order of their ranks."""
        rows = self.gather(torch.tensor([numbers]), [1] * self.size)
        return [tuple(row) for row in rows.tolist()]

    def from_first(self, value: Any) -> Any:
        """What rank 0 has."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_of(self, value: Any) -> list[Any]:
        """What every process has, in the order of their ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


class GradientSum:
    """The sum of all processes' gradients, sent while the backward pass is still going on.

    Each process has the gradients of its own pairs, of a loss that is a sum over pairs: so a sum, not a mean. Gradients
    are sent in buckets, last blocks first, because those are finished first. All processes send the buckets in
    the same order, whatever is finished first in one of them. A bucket that has been sent holds complete gradients, so
    a process that runs out of memory after that repeats its backward pass without sending the bucket again.
    """

    def __init__(self, towers: Iterable[Iterable[Parameter]]) -> None:
        """`towers`: the parameters of each, in the order in which the backward pass goes through the towers."""
        trained = (one for tower in towers for one in reversed(list(tower)) if one.requires_grad)
        self._buckets = list(_buckets(trained))
        self._place = {parameter: place for place, bucket in enumerate(self._buckets) for parameter in bucket}
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, dist.Work]] = []

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Send each bucket as soon as its gradients, and those of the buckets before it, are complete."""
        self._missing = [len(bucket) for bucket in self._buckets]
        hooks = [
            one.register_post_accumulate_grad_hook(self._complete)  # type: ignore[no-untyped-call]
            for one in self._place
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """Send the rest, wait for all, and replace each gradient by its sum."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            gradients = _gradients(bucket)
            for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _complete(self, parameter: Parameter) -> None:
        self._missing[self._place[parameter]] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        flat = torch.cat([one.flatten() for one in _gradients(self._buckets[len(self._sent)])])
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))


def _gradients(bucket: list[Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in bucket if parameter.grad is not None]


def _buckets(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    bucket, size_bytes = list[Parameter](), 0
    for parameter in parameters:
        if bucket and (size_bytes + parameter.nbytes > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(parameter)
        size_bytes += parameter.nbytes
    if bucket:
        yield bucket


def join(wait_s: float = WAIT_S) -> World:
    """Meet the other processes that torchrun started."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    host = os.environ.get("MASTER_ADDR", "")
    if processes_here(1) < int(os.environ["WORLD_SIZE"]):
        check_reachable(host)
    if interface := interface_to(host):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    address = f"{host}:{os.environ.get('MASTER_PORT')}"
    timeout = timedelta(seconds=wait_s)
    try:
        with ended_by_signals():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            # torchrun's store outlives an attempt: without its own place, the next one finds addresses of the dead.
            store = PrefixStore(f"attempt {restarts()}", store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise _not_met(address, wait_s, error) from None
    atexit.register(leave)  # threads of a group that is not left abort the interpreter
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world = World(dist.get_rank(), dist.get_world_size(), local_rank, processes_here(1))
    world.wait_at_most(LONG_WAIT_S)
    return world


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end this process while it waits for others: no handler of Python's own runs in there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interface_to(address: str) -> str | None:
    """The network interface from which an address is reached, by name; None if that cannot be found out.

    Left to itself, gloo takes the one that this machine's name stands for: on many laptops that is 127.0.1.1, where no
    other machine finds it.
    """
    own = own_address(address)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries):
            return name
    return None


def own_address(address: str) -> str | None:
    """The address that this machine has for the one at `address`; None if that cannot be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def check_reachable(address: str) -> None:
    """Raise if an address that several machines were given is one that each has for itself."""
    own = own_address(address)
    if own is not None and ip_address(own).is_loopback:
        raise DeviceError(
            f"{address} means this machine itself ({own}): other machines cannot reach it",
            "pass the first machine's address in the network, not its name: torchrun --master-addr 192.168.1.10",
        )


def prepared(world: World | None, make: Callable[[], T]) -> T:
    """What `make` returns in this process. What goes wrong in any of them is raised in all."""
    if world is None:
        return make()
    found, problem = None, None
    try:
        found = make()
    except ClipctlError as error:
        problem = error
    report = None if problem is None else (type(problem), str(problem), problem.hint, socket.gethostname())
    for rank, other in enumerate(world.all_of(report)):
        if other is not None:
            with raised_in_all():
                if problem is not None and rank == world.rank == 0:
                    raise problem
                kind, words, hint, host = other
                raise kind(f"rank {rank} on {host}: {words}", hint)
    assert found is not None
    return found


@contextmanager
def raised_in_all() -> Iterator[None]:
    """What goes wrong inside goes wrong in every process."""
    try:
        yield
    except ClipctlError as error:
        error.is_raised_in_all = True
        raise


def processes_here(ranks: int) -> int:
    """How many of the processes that train together are on this machine; all of them unless torchrun says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def own_device() -> str:
    """What one of several processes computes on: processors are shared, CUDA devices are not."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def threads_each(processes: int) -> int:
    """For each of the processes of this machine."""
    return max(1, cpu.usable_cores() // processes)


def launcher() -> list[float] | None:
    """Which torchrun started this process: its number and when it began, or None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        return [os.getppid(), psutil.Process(os.getppid()).create_time()]
    except psutil.Error:
        return None


def restarts() -> int:
    """How often torchrun has started these processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class LostRankError(TrainingError):
    """Another process is gone, or does not answer."""


def is_lost_rank(error: Exception) -> bool:
    """Whether an error says that another process does not answer."""
    if isinstance(error, OSError):  # of a socket or file of our own: torch raises others
        return False
    signs = ("Connection closed", "Connection reset", "Timed out", "timed out", "Broken pipe", "gloo", "NCCL")
    return dist.is_initialized() and any(sign in str(error) for sign in signs)


def _not_met(address: str, wait_s: float, error: Exception) -> DeviceError:
    rank, size = os.environ.get("RANK"), os.environ["WORLD_SIZE"]
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return DeviceError(f"{address} is taken by another program", "choose another port: torchrun --master-port N")
    return DeviceError(
        f"rank {rank} waited {wait_s:g} s at {address} for all {size} processes",
        "start the same number everywhere, and let every machine reach that address and port",
    )
