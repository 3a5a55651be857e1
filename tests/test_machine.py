"""What the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpt.machine import (
    UNKNOWN_MEMORY,
    datasheet,
    device_memory,
    free_memory,
    host_memory,
    measured,
    speed_limit,
)

CPU = torch.device("cpu")


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 96 kB\nMemFree: 1 kB\nMemAvailable:    64 kB\n")
    return path


def test_free_is_what_the_system_can_still_give(tmp_path: Path, meminfo: Path) -> None:
    found = host_memory(meminfo, tmp_path)
    assert (found.free, found.total) == (64 * 1024, 96 * 1024)
    assert host_memory(tmp_path / "none", tmp_path).free == UNKNOWN_MEMORY
    assert free_memory(CPU) == pytest.approx(device_memory("cpu").free, rel=0.5)


def test_a_container_s_limit_counts_where_it_is_less(tmp_path: Path, meminfo: Path) -> None:
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path).free == 64 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert host_memory(meminfo, tmp_path).free == 7000
    assert "container" in host_memory(meminfo, tmp_path).name
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")  # given up on demand
    assert host_memory(meminfo, tmp_path).free == 7500
    (tmp_path / "memory.max").write_text("999999999\n")
    assert host_memory(meminfo, tmp_path).free == 64 * 1024


def test_a_known_gpu_has_its_dense_peak_and_an_unknown_one_none() -> None:
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"):
        limit = datasheet(name, "bfloat16")
        assert limit is not None
        assert limit.flops == 312e12
        assert "312 TFLOP/s" in limit.what
    h100 = "NVIDIA H100 80GB HBM3"
    peaks = [datasheet(h100, "float16"), datasheet(h100, "float32", tf32=True),
             datasheet(h100, "float32")]  # fmt: skip
    assert [round(limit.flops / 1e12) for limit in peaks if limit] == [989, 495, 67]
    for other in (
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "AMD Instinct MI300X",
    ):
        assert datasheet(other, "bfloat16") is None
    assert datasheet(h100, "float64") is None


def test_a_cpu_is_measured_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    limit = speed_limit(CPU, torch.float32)
    assert limit is not None
    assert limit.flops > 1e6
    assert "measured" in limit.what
    assert torch.equal(before, torch.get_rng_state())
    assert measured(torch.bfloat16, seconds=0.01).flops > 1e6
