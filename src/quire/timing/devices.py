"""GPUs in numbers, from their makers' data sheets: what the analytical latency model knows of hardware.

Operations and bytes per second are peaks; what kernels reach of them is `Efficiency` in `quire.timing.analytic`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError

TERA, GIGA, MIB = 1e12, 1e9, float(1 << 20)


@dataclass(frozen=True)
class Device:
    """A GPU.

    flops      16-bit operations per second of the tensor cores with dense matrices
    bandwidth  bytes per second of its memory
    memory     bytes that its driver reports. A data sheet's GB is 2^30 bytes or a little less
    nvlink     bytes per second to other GPUs of its node, in one direction; 0: it has only PCIe
    pcie       bytes per second to the host, in one direction
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    nvlink: float
    pcie: float

    @property
    def between(self) -> float:
        """Bytes per second between two GPUs of a node, in one direction."""
        return self.nvlink or self.pcie


DEVICES = {
    device.name: device
    for device in (
        Device("t4", 65 * TERA, 320 * GIGA, 15_360 * MIB, 0.0, 16 * GIGA),
        Device("l4", 121 * TERA, 300 * GIGA, 23_034 * MIB, 0.0, 32 * GIGA),
        Device("a10", 125 * TERA, 600 * GIGA, 23_028 * MIB, 0.0, 32 * GIGA),
        Device("a100-40g", 312 * TERA, 1_555 * GIGA, 40_960 * MIB, 300 * GIGA, 32 * GIGA),
        Device("a100-80g", 312 * TERA, 2_039 * GIGA, 81_920 * MIB, 300 * GIGA, 32 * GIGA),
        Device("h100", 989.5 * TERA, 3_350 * GIGA, 81_559 * MIB, 450 * GIGA, 64 * GIGA),
        Device("h200", 989.5 * TERA, 4_800 * GIGA, 143_771 * MIB, 450 * GIGA, 64 * GIGA),
    )
}
"""GPUs by name. Rates are those of these data sheets of NVIDIA's. Where a sheet has operations with sparsity, half of
them are dense; where it has bytes of both directions, half of them go one way. Memory is what nvidia-smi reports.

t4        NVIDIA T4 Tensor Core GPU: 65 TFLOPS, 320 GB/s, PCIe gen 3 with 32 GB/s
l4        NVIDIA L4 Tensor Core GPU: 242 TFLOPS with sparsity, 300 GB/s, PCIe gen 4 with 64 GB/s
a10       NVIDIA A10 Tensor Core GPU: 125 TFLOPS, 600 GB/s, PCIe gen 4 with 64 GB/s. The A10G of a cloud has the same
          memory and slower tensor cores
a100-40g  NVIDIA A100 Tensor Core GPU, SXM: 312 TFLOPS, 1,555 GB/s, NVLink with 600 GB/s, PCIe gen 4 with 64 GB/s
a100-80g  the same with 2,039 GB/s
h100      NVIDIA H100 Tensor Core GPU, SXM: 1,979 TFLOPS with sparsity, 3.35 TB/s, NVLink with 900 GB/s, PCIe gen 5 with
          128 GB/s
h200      NVIDIA H200 Tensor Core GPU, SXM: the same with 4.8 TB/s
"""


def device_named(name: str) -> Device:
    """A device of DEVICES. Raises ConfigError that lists them."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(f"device {name!r} is unknown; the devices are {', '.join(DEVICES)}")
    return found
