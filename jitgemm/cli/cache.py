"""`jitgemm cache`: look into the kernel cache on disk, check it, shrink it. `prune` and `clear` alone change it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jitgemm import settings
from jitgemm.cli import common
from jitgemm.dtypes import LHS_TYPES
from jitgemm.errors import JitGemmError
from jitgemm.jit.cache import process_cache
from jitgemm.jit.entry import EntryInfo
from jitgemm.kernel.legend import legend

cache_app = typer.Typer(
    help="Look into the cache of compiled kernels, check it, make it smaller.",
    epilog="The folders are those of `jitgemm env`; JITGEMM_CACHE_DIR names others.",
    no_args_is_help=True,
)

_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be dropped.")]

_SORTS = {
    "used": lambda info: -info.last_used,
    "age": lambda info: -info.metadata.get("created", 0),
    "size": lambda info: -info.size,
    "registers": lambda info: -info.metadata.get("registers", 0),
    "spills": lambda info: (not info.metadata.get("serialised"), -info.metadata.get("spill_bytes", 0)),
    "kernel": lambda info: info.metadata.get("label", ""),
}
"""--sort's choices."""
_METADATA = {"label": "", "spec": {}, "registers": 0, "spill_bytes": 0, "created": 0, "seconds": 0, "serialised": ""}
"""What --json prints of an entry's metadata, and what stands for it where that cannot be read."""
_KINDS = {"quantize": "quantizer", **dict.fromkeys(("route", "combine", "gather", "dispatch", "collect"), "routing")}


def entry_dict(info: EntryInfo) -> dict[str, Any]:
    """What --json prints of an entry."""
    facts = {name: getattr(info, name) for name in ("key", "path", "root", "problem", "size", "last_used")}
    facts |= {name: info.metadata.get(name, default) for name, default in _METADATA.items()}
    nvrtc = info.metadata.get("nvrtc", {}).get("build", "")
    return facts | {"kind": kind_of(facts["label"]) if info.ok else None, "nvrtc": nvrtc}


def kind_of(label: str) -> str:
    """What a kernel computes, by how its label begins: gemm, quantizer or routing, which combining belongs to; ? for
    none of them."""
    return _KINDS.get(label.partition("-")[0], "gemm" if label.startswith(LHS_TYPES) else "?")


def describe_spec(spec: Mapping[str, Any]) -> tuple[str, str, str]:
    """(tile, types, scales) for people: 16 x 64, e4m3, 128 + zero of a GEMM; -, bf16 to s8, token + zero of a
    quantiser, also of one that routes, too; -, bf16 to bf16, - of combining; - alone of routing and gathering."""
    if "lhs" in spec:
        scales = [str(spec.get("group_size") or "channel")]
        scales += [name for name, field in (("zero", "zero_point"), ("offset", "offset")) if spec.get(field)]
        scales += [f"corrected in {spec['correction']}"] if spec.get("correction") else []
        out = spec.get("out", "bf16")
        tile = f"{spec.get('block_m', '?')} x {spec.get('block_n', '?')}"
        return tile, f"{spec['lhs']}{'' if out == 'bf16' else f' to {out}'}", " + ".join(scales)
    quantizer = spec.get("quantizer", spec)
    if {"x", "q"} <= quantizer.keys():
        scale = "tensor" if quantizer.get("static") else "block" if quantizer.get("block") else "token"
        return "-", f"{quantizer['x']} to {quantizer['q']}", f"{scale} + zero" if quantizer.get("affine") else scale
    if "row" in spec:
        return "-", f"{spec['row']} to {spec.get('out', spec['row'])}", "-"
    return ("-", "-", "-") if {"ctas", "threads"} & spec.keys() else ("?", "?", "?")


def _print_entries(entries: list[EntryInfo], as_json: bool) -> str:
    """Prints them, and returns what they take together."""
    total = common.show_size(sum(info.size for info in entries))
    if as_json:
        common.print_json([entry_dict(info) for info in entries])
        return total
    columns = ("key", "kernel", "tile m x n", "types", "scale per", "registers", "spills", "size", "age", "last use")
    rows: list[tuple[object, ...]] = []
    for info in entries:
        key, size, data = info.key[:12], common.show_size(info.size), info.metadata
        if not info.ok:
            rows.append((key, f"(bad: {info.problem})", *[None] * 5, size, None, None))
            continue
        spills = common.show_spills(data["spill_bytes"], data.get("serialised", ""))
        ages = common.show_age(data["created"]), common.show_age(info.last_used)
        rows.append((key, data["label"], *describe_spec(data["spec"]), data["registers"], spills, size, *ages))
    drop = ("age", "tile m x n", "types", "scale per", "size", "last use", "registers")
    if rows:
        common.out().print(common.table(columns, rows, left=("key", "kernel", "types"), drop=drop))
    return total


@cache_app.command("ls")
@common.guarded
def ls(
    sort: Annotated[
        str, typer.Option("--sort", metavar="|".join(_SORTS), help="Column to sort by; the largest or newest first.")
    ] = "used",
    as_json: common.Json = False,
) -> None:
    """List the kernels: tile, types, what has a scale of its own, registers, spills, size, age and last use.

    A GEMM's type is its activations', with a group size. A quantiser has its
    input's and its result's type, and a scale per token or per tensor.

    \b
    Examples:
      jitgemm cache ls
      jitgemm cache ls --sort size --json | jq '.[].label'
    """
    if sort not in _SORTS:
        raise ValueError(f"--sort: expected one of {', '.join(_SORTS)}, got {sort!r}")
    entries = sorted(process_cache.entries(), key=lambda info: (_SORTS[sort](info), info.key))
    size = _print_entries(entries, as_json)
    if not as_json:
        common.note(f"{len(entries)} kernels, {size}")


@cache_app.command("info")
@common.guarded
def info(as_json: common.Json = False) -> None:
    """Print the folders in use, with the number and size of the kernels in each."""
    jit, entries, roots = settings.jit_mode(), list(process_cache.entries()), []
    for root in settings.cache_roots():
        inside = [entry for entry in entries if entry.root == root]
        good = [kind_of(entry.metadata["label"]) for entry in inside if entry.ok]
        facts: dict[str, Any] = {
            "path": str(root),
            "exists": os.path.isdir(root),
            "writable": _writable(root),
            "kernels": len(good),
        }
        facts |= {"quantizers": good.count("quantizer"), "bad": len(inside) - len(good)}
        roots.append(facts | {"size": sum(entry.size for entry in inside)})
    if as_json:
        common.print_json({"jit": jit, "roots": roots})
        return
    rows = []
    for path, _, writable, *counts, size in (root.values() for root in roots):
        rows.append((path, "yes" if writable else "no", *counts, common.show_size(size)))
    columns = ("folder", "writable", "kernels", "quantisers", "bad", "size")
    common.out().print(common.table(columns, rows, left=("folder",), drop=("bad", "quantisers")))
    common.note(f"JITGEMM_JIT={jit}; the first folder that can be written takes new kernels, all are read")


def _writable(root: Path) -> bool:
    """Whether kernels can be stored there, as far as permissions tell, once the folder is made."""
    try:
        root.stat()
    except FileNotFoundError:
        return _writable(root.parent)
    except OSError:
        return False
    return root.is_dir() and os.access(root, os.W_OK | os.X_OK)


@cache_app.command("show")
@common.guarded
def show(
    key: Annotated[str, typer.Argument(metavar="KEY|LABEL", help="A kernel's key, the beginning of one, or a label.")],
    source: Annotated[bool, typer.Option("--source", help="Print the rendered CUDA source alone.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Print NVRTC's log alone, registers and spills in it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all metadata as JSON, source and log in it.")] = False,
) -> None:
    """Print what is known of one kernel.

    \b
    Examples:
      jitgemm cache show 3fa9
      jitgemm cache show e4m3fast-g128-bf16-m16n64-k2x2-s8-c2
      jitgemm cache show 3fa9 --source > kernel.cu

    \b
    Exit codes:
      0  printed
      2  wrong arguments
      3  no kernel with this key or label, or several with the key
    """
    if source + log + as_json > 1:
        raise ValueError("--source, --log and --json: expected at most one of them")
    entry = process_cache.read(_key_of(key))
    if source or log:
        text = entry.metadata["source" if source else "log"]
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    shown: dict[str, Any] = {"path": str(entry.path), "cubin_bytes": len(entry.cubin)} | entry.metadata
    if as_json:
        common.print_json(shown)
        return
    shown["created"] = f"{common.show_age(entry.metadata['created'])} ago"
    shown |= {name: f"{len(shown[name].splitlines())} lines (--{name})" for name in ("source", "log")}
    for name, value in shown.items():
        if isinstance(value, dict):
            shown[name] = ", ".join(f"{inner}={item}" for inner, item in value.items())
        elif isinstance(value, list):
            shown[name] = " ".join(map(str, value))
    common.print_facts(shown)
    sys.stdout.write("\nthe label says\n")
    common.print_facts(dict(legend(entry.metadata["label"])))


def _key_of(text: str) -> str:
    """The key of the kernel of this label that was used last; other text as it is."""
    named = [info for info in process_cache.entries() if info.ok and info.metadata["label"] == text]
    if not named and "-" in text:
        raise JitGemmError(f"no kernel in the cache has the label {text!r}")
    return max(named, key=lambda info: info.last_used).key if named else text


@cache_app.command("verify")
@common.guarded
def verify(as_json: common.Json = False) -> None:
    """Re-check every kernel's hash. Nothing is changed; a bad entry is compiled again when it is needed.

    \b
    Exit codes:
      0  all are good
      1  a bad one was found
    """
    checked = process_cache.verify()
    bad = [(entry, problem) for entry, problem in checked if problem]
    if as_json:
        common.print_json([entry_dict(entry) | {"problem": problem} for entry, problem in checked])
    elif bad:
        columns = ("key", "problem", "file")
        rows = [(entry.key[:12], problem, entry.path) for entry, problem in bad]
        common.out().print(common.table(columns, rows, left=columns))
    common.note(f"{len(checked)} checked, {len(bad)} bad")
    if bad:
        raise typer.Exit(common.FOUND)


_OLDER = "Drop kernels not used for this long: 30d, 12h, 90m."
_LARGER = "Drop the least recently used down to this much: 500M, 2G."


@cache_app.command("prune")
@common.guarded
def prune(
    older_than: Annotated[str | None, typer.Option("--older-than", metavar="AGE", help=_OLDER)] = None,
    max_size: Annotated[str | None, typer.Option("--max-size", metavar="SIZE", help=_LARGER)] = None,
    dry_run: _DryRun = False,
    as_json: common.Json = False,
) -> None:
    """Drop kernels that were not used lately, or until the folder is small enough.

    Only the first folder that can be written is touched.

    \b
    Examples:
      jitgemm cache prune --older-than 30d
      jitgemm cache prune --max-size 200M --dry-run
    """
    if older_than is None and max_size is None:
        raise ValueError("prune: give --older-than AGE or --max-size SIZE (to drop everything: jitgemm cache clear)")
    age = None if older_than is None else common.parse_age(older_than)
    size = None if max_size is None else common.parse_size(max_size)
    _report_dropped(process_cache.prune(age, size, dry_run), dry_run, as_json)


@cache_app.command("clear")
@common.guarded
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: _DryRun = False,
    as_json: common.Json = False,
) -> None:
    """Drop every kernel from the first folder that can be written. Asks first; without a terminal it needs --yes.

    \b
    Exit codes:
      0  done
      1  the answer was no
      2  wrong arguments, or nobody to ask
    """
    dropped = process_cache.prune(max_bytes=0, dry_run=True)
    if not dry_run:
        if not yes and (sys.stdin is None or not sys.stdin.isatty()):
            raise ValueError("clear: expected --yes where nobody can be asked")
        if not yes:
            typer.confirm(f"Drop {len(dropped)} kernels from {process_cache.writable_root()}?", abort=True, err=True)
        dropped = process_cache.clear()
    _report_dropped(dropped, dry_run, as_json)


def _report_dropped(dropped: list[EntryInfo], dry_run: bool, as_json: bool) -> None:
    size = _print_entries(dropped, as_json)
    common.note(f"{'would drop' if dry_run else 'dropped'} {len(dropped)} kernels, {size}")
