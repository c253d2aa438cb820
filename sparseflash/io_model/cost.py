"""The work and traffic of kernels, and the least time that a device takes for them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from masks.arguments import check_sizes
from sparseflash.io_model.device import Device

DIRECTIONS = ("forward", "backward")


class KernelCost(NamedTuple):
    """The work and traffic of one kernel, for all heads and batch elements.

    Args:
        name: Name of the kernel.
        flops: FLOPs of its matrix products.
        exponentials: Number of exponentials, one for each pair that it computes.
        memory_bytes: Bytes read from and written to device memory, with reuse in L2.
        l2_bytes: Bytes that go through L2: those of all tiles that are loaded and stored.
        shared_bytes: Bytes that loads and products write to and read from shared memory.
        waves: Work tiles over work tiles that run at a time; 0 for kernels of standard attention.
    """

    name: str
    flops: float
    exponentials: float
    memory_bytes: float
    l2_bytes: float
    shared_bytes: float
    waves: float = 0.0

    def seconds(self, device: Device) -> dict[str, float]:
        """The least time of each unit of the device, in seconds: its work over its rate.

        Args:
            device: The device.

        Returns:
            Seconds by unit: products, exponentials, shared memory, L2 and memory.
        """
        needs = (
            *(self.flops, self.exponentials, self.shared_bytes),
            *(self.l2_bytes, self.memory_bytes),
        )
        return {
            part: need / rate
            for (part, rate), need in zip(device.rates.items(), needs, strict=True)
        }


@dataclass(frozen=True)
class Cost:
    """The cost of a pass: its kernels, which run one after the other, on a device.

    Attributes:
        device: The device, with its rates.
        kernels: The cost of each kernel.
    """

    device: Device
    kernels: tuple[KernelCost, ...]

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def memory_bytes(self) -> float:
        """Bytes read from and written to device memory, with reuse in L2."""
        return sum(kernel.memory_bytes for kernel in self.kernels)

    @property
    def l2_bytes(self) -> float:
        """Bytes of tiles that are loaded and stored, without reuse in L2."""
        return sum(kernel.l2_bytes for kernel in self.kernels)

    @property
    def shared_bytes(self) -> float:
        """Bytes of shared memory, read and written."""
        return sum(kernel.shared_bytes for kernel in self.kernels)

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs for each byte of device memory."""
        return self.flops / self.memory_bytes

    @property
    def seconds(self) -> float:
        """The least time in seconds: the sum over kernels of the time of their slowest unit."""
        return sum(max(kernel.seconds(self.device).values()) for kernel in self.kernels)

    @property
    def bound_by(self) -> str:
        """The unit of the device that is the slowest one for most of the time."""
        total: dict[str, float] = {}
        for kernel in self.kernels:
            part, seconds = max(kernel.seconds(self.device).items(), key=lambda entry: entry[1])
            total[part] = total.get(part, 0.0) + seconds
        return max(total, key=lambda part: total[part])

    @property
    def filled_waves(self) -> float:
        """Work tiles over the work tiles of whole waves: below 1 if the last wave is not full."""
        filled = sum(k.flops * k.waves / max(math.ceil(k.waves), 1) for k in self.kernels)
        return filled / self.flops if filled else 1.0

    def __str__(self) -> str:
        device_memory, l2, shared = (
            f"{count / 1e9:,.3f} GB"
            for count in (self.memory_bytes, self.l2_bytes, self.shared_bytes)
        )
        lines = [
            f"{self.flops / 1e9:,.1f} GFLOP, {device_memory} of device memory, {l2} through L2, "
            f"{shared} of shared memory, {self.arithmetic_intensity:,.0f} FLOP/B",
            f"at least {self.seconds * 1e3:.3f} ms on {self.device.name}, "
            f"bound by {self.bound_by}",
        ]
        for kernel in self.kernels:
            times = kernel.seconds(self.device)
            parts = (f"{part} {seconds * 1e3:.3f}" for part, seconds in times.items())
            lines.append(f"  {kernel.name}, ms: {', '.join(parts)}")
        return "\n".join(lines)


def check_case(direction: str, **sizes: int) -> None:
    """Raises if a size is not a positive integer, or the direction is unknown."""
    check_sizes(**sizes)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")
