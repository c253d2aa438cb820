"""The rates and capacities of devices."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Device:
    """The rates and capacities of a device.

    Args:
        name: Name of the device.
        capability: Compute capability.
        multiprocessors: Number of multiprocessors.
        clock: Clock rate in Hz.
        matrix_flops: FLOP/s of the tensor cores with 16-bit operands.
        memory_bandwidth: Bandwidth of device memory in bytes per second.
        l2_bytes: Capacity of L2 in bytes.
        l2_bytes_per_cycle: Bandwidth of L2 in bytes per cycle.
        shared_bytes: Largest shared memory of a CTA in bytes.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    matrix_flops: float
    memory_bandwidth: float
    l2_bytes: int
    l2_bytes_per_cycle: int
    shared_bytes: int

    @property
    def rates(self) -> dict[str, float]:
        """The rate of each unit: FLOPs, exponentials or bytes per second.

        A multiprocessor computes 16 exponentials, and reads or writes 128 bytes of shared memory,
        in a cycle (CUDA C++ Programming Guide, throughput of native arithmetic instructions, and
        shared memory).
        """
        per_cycle = self.multiprocessors * self.clock
        return {
            "products": self.matrix_flops,
            "exponentials": 16 * per_cycle,
            "shared memory": 128 * per_cycle,
            "L2": self.l2_bytes_per_cycle * self.clock,
            "memory": self.memory_bandwidth,
        }


# NVIDIA's A100 and H100 Tensor Core GPU architecture papers (of SXM modules) and the data sheet
# of H200. L2 of H100: 6144 bytes a cycle by the hardware counters of an H200, `lts__throughput`.
DEVICES = {
    device.name: device
    for device in (
        Device("A100", (8, 0), 108, 1.41e9, 312e12, 2.039e12, 40 << 20, 5120, 163 << 10),
        Device("H100", (9, 0), 132, 1.83e9, 989.4e12, 3.35e12, 50 << 20, 6144, 227 << 10),
        Device("H200", (9, 0), 132, 1.83e9, 989.4e12, 4.8e12, 50 << 20, 6144, 227 << 10),
    )
}


def device_named(device: str | Device) -> Device:
    """A device by its name.

    Args:
        device: A name in DEVICES, or a Device, which is returned unchanged.

    Returns:
        The device.

    Raises:
        ValueError: No device has this name.
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str) or device not in DEVICES:
        raise ValueError(f"device must be a Device or one of {', '.join(DEVICES)}, got {device!r}")
    return DEVICES[device]


def device_like(device: torch.device) -> Device | None:
    """The entry of DEVICES for a GPU of this machine.

    Args:
        device: A torch device.

    Returns:
        The device, with the number of multiprocessors of the GPU; None if it is not in DEVICES.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    named = next((known for name, known in DEVICES.items() if name in properties.name), None)
    return named and replace(named, multiprocessors=properties.multi_processor_count)
