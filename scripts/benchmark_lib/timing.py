"""How long a call takes on the GPU: replays of a CUDA graph that holds one call per copy of the weight.

Contestants take turns, and change neighbours: a large GEMM runs at the GPU's power limit, and how fast depends on how
much power whoever was before it drew.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

ROUNDS = 11
MOE_ROUNDS = 5
"""Each replay goes through 24 routings."""
QUICK_ROUNDS = 3
REPLAYS = 3
"""Timed replays of a turn, behind one untimed that hides launch latency and what the one before left in the L2."""


class Timed:
    """The calls of a contestant as a CUDA graph, with the times of its replays in microseconds per call."""

    def __init__(self, calls: Sequence[Callable[[], Any]]):
        import torch

        self.calls, self.kept = len(calls), list(calls)  # with the tensors that the graph reads and writes
        self.turns: list[list[float]] = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for call in calls:
                call()

    def turn(self, replays: int) -> None:
        """One untimed replay, then `replays` timed ones, all in one queue so that no launch latency shows."""
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        self.graph.replay()
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        events[-1].synchronize()
        self.turns.append([a.elapsed_time(b) * 1e3 / self.calls for a, b in zip(events, events[1:])])

    def hold(self, seconds: float, sample: bool = True) -> dict[str, float]:
        """Replays without a pause; the times of the second half are kept, when clocks and temperature have settled.

        Returns:
            power_w and sm_mhz as nvidia-smi saw them in the second half; empty without `sample` or where it cannot be
            asked.
        """
        import torch

        self.graph.replay()
        torch.cuda.synchronize()
        queue: list[Any] = [torch.cuda.Event(enable_timing=True)]
        queue[0].record()
        times: list[float] = []
        started, begun = time.perf_counter(), None
        sampled: subprocess.Popen | None = None
        while True:
            elapsed = time.perf_counter() - started
            if elapsed > seconds / 2 and begun is None:
                begun, sampled = len(times), _ask_nvidia_smi() if sample else None
            if elapsed > seconds and begun is not None:
                break
            self.graph.replay()
            queue.append(torch.cuda.Event(enable_timing=True))
            queue[-1].record()
            if len(queue) > 8:  # a short queue: the GPU never waits, and the loop ends soon after its time is up
                queue[1].synchronize()
                times.append(queue[0].elapsed_time(queue[1]) * 1e3 / self.calls)
                queue.pop(0)
        torch.cuda.synchronize()
        self.turns.append(times[begun:] or times)
        return _answer(sampled)

    @property
    def us(self) -> float:
        """Median of all timed replays."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        return relative_spread(self.times)

    @property
    def times(self) -> list[float]:
        return [value for turn in self.turns for value in turn]


def relative_spread(times: Sequence[float]) -> float:
    """The noise of a measurement: from its 10th to its 90th percentile, as a part of its median."""
    if len(times) < 2:
        return 0.0
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(times)


def _ask_nvidia_smi() -> subprocess.Popen | None:
    """Starts to sample; `_answer` ends it."""
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    where = ["--id=GPU-" + uuid] if uuid else []
    # Not power.draw: that is the average of a second.
    fields = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "--loop-ms=20"]
    try:
        return subprocess.Popen(
            ["nvidia-smi", *where, *fields], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def _answer(sampled: subprocess.Popen | None) -> dict[str, float]:
    if sampled is None:
        return {}
    sampled.terminate()
    try:
        text, _ = sampled.communicate(timeout=10)
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last may be cut off
        samples = [tuple(float(part) for part in line.split(",")) for line in lines]
        power, clock = (statistics.mean(column) for column in zip(*samples, strict=True))
    except (subprocess.TimeoutExpired, ValueError):
        sampled.kill()
        return {}
    return {"power_w": round(power, 1), "sm_mhz": round(clock, 1)}
