"""How fast a device trains: what was measured (results/), else its peak and an assumed share of it.

Rows are the files results/measured/*.json (whole runs, by --record) and results/throughput/*.json (short
ones, by --stage train --record). A row counts when it names hardware and target tokens per second.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import List, Optional

from moa_fairseq.recipes.hardware import DEVICES

# A multiply-accumulate is two operations, and the backward pass costs two forward passes.
OPERATIONS_PER_MAC = 6
# However fast the GPU and few the tokens: Python launches some 200 kernels, one after the other, for a
# layer's forward and backward pass, at about 20 microseconds each. Both are rounded assumptions.
SECONDS_PER_LAYER = 0.004
# fairseq's own log of a dense Transformer big on 128 V100 (facebookresearch/fairseq#233, #361): 1.65 million
# target tokens a second of 221 million MACs each are 13.7 % of the devices' peak.
ASSUMED_UTILISATION = 0.137


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. device: a key of DEVICES or "CPU"; speed: target tokens a second of all `count`.

    macs: of one target token; 0 where the file does not tell.
    """

    experiment: str
    device: str
    count: int
    speed: float
    macs: float
    precision: str
    hardware: str
    file: str


@dataclasses.dataclass(frozen=True)
class Speed:
    """Target tokens a second, and where the number is from. measured: of this experiment on this device."""

    tokens_per_second: float
    origin: str
    measured: bool

    def no_faster_than(self, seconds: float, tokens: float) -> Speed:
        """This speed, or less where an update of `tokens` takes at least `seconds`; a measured one stays."""
        if self.measured or self.tokens_per_second * seconds <= tokens:
            return self
        origin = f"{self.origin}; at least {SECONDS_PER_LAYER * 1000:g} ms per layer and step (assumed)"
        return Speed(tokens / seconds, origin, False)

    def divided_by(self, factor: float, why: str) -> Speed:
        """This speed for a training that takes `factor` times as long; a measured one already does."""
        if self.measured or factor == 1:
            return self
        return Speed(self.tokens_per_second / factor, f"{self.origin}; x {factor:.3g} {why}", False)


def seconds_per_update(layers: int, update_freq: int) -> float:
    """The least that an update takes on a GPU: its kernels are launched one after the other."""
    return layers * update_freq * SECONDS_PER_LAYER


def read_rows(results: Path) -> List[Row]:
    """All rows of a results folder; files that are no such rows are passed over."""
    rows = []
    for path in sorted([*results.glob("measured/*.json"), *results.glob("throughput/*.json")]):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        speed = row.get("tokens_per_second") if isinstance(row, dict) else None
        if not (speed and row.get("hardware") and row.get("experiment")):
            continue
        hardware = str(row["hardware"])
        count = re.match(r"(\d+) x ", hardware)
        rows.append(
            Row(
                experiment=row["experiment"],
                device=device_kind(hardware) or "CPU",
                count=int(count.group(1)) if count else 1,
                speed=float(speed),
                macs=float(row.get("macs_per_target_token") or 0),
                precision=row.get("precision", "fp32"),
                hardware=hardware,
                file=f"{path.parent.name}/{path.name}",
            )
        )
    return rows


def device_kind(hardware: str) -> Optional[str]:
    """The key of DEVICES that a hardware's name contains, or None."""
    return next((name for name in DEVICES if name in hardware), None)


def expected_speed(
    rows: List[Row],
    experiment: str,
    device: str,
    count: int,
    macs: float,
    precision: str,
    is_mixture: bool = False,
) -> Optional[Speed]:
    """The speed of an experiment on `count` devices; None on a device of which nothing is known.

    macs: of one target token, its share of the source included. is_mixture: the model has routers. Its MACs
    do not tell its time: MoA's 262M has 0.75 of the dense model's, and 1.27 of its time in SwitchHead's Table
    5. So only its own measurements count. The best of: this experiment measured on this device (scaled by the
    number of devices); the experiment nearest in MACs measured there, at its operations a second; the nearest
    measured share of the peak of another device; ASSUMED_UTILISATION.
    """
    here = [row for row in rows if row.device == device]
    own = [row for row in here if row.experiment == experiment]
    if own:
        row = min(own, key=lambda row: abs(math.log(row.count / count)))
        scaled = f", scaled from {row.count} to {count}" if row.count != count else ""
        return Speed(
            row.speed * count / row.count, f"measured: {row.file} ({row.hardware}){scaled}", not scaled
        )
    if is_mixture:
        return None
    near = _nearest([row for row in here if row.macs], macs)
    if near:
        speed = near.speed / near.count * near.macs / macs * count
        return Speed(speed, f"estimate from {near.file} ({near.experiment} on {near.hardware})", False)
    if device not in DEVICES:
        return None
    other = _nearest([row for row in rows if row.macs and row.device in DEVICES], macs)
    share, origin = ASSUMED_UTILISATION, "of the peak assumed, what a dense Transformer reached"
    if other:
        done = other.speed / other.count * other.macs * OPERATIONS_PER_MAC
        share = done / DEVICES[other.device].peak(other.precision)
        origin = f"of the peak, as {other.file} on {other.hardware}"
    speed = DEVICES[device].peak(precision) * share / (OPERATIONS_PER_MAC * macs) * count
    return Speed(speed, f"estimate, not measured: {share:.1%} {origin}", False)


def _nearest(rows: List[Row], macs: float) -> Optional[Row]:
    return min(rows, key=lambda row: abs(math.log(row.macs / macs)), default=None)
