"""Devices by their data sheets, for plans without a measurement."""

from dataclasses import dataclass
from typing import Final

from outrider.gateway.tools.measuring.plan.curves import RooflineCurve
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes

_GB: Final = 1e9
UNRECORDED_S: Final = 20e-6
"""Launches of a layer's kernels where nothing records them."""
SUM_S: Final = 15e-6
"""Of one sum over the devices, over NVLink: latency, which is most of it while few rows decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A data sheet: memory, its bandwidth, dense 16-bit operations a second.

    What of it a pass really gets: about three quarters of the bandwidth and six tenths of the
    operations, and some 20 microseconds of launches for each layer's kernels where nothing records
    them. Only a measurement knows.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    bandwidth_share: float = 0.75
    flops_share: float = 0.6
    launch_s: float = 0.0004

    def curve(self, shape: ModelSizes, *, shared_layers: int = 0) -> RooflineCurve:
        """Return the times of passes by the roofline model.

        `shared_layers`: layers behind whose halves several devices add what they have. Their passes
        are not recorded.
        """
        return RooflineCurve(
            weight_s=shape.weight_bytes / (self.bytes_per_s * self.bandwidth_share),
            row_s=shape.flops_per_row / (self.flops_per_s * self.flops_share),
            key_s=shape.kv_bytes_per_token / (self.bytes_per_s * self.bandwidth_share),
            launch_s=self.launch_s + shared_layers * (UNRECORDED_S + 2 * SUM_S),
        )


def _gpu(name: str, memory_gb: float, gb_per_s: float, tflops: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_bytes=memory_gb * _GB,
        bytes_per_s=gb_per_s * _GB,
        flops_per_s=tflops * 1e12,
    )


# NVIDIA's data sheets: SXM variants, dense bfloat16 without sparsity.
DEVICES: Final = {
    device.name: device
    for device in (
        _gpu("l4", 24, 300, 121),
        _gpu("l40s", 48, 864, 362),
        _gpu("a10g", 24, 600, 70),
        _gpu("a100-40gb", 40, 1555, 312),
        _gpu("a100-80gb", 80, 2039, 312),
        _gpu("h100", 80, 3350, 989),
        _gpu("h200", 141, 4800, 989),
        _gpu("b200", 180, 8000, 2250),
        _gpu("rtx4090", 24, 1008, 165),
    )
}
