"""Real processes that need not import torch first, which takes longer than most of what is tested.

A server has imported it, but nothing of clipctl, and forks for every program that it is asked for: a process in a
session of its own, with pipes, signals and an exit code, as if Python had been started. What depends on the start or
on variables that are read there is not for it; nor what would find out whether the order of a set matters.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

IMPORTED = "torch._dynamo torch.utils.data safetensors.torch PIL.ImageDraw rich.progress typer yaml psutil pydantic"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def launch(module, *arguments, cwd=".", env=os.environ):
    """`python -m MODULE ARGUMENTS`"""
    if sys.platform == "linux":
        return Program([module, *arguments], os.path.abspath(cwd), dict(env))
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **PIPES)


class Program:
    """As much of subprocess.Popen as is needed."""

    def __init__(self, *request):
        pipes = [os.pipe() for _ in range(3)]
        socket.send_fds(_server(), [json.dumps(request).encode()], [its for _, its in pipes])
        for _, its in pipes:
            os.close(its)
        self.stdout, self.stderr, self._news = (os.fdopen(ours) for ours, _ in pipes)
        self.args, self.pid, self.returncode = request[0], self._told(), None

    def _told(self):
        number = os.read(self._news.fileno(), 4)
        assert len(number) == 4, "the server is gone"
        return int.from_bytes(number, "little", signed=True)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._told()
        return self.returncode

    def poll(self):
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def communicate(self, timeout=None):
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                self.kill()
            return tuple(text.result() for text in texts)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@cache
def _server():
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command, root = [sys.executable, "-m", __name__], Path(__file__).parent.parent
    _server.process = subprocess.Popen(command, cwd=root, stdin=its, start_new_session=True, **PIPES)
    its.close()
    return ours


def _serve(channel):
    """Ends with the tests; returns in every process that is to be a program."""
    while (received := socket.recv_fds(channel, 1 << 20, 3))[0]:
        if os.fork() == 0:  # a process to tell how the program ended
            *outputs, news = received[1]
            if (program := os.fork()) == 0:
                sys.argv, sys.path[0], variables = json.loads(received[0])
                os.setsid()
                os.chdir(sys.path[0])
                os.environ.clear()
                os.environ.update(variables)
                os.write(news, os.getpid().to_bytes(4, "little"))
                for number, handle in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs, news]):
                    if number < 3:
                        os.dup2(handle, number)
                    os.close(handle)
                return channel.detach()
            os.closerange(0, 3)
            for output in outputs:
                os.close(output)
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            os.write(news, code.to_bytes(4, "little", signed=True))
            os._exit(0)
        for handle in received[1]:
            os.close(handle)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


if __name__ == "__main__":
    for name in IMPORTED.split():
        importlib.import_module(name)
    gc.freeze()
    _serve(socket.socket(fileno=0))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
