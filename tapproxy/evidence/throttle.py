"""Why a card's clock is lower than it could be: the driver's bits, and which of them are anybody's fault.

Rules here: an idle card and one that somebody set to a lower clock are told, and not called throttled.
"""

from __future__ import annotations

from typing import Final

from tapproxy.core.sample import Sample

# NVML's bits (nvmlClocksEventReasons…) → the name that nvidia-smi has for each.
REASONS: Final[dict[int, str]] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
BITS: Final = {name: bit for bit, name in REASONS.items()}
POWER: Final = BITS["sw_power_cap"] | BITS["hw_power_brake_slowdown"]
THERMAL: Final = BITS["sw_thermal_slowdown"] | BITS["hw_thermal_slowdown"]
# hw_slowdown is either of the two, or neither is told.
THROTTLED: Final = POWER | THERMAL | BITS["hw_slowdown"]


def tell(sample: Sample, mask: int, known: int = -1) -> None:
    """Adds the signals and the words of a bitmask. ``known``: the bits that were read."""
    for signal, bits in (("throttled", THROTTLED), ("throttled_thermal", THERMAL), ("throttled_power", POWER)):
        if mask & bits or known & bits == bits:
            sample.values[signal] = 1.0 if mask & bits else 0.0
    sample.facts["throttle_reasons"] = ", ".join(name for bit, name in REASONS.items() if mask & bit) or "none"
