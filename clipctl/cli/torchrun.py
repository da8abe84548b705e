"""--nproc N: PyTorch's own launcher starts this command N times, as `torchrun` would."""

import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from clipctl.errors import ClipctlError, ExitCode, Stopped, TrainingError

if TYPE_CHECKING:
    from clipctl.training.distributed import World

AFTER_FIRST_S = 2.0  # that others leave after rank 0, so that its exit code is the one that counts
CPU_VARIABLE = "OMP_NUM_THREADS"  # torchrun sets it to 1; clipctl counts threads itself


def joined(processes: int | None) -> "World | None":
    """The processes that this one belongs to; None if it is alone. If several are asked for, they are started, and this
    one exits as they do."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from clipctl.training import distributed

        return distributed.join()
    if processes is not None and processes > 1:
        start(processes, without_processes(sys.argv[1:]))
    return None


@contextmanager
def following() -> Iterator[None]:
    """For every process but rank 0, which does all the reporting."""
    from clipctl.training import distributed

    try:
        yield
    except Stopped as stop:
        raise typer.Exit(stop.exit_code) from None
    except (ClipctlError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not distributed.is_lost_rank(error):
            raise
        time.sleep(AFTER_FIRST_S)
        raise typer.Exit(getattr(error, "exit_code", ExitCode.FAILURE)) from None


@contextmanager
def leading(world: "World | None") -> Iterator[None]:
    """For rank 0, or a lone process: losing another process becomes an error with a message."""
    try:
        yield
    except RuntimeError as error:
        from clipctl.training import distributed

        if world is None or not distributed.is_lost_rank(error):
            raise
        raise TrainingError("another process ended or is not responding", "start the command again") from error


def start(processes: int, arguments: list[str]) -> None:
    """Run `clipctl ARGUMENTS` in several processes on this machine; exits as they do."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the processes say themselves what is wrong
    os.environ.setdefault(CPU_VARIABLE, "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "clipctl", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        raise typer.Exit(128 - code if code < 0 else code) from None
    except SignalException as error:
        raise typer.Exit(128 + error.sigval) from None
    raise typer.Exit(ExitCode.OK)


def without_processes(arguments: list[str]) -> list[str]:
    """The arguments of this command, except --nproc."""
    kept: list[str] = []
    skips_value = False
    for argument in arguments:
        if skips_value:
            skips_value = False
        elif argument == "--nproc":
            skips_value = True
        elif not argument.startswith("--nproc="):
            kept.append(argument)
    return kept
