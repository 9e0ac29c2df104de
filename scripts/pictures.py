"""The documentation's pictures as SVG: `scripts/performance.py pages` writes them, its test holds them.

A picture has a background of its own, and dark colours where the reader prefers them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px } .soft { fill: #59636e } .head { font-weight: 600 }
.card { fill: #ffffff; stroke: #d1d9e0 } .ours { fill: #1a7f37 } .theirs { fill: #8c959f }
.box { fill: #f6f8fa; stroke: #59636e } .load { fill: #b6e3ff; stroke: #0969da }
.math { fill: #aceebb; stroke: #1a7f37 }
.wait { fill: none; stroke: #8c959f; stroke-dasharray: 3 3 } .other { fill: #eff2f5; stroke: #8c959f }
.line { stroke: #59636e; fill: none } .mark { stroke: #cf222e; fill: none; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .soft { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d }
.ours { fill: #3fb950 } .theirs { fill: #6e7681 } .box { fill: #151b23; stroke: #9198a1 }
.load { fill: #0c2d6b; stroke: #58a6ff } .math { fill: #033a16; stroke: #3fb950 } .wait { stroke: #656c76 }
.other { fill: #151b23; stroke: #656c76 } .line { stroke: #9198a1 } .mark { stroke: #ff7b72 }
}"""


class Picture:
    """An SVG of a size, filled from back to front."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []
        self.box(0.5, 0.5, width - 1, height - 1, "card", radius=6)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "box", text: str = "", radius: int = 3
    ) -> None:
        """A rectangle, with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{kind}"/>'
        )
        lines = text.split("\n") if text else []
        for at, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4 + 13 * (at - (len(lines) - 1) / 2), line, "small", "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> None:
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{kind}" marker-end="url(#end)"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> None:
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" class="{kind}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">\n<title>{escape(self.title, quote=False)}</title>\n'
            f"<style>\n{STYLE}\n</style>\n"
        )
        end = (
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" class="theirs"/></marker></defs>\n'
        )
        return head + end + "\n".join(self.parts) + "\n</svg>\n"


# ---- decode and prefill next to others -------------------------------------------------------------------------------

LAYER = 4096, 14336
BARS = (
    ("jitgemm, e4m3, groups of 128", "h200", ("e4m3_g128",)),
    ("jitgemm, int8, per channel", "h200", ("int8_ch",)),
    ("humming, 4 bits, groups of 128", "peers_h200", ("hum_fp8_g128",)),
    ("FP8, torch._scaled_mm", "h200", ("fp8row", "fp8ten")),
    ("bf16, torch.mm", "h200", ("bf16",)),
)
"""Label, file of results, and contestants, the fastest of which is shown."""


def speed(results: Path) -> str:
    """Microseconds a call of one layer, in decode and in prefill."""
    documents: dict[str, Any] = {name: json.loads((results / f"{name}.json").read_text()) for _, name, _ in BARS}
    n, k = LAYER
    picture = Picture(760, 244, f"Microseconds a call, {n} x {k}: jitgemm next to humming, FP8 and bf16")
    picture.text(16, 26, f"Microseconds a call, {n} × {k}: shorter is faster", "head")
    for left, m, name in ((262, 16, "decode"), (518, 4096, "prefill")):
        picture.text(left, 52, f"{name}, m = {m:,}", "small soft")
        times = []
        for _, file, contestants in BARS:
            cell = next(c for c in documents[file]["cells"] if (c["n"], c["k"], c["m"]) == (n, k, m))
            times.append(min(cell["us"][each] for each in contestants))
        for at, ((label, _, _), us) in enumerate(zip(BARS, times)):
            y, kind = 62 + 30 * at, "ours" if label.startswith("jitgemm") else "theirs"
            if left == 262:
                picture.text(250, y + 14, label, "", "end")
            width = round(180 * us / max(times), 1)
            picture.box(left, y, width, 20, kind, radius=2)
            picture.text(left + width + 6, y + 14, f"{us:.1f}" if us < 100 else f"{us:.0f}")
    environment = documents["h200"]["environment"]
    run = f"{environment['device']}, {documents['h200']['date'][:10]}, commit {str(environment['commit'])[:7]}"
    picture.text(16, 230, f"{run}, {' and '.join(f'{name}.json' for name in documents)}", "small soft")
    return picture.svg()


# ---- one call --------------------------------------------------------------------------------------------------------


def call(results: Path) -> str:
    """The way of one call from Python to the GPU."""
    picture = Picture(760, 330, "The way of one call, from Python to cuLaunchKernelEx")
    picture.box(20, 20, 720, 40, "box", "gemm_w4a8_bf16_nt(lhs, weight, out)")
    picture.box(20, 84, 240, 40, "box", "this thread's plan, by shapes\nruntime/launch.py")
    picture.arrow(140, 60, 140, 84)
    steps = (
        ("check every argument", "gemm/problem.py"),
        ("choose a kernel", "select/"),
        ("render its source", "kernel/render.py"),
    )
    picture.text(500, 79, "a plan that is missing", "small soft", "middle")
    for at, (what, where) in enumerate(steps):
        picture.box(300 + 150 * at, 84, 140, 40, "box", f"{what}\n{where}")
        picture.arrow(260 if at == 0 else 290 + 150 * at, 104, 300 + 150 * at, 104)
    picture.box(600, 150, 140, 40, "box", "kernel cache on disk\njit/cache.py")
    picture.arrow(670, 124, 670, 150)
    picture.box(450, 150, 140, 40, "load", "NVRTC, if it is missing\njit/nvrtc.py")
    picture.arrow(600, 164, 590, 164)
    picture.arrow(590, 178, 600, 178)
    picture.box(300, 150, 140, 40, "box", "cuModuleLoadData\nruntime/driver.py")
    picture.line(670, 190, 670, 206)
    picture.line(670, 206, 370, 206)
    picture.arrow(370, 206, 370, 190)
    picture.arrow(300, 170, 200, 222)
    picture.text(128, 176, "found", "small soft", "end")
    picture.arrow(140, 124, 140, 222)
    picture.box(
        20, 222, 330, 40, "box", "parameters by addresses: checks, TMA maps\nruntime/launch.py, cuTensorMapEncodeTiled"
    )
    picture.arrow(350, 242, 380, 242)
    picture.box(380, 222, 170, 40, "math", "cuLaunchKernelEx\non the current stream")
    picture.arrow(550, 242, 580, 242)
    picture.box(580, 222, 160, 40, "math", "the kernel\ngemm/kernel.cuh")
    picture.text(20, 296, "A call that comes again takes the left column only: two look-ups and a launch.", "small")
    picture.text(
        20,
        314,
        "Nothing is compiled or loaded while a CUDA graph is captured: a missing kernel raises CacheMissError.",
        "small soft",
    )
    return picture.svg()


# ---- one kernel's time -----------------------------------------------------------------------------------------------


RECORDS, STAGES = 8, 4


def kernel(results: Path) -> str:
    """What the warps of a CTA do over time: a pipeline of four stages, two consumer warpgroups, eight records."""
    picture = Picture(760, 392, "A kernel over time: producer warp, consumer warpgroups, stages")
    rows = {
        "kernel before": 34,
        "producer warp": 84,
        "stages": 134,
        "consumers 0": 236,
        "consumers 1": 284,
        "next kernel": 332,
    }
    for name, y in rows.items():
        picture.text(14, y + 20, name, "small")
    wait, took, apart, end = 236, 46, 10, 716
    begun = [wait + 28 + took * record for record in range(RECORDS)]  # when the first consumers begin with a record
    freed = [at + took + apart for at in begun]  # when the second ones have ended it
    picture.box(112, rows["kernel before"], wait - 112, 30, "other", "runs")
    y = rows["producer warp"]
    picture.box(112, y, 28, 30, "box", "init")
    for record in range(STAGES):
        picture.box(144 + 23 * record, y, 21, 30, "load", f"w{record}")
        picture.box(wait + 4 + 20 * record, y, 18, 30, "load", f"x{record}")
    for record in range(STAGES, RECORDS):
        picture.box(freed[record - STAGES], y, 42, 30, "load", f"w{record} x{record}")
    for record in range(RECORDS):
        stage = record % STAGES
        top = rows["stages"] + 23 * stage
        issued = 144 + 23 * record if record < STAGES else freed[record - STAGES]
        if record < STAGES:
            picture.text(104, top + 13, str(stage), "small soft", "end")
        picture.box(issued, top, begun[record] - issued, 18, "load", f"fill {record}")
        picture.box(begun[record], top, freed[record] - begun[record], 18, "math", f"read {record}")
    for name, offset in (("consumers 0", 0), ("consumers 1", apart)):
        y = rows[name]
        picture.box(176, y, wait - 180, 30, "math", "decode 0")
        for record, at in enumerate(begun):
            picture.box(at + offset, y, took - 4, 30, "math", f"mma {record}")
        picture.box(begun[-1] + took + offset, y, 64, 30, "box", "sum, store")
    y = rows["next kernel"]
    picture.box(wait + 24, y, 40, 30, "box", "init")
    picture.box(wait + 68, y, 74, 30, "load", "its weights")
    picture.box(wait + 146, y, end - wait - 150, 30, "wait", "waits until this grid has ended")
    picture.box(end + 4, y, 32, 30, "other", "runs")
    picture.line(wait, 26, wait, 336, "mark")
    picture.text(wait + 5, 24, "griddepcontrol.wait: the grid before has ended", "small soft")
    picture.line(end, 26, end, 366, "mark")
    picture.text(end - 5, 24, "this grid ends", "small soft", "end")
    picture.arrow(wait, 336, wait + 22, 346)
    picture.text(
        14, 382, "w: weight records, copied before the wait. x: activations, copied after it. "
        "mma 1: wgmma of one block of k, while block 2 is decoded.",
        "small soft",
    )  # fmt: skip
    return picture.svg()


PICTURES = {"performance/speed.svg": speed, "pictures/call.svg": call, "pictures/kernel.svg": kernel}
"""By file, below docs."""


def made(results: Path, names: Sequence[str] = tuple(PICTURES)) -> dict[str, str]:
    return {name: PICTURES[name](results) for name in names}
