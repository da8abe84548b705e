"""The rules of Apple's GPU, enforced on the CPU: what breaks one raises an AssertionError that names the operation.

    with StrictMps() as rules:
        train_step(state, batch, lr=1e-3)
    assert len(rules.syncs) <= 1

Two levels are watched. Functions as the model calls them, where a layer still has the shape that Apple's own kernel
would see; and the operations below autograd, those of the backward pass among them. The rules:

- Nothing is float64: the device has no such type.
- Attention gets contiguous q, k and v, and no dropout together with a mask.
- Linear layers and convolutions get contiguous inputs and parameters.
- A linear layer with a bias gets no (B, 1, in), where the bias was lost (pytorch issue 188438); pooled tokens are
  (B, in). One without a bias gets nothing but (B, in) in half precision, where results varied (issue 180776).
- A matrix product gets matrices that are contiguous or the transpose of one (a linear layer's own weight, and what its
  backward pass needs): both are one flag to the kernel. Slices and expanded matrices are not.
- What addcmul_, addcdiv_ and the fused optimizer work on is contiguous: the update of a strided tensor was wrong
  (issue 118115).

Left out are the gradients that reach attention and convolution: they are strided, as both results are transposed by
what follows, and it is autograd that makes them.
"""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
IN_PLACE = {"aten::addcmul_", "aten::addcdiv_", "aten::_fused_adamw_"}
SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
# Reads that the CPU does without an operation.
SYNCING_METHODS = {Tensor.tolist: "tolist", Tensor.cpu: "cpu", Tensor.numpy: "numpy"}


class StrictMps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []  # every time that the host would have had to wait
        self.shapes: Counter[tuple] = Counter()  # (operation, shape and type of each tensor): how often
        self._calls = _Calls(self.syncs)

    def __enter__(self) -> "StrictMps":
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._calls.__exit__(*exception)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, given = op._schema.name, tensors_in((args, kwargs))
        self.shapes[(name, *((tuple(tensor.shape), tensor.dtype) for tensor in given))] += 1
        if name in SYNCS:
            self.syncs.append(name)
        if name in PRODUCTS:
            matrices = given[-2:]  # before them there may be what is added
            require(all(map(is_matrix, matrices)), op, f"of matrices with strides {strides(matrices)}")
        if name in IN_PLACE:
            written = [tensor for tensor in given if tensor.dim() > 0]
            require(all(map(Tensor.is_contiguous, written)), op, f"on strides {strides(written)}")
        result = op(*args, **kwargs)
        require(all(tensor.dtype != torch.float64 for tensor in (*given, *tensors_in(result))), op, "in float64")
        return result


class _Calls(TorchFunctionMode):
    """Calls as the model makes them."""

    def __init__(self, syncs: list[str]) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in SYNCING_METHODS:
            self._syncs.append(SYNCING_METHODS[function])
        if function is F.linear:
            _check_linear(*args, **kwargs)
        if function in (F.conv2d, torch.conv2d):
            require_contiguous(tensors_in((args, kwargs)), "conv2d")
        if function is F.scaled_dot_product_attention:
            _check_attention(*args, **kwargs)
        return function(*args, **kwargs)


def _check_linear(x, weight, bias=None):
    require_contiguous([tensor for tensor in (x, weight, bias) if tensor is not None], "linear")
    if bias is not None:
        require(x.dim() < 3 or x.shape[-2] != 1, "linear", f"with a bias on a single token, {tuple(x.shape)}")
    else:
        half = x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
        require(x.dim() < 3 or not half, "linear", f"without a bias in half precision on {tuple(x.shape)}")


def _check_attention(query, key, value, attn_mask=None, dropout_p=0.0, **kwargs):
    require_contiguous([query, key, value], "scaled_dot_product_attention")
    require(attn_mask is None or dropout_p == 0, "scaled_dot_product_attention", "with a mask and dropout")


def require(holds: bool, op, problem: str) -> None:
    assert holds, f"{op} {problem}"


def require_contiguous(tensors: list[Tensor], op) -> None:
    require(all(map(Tensor.is_contiguous, tensors)), op, f"of strides {strides(tensors)}")


def is_matrix(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


def strides(tensors: list[Tensor]) -> str:
    return ", ".join(f"{tensor.stride()} (shape {tuple(tensor.shape)})" for tensor in tensors)


def tensors_in(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]
