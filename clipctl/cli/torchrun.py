"""--nproc N: PyTorch's own launcher starts this command N times, as `torchrun` would."""

import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from clipctl.cli import output
from clipctl.errors import ClipctlError, ExitCode, Stopped

if TYPE_CHECKING:
    from clipctl.training.distributed import World

AFTER_FIRST_S = 2.0  # that others leave after rank 0, so that its exit code is the one that counts
# Unless the user has set them. torchrun itself sets one thread, and clipctl counts threads; a process that is asked to
# stop finishes its step and saves, and would be killed in the midst of it after 30 s.
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}


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
    """For every process but rank 0: it says only what rank 0 cannot know."""
    from clipctl.training.distributed import LostRankError, is_lost_rank

    try:
        yield
    except Stopped as stop:
        raise typer.Exit(stop.exit_code) from None
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        time.sleep(AFTER_FIRST_S)
        raise typer.Exit(ExitCode.FAILURE) from None
    except ClipctlError as error:
        if error.is_raised_in_all or isinstance(error, LostRankError):
            time.sleep(AFTER_FIRST_S)
        else:
            for problem in error.problems:
                words = f"process {os.environ['RANK']} on {socket.gethostname()}: {problem}"
                output.print_problem(words, problem.hint)
        raise typer.Exit(error.exit_code) from None


@contextmanager
def leading(world: "World | None") -> Iterator[None]:
    """For rank 0, or a lone process: losing another process becomes an error with a message."""
    try:
        yield
    except RuntimeError as error:
        from clipctl.training.distributed import LostRankError, is_lost_rank

        if world is None or not is_lost_rank(error):
            raise
        raise LostRankError("another process ended or is not responding", "start the command again") from error


def start(processes: int, arguments: list[str]) -> None:
    """Run `clipctl ARGUMENTS` in several processes on this machine; exits as they do."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the processes say themselves what is wrong
    os.environ.update({name: value for name, value in VARIABLES.items() if name not in os.environ})
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
