"""Hardware and rooflines: limits, crossings, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.hardware import PRESETS, Hardware
from tierstore.roofline import HITS, Roof, crossing, device_roof, host_roof, roofs

L20 = PRESETS["l20"]
each_hardware = pytest.mark.parametrize("hardware", PRESETS.values(), ids=PRESETS)


@given(st.floats(1, 1e15), st.floats(1, 1e13), st.floats(0, 1e6))
def test_a_roof_is_the_lower_of_two_limits(flops: float, bandwidth: float, at: float) -> None:
    roof = Roof("any", flops, bandwidth)
    assert roof.attainable(at) <= flops
    assert roof.attainable(at) <= at * bandwidth
    assert roof.attainable(at) in {flops, at * bandwidth}
    assert math.isclose(roof.attainable(roof.ridge), flops)


@each_hardware
def test_hits_never_lower_what_the_device_attains(hardware: Hardware) -> None:
    bandwidths = [device_roof(hardware, hits).bandwidth for hits in (0.0, 0.5, 0.8, 0.9, 1.0)]
    assert bandwidths == sorted(bandwidths)
    assert bandwidths[0] == min(hardware.link, hardware.device.memory)
    assert bandwidths[-1] == hardware.device.memory


def test_eighty_and_ninety_percent_hits_need_five_and_ten_times_less_of_the_link() -> None:
    none, eighty, ninety = (device_roof(L20, hits).bandwidth for hits in HITS)
    assert eighty / none == pytest.approx(5)
    assert ninety / none == pytest.approx(10)


@each_hardware
@pytest.mark.parametrize("hits", HITS)
def test_the_host_wins_exactly_below_the_crossing(hardware: Hardware, hits: float) -> None:
    point, device, host = crossing(hardware, hits), device_roof(hardware, hits), host_roof(hardware)
    for intensity in np.geomspace(0.01, 1e6, 400):
        wins = host.attainable(intensity) > device.attainable(intensity) * (1 + 1e-9)
        assert wins == (intensity < point * (1 - 1e-9)), intensity


def test_hits_move_the_crossing_down() -> None:
    assert crossing(L20) > crossing(L20, 0.8) > crossing(L20, 0.9) == 0


def test_a_figure_shows_hits_host_and_disk() -> None:
    names = [roof.name for roof in roofs(L20)]
    assert names[:3] == ["device, 0% hits", "device, 80% hits", "device, 90% hits"]
    assert "host in place" in names
    assert "disk" in names[-1]


def test_disk_rates_lie_on_a_line_of_logarithms() -> None:
    disk = replace(L20, disk=((4096, 1e9), (65536, 4e9)))
    assert disk.disk_rate(4096) == 1e9
    assert disk.disk_rate(16384) == pytest.approx(2e9)
    assert disk.disk_rate(1 << 20) == 4e9
    assert disk.disk_rate(1024) == pytest.approx(0.25e9)


@each_hardware
def test_hardware_survives_json(hardware: Hardware) -> None:
    assert Hardware.from_dict(json.loads(json.dumps(hardware.to_dict()))) == hardware


@pytest.mark.parametrize(
    "content", [None, [], "l20", {}, {"name": "x"}, L20.to_dict() | {"link": "fast"}]
)
def test_what_is_no_hardware_is_refused(content: object) -> None:
    with pytest.raises(ConfigError, match="tierstore roofline"):
        Hardware.from_dict(content)


@pytest.mark.parametrize(
    ("field", "value"), [("link", 0.0), ("judge", math.nan), ("link", math.inf), ("disk", ())]
)
def test_rates_that_cannot_be_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="hardware 'l20'"):
        replace(L20, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rising sizes"):
        replace(L20, disk=((4096, 1e9), (4096, 1e9)))
