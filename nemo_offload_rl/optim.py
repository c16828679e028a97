"""AdamW with moments of 16 bits, for the DTensor backend's fp32 parameters; `policy.optimizer.name` may name it.

The arithmetic is torch's in float32. Stored moments are rounded up or down at random, with probabilities that keep
their mean (stochastic rounding). Rounded to nearest, a second moment could not shrink: with a beta of 0.999 a step
takes a thousandth off it, and bfloat16 has no values that close.

The random bits are a hash of the moments' own bits and the step count. So an element's update depends on the element
alone, and is the same bit by bit however parameters are sharded, streamed or resumed.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from nemo_offload_rl.residency import local_tensor

# Elements that are updated at once; a step takes about 24 bytes for each in addition to the states.
PIECE_ELEMENTS = 1 << 23
MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

type MomentDtype = Literal["float32", "bfloat16"]

_LOST_BITS = 16  # of a float32 that becomes a bfloat16
_LARGEST = torch.finfo(torch.bfloat16).max


class AdamW(Optimizer):
    """See the module. With both types float32 it is `torch.optim.AdamW` bit by bit.

    Args:
        params: As for any torch optimizer; float32, DTensors too.
        lr: Learning rate.
        betas: Decay rates of the moments' running averages.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient.
        exp_avg_dtype: Type of the first moment: float32 or bfloat16.
        exp_avg_sq_dtype: Type of the second moment.
        fused: Use torch's fused kernel.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exp_avg_dtype: MomentDtype = "bfloat16",
        exp_avg_sq_dtype: MomentDtype = "bfloat16",
        fused: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if value < 0:
                raise ValueError(f"{name} is {value}, below 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; both must be at least 0 and below 1")
        for name, dtype in {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}.items():
            if dtype not in MOMENT_DTYPES:
                raise ValueError(f"{name} is {dtype}, not one of {', '.join(MOMENT_DTYPES)}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._dtypes = {"exp_avg": MOMENT_DTYPES[exp_avg_dtype], "exp_avg_sq": MOMENT_DTYPES[exp_avg_sq_dtype]}
        self._fused = fused

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient. Takes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self._dtypes.items()}
        count = int(state["step"])
        state["step"] += 1
        assert parameter.grad is not None
        gradient = local_tensor(parameter.grad).reshape(-1)
        updated = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        flat = [gradient, *(local_tensor(tensor).view(-1) for tensor in updated)]
        for piece in zip(*(tensor.split(PIECE_ELEMENTS) for tensor in flat), strict=True):
            self._update_piece(group, count, *piece)

    def _update_piece(
        self,
        group: dict[str, Any],
        count: int,
        gradient: Tensor,
        parameter: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> None:
        """Tensors are [N]; `count` steps came before."""
        first, second = exp_avg.float(), exp_avg_sq.float()  # the same tensors if they are float32
        # The fused kernel reads the count on the device. torch increments it.
        count_device = parameter.device if self._fused else torch.device("cpu")
        adamw(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [torch.full((), float(count), device=count_device)],
            foreach=False,
            fused=self._fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if first is exp_avg and second is exp_avg_sq:
            return
        chance = hashed(first, second, count)
        for moment, value, bits in ((exp_avg, first, chance), (exp_avg_sq, second, _shifted(chance, _LOST_BITS))):
            if moment is not value:
                round_by_chance_(value, bits)
                moment.copy_(value)


def round_by_chance_(values: Tensor, chance: Tensor) -> None:
    """Round to values of bfloat16, in place. NaN and infinities stay; finite values stay finite.

    Args:
        values: [N] float32.
        chance: [N] int32, whose lower 16 bits are evenly distributed.
    """
    bits, is_nan = values.view(torch.int32), values.isnan()
    # The lost bits carry into the kept ones with a probability in proportion to them; the sign is a separate bit. From
    # the largest value of bfloat16 on there is nothing to carry into.
    carried = (chance & ((1 << _LOST_BITS) - 1)).masked_fill_(values.abs() >= _LARGEST, 0)
    bits.add_(carried).bitwise_and_(-1 << _LOST_BITS)
    values.masked_fill_(is_nan, torch.nan)


def hashed(first: Tensor, second: Tensor, count: int) -> Tensor:
    """[N] int32, evenly distributed bits of two [N] float32 and a number.

    The mixing function is Chris Wellons's lowbias32 (https://github.com/skeeto/hash-prospector, public domain).
    """
    mixed = second.view(torch.int32) * _int32(0x9E3779B1)
    mixed.bitwise_xor_(first.view(torch.int32)).add_(_int32(count * 0x85EBCA77))
    mixed.bitwise_xor_(_shifted(mixed, 16)).mul_(_int32(0x7FEB352D))
    mixed.bitwise_xor_(_shifted(mixed, 15)).mul_(_int32(0x846CA68B))
    return mixed.bitwise_xor_(_shifted(mixed, 16))


def _shifted(values: Tensor, num_bits: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (values >> num_bits).bitwise_and_((1 << (32 - num_bits)) - 1)


def _int32(number: int) -> int:
    """The int32 with the last 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
