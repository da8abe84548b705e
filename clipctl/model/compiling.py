"""torch.compile, if asked for, for the image tower's blocks, which do most of the work.

They are all alike, so one is compiled and serves all, and their shapes hardly vary, so that each shape gets code of its
own: results do not depend on what ran before, and a resumed run computes the same bits. Captions vary in length; their
tower is not compiled.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from clipctl.errors import DeviceError
from clipctl.hardware.devices import Device
from clipctl.hardware.processes import signals_held
from clipctl.model.clip import Clip


def compile_blocks(model: Clip) -> None:
    """Compile the blocks from now on; the compiler runs in the first step of each batch size. The last block is
    computed in another way, for one token."""
    for block in model.image.blocks[:-1]:
        block.compile(backend=_inductor, dynamic=False)


def uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """Compute without it: compiling again for something done once an epoch would not pay."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def check_compiler(device: Device) -> None:
    """Compile something small, so that what cannot work is refused before a run begins."""
    if device.image.type not in ("cpu", "cuda"):  # on Apple's GPU, compiled norms were wrong (pytorch issue 191976)
        raise DeviceError(f"--compile is for cpu and cuda, not {device.label}", "leave --compile out")
    try:
        torch.compile(torch.neg, backend=_inductor)(torch.zeros(2, device=device.image))
    except Exception as error:  # whatever a compiler may say
        said = [line for line in str(error).splitlines() if line.strip()]
        raise DeviceError(
            f"torch.compile does not work here: {said[0].strip() if said else type(error).__name__}",
            "it needs a C++ compiler, and Triton on a GPU; or leave --compile out",
        ) from error


def _inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Torch's compiler, in this process. The C++ compiler is shielded from Ctrl-C, which would make it fail, and with
    it the step that is to be finished and saved."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with signals_held(), config.patch(compile_threads=1):
        return compile_fx(graph, list(inputs))
