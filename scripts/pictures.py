"""The documentation's picture of times as SVG: `scripts/performance.py pages` writes it, its test holds it.

It has a background of its own, and dark colours where the reader prefers them.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px } .soft { fill: #59636e } .head { font-weight: 600 }
.card { fill: #ffffff; stroke: #d1d9e0 } .ours { fill: #1a7f37 } .theirs { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .soft { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d }
.ours { fill: #3fb950 } .theirs { fill: #6e7681 }
}"""
WIDTH, HEIGHT = 760, 244
LAYER = 4096, 14336
BARS = (
    ("jitgemm, e4m3, groups of 128", "h200", ("e4m3_g128",)),
    ("jitgemm, int8, per channel", "h200", ("int8_ch",)),
    ("humming, 4 bits, groups of 128", "peers_h200", ("hum_fp8_g128",)),
    ("FP8, torch._scaled_mm", "h200", ("fp8row", "fp8ten")),
    ("bf16, torch.mm", "h200", ("bf16",)),
)
"""Label, file of results, and contestants, the fastest of which is shown."""


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, radius: int) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" class="{kind}"/>'


def speed(results: Path) -> str:
    """Microseconds a call of one layer, in decode and in prefill, next to others."""
    documents: dict[str, Any] = {name: json.loads((results / f"{name}.json").read_text()) for _, name, _ in BARS}
    n, k = LAYER
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n<title>Microseconds a call, {n} x {k}: jitgemm next to humming, FP8 and bf16</title>',
        f"<style>\n{STYLE}\n</style>",
        _box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "card", radius=6),
        _text(16, 26, f"Microseconds a call, {n} × {k}: shorter is faster", "head"),
    ]
    for left, m, name in ((262, 16, "decode"), (518, 4096, "prefill")):
        parts.append(_text(left, 52, f"{name}, m = {m:,}", "small soft"))
        times = []
        for _, file, contestants in BARS:
            cell = next(c for c in documents[file]["cells"] if (c["n"], c["k"], c["m"]) == (n, k, m))
            times.append(min(cell["us"][each] for each in contestants))
        for at, ((label, _, _), us) in enumerate(zip(BARS, times)):
            y, kind = 62 + 30 * at, "ours" if label.startswith("jitgemm") else "theirs"
            if left == 262:
                parts.append(_text(250, y + 14, label, "", "end"))
            width = round(180 * us / max(times), 1)
            parts += [
                _box(left, y, width, 20, kind, radius=2),
                _text(left + width + 6, y + 14, f"{us:.1f}" if us < 100 else f"{us:.0f}"),
            ]
    environment = documents["h200"]["environment"]
    run = f"{environment['device']}, {documents['h200']['date'][:10]}, commit {str(environment['commit'])[:7]}"
    parts.append(_text(16, 230, f"{run}, {' and '.join(f'{name}.json' for name in documents)}", "small soft"))
    return "\n".join(parts) + "\n</svg>\n"
