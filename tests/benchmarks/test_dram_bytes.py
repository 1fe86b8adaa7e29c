"""`benchmarks/dram_bytes.py`: reading the output of the profiler, which itself needs a GPU."""

from __future__ import annotations

import json

import pytest
from benchmarks.dram_bytes import compared, expected_in, kernels_of

HEADER = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def output(*kernels: tuple[str, int]) -> str:
    reported = [{"case": "relu", "way": way, "bytes": 3e9, "launches": 2} for way in ("unfused", "fused")]
    lines = ["==PROF== Connected to process 7", "==PROF== Profiling: 0%EXPECTED " + json.dumps(reported), HEADER]
    for index, (name, size) in enumerate(kernels):
        for metric, value in (("dram__bytes_read.sum", size), ("dram__bytes_write.sum", 10**9)):
            lines.append(f'"{index}","7","{name}","{metric}","byte","{value:,}"')
    return "\n".join([*lines, "==PROF== Disconnected"])


def test_kernels_are_counted_between_the_markers() -> None:
    text = output(("erfinv<1>(a, b)", 5), ("a", 2 * 10**9), ("b", 0), ("void erfinv", 5), ("c", 10**9))
    assert [kernel["name"] for kernel in kernels_of(text)] == ["erfinv<1>(a, b)", "a", "b", "void erfinv", "c"]
    unfused, fused = compared(expected_in(text), kernels_of(text))
    assert (unfused["dram_bytes"], unfused["kernels"]) == (4e9, 2)
    assert unfused["ratio"] == 0.75
    assert (fused["dram_bytes"], fused["kernels"]) == (2e9, 1)
    assert fused["names"] == ["2.000 GB c"]


def test_output_without_counters_has_no_figures() -> None:
    text = "==ERROR== ERR_NVGPUCTRPERM - no permission"
    assert expected_in(text) == []
    assert kernels_of(text) == []
    one_marker = output(("erfinv", 1), ("a", 1))
    with pytest.raises(AssertionError, match="1 ranges were counted for 2 runs"):
        compared(expected_in(one_marker), kernels_of(one_marker))
