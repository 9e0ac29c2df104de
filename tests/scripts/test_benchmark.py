"""scripts/benchmark.py without a GPU: arguments, the floor, documents, the gate, tables. Peers' results are checked where
they are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
import benchmark
import benchmark_moe_layer
import benchmark_quantize
from benchmark_lib import cells as cells_lib
from benchmark_lib import checks, data, host, timing
from benchmark_lib import results as results_lib
from benchmark_lib import run as run_lib
from benchmark_lib.cells import Cell, Experts, GroupedCell, from_record, make_moe_cells, parse_format, to_record
from benchmark_lib.compare import compare
from benchmark_lib.contestant import EXACT, WIDER, Contestant, Run
from benchmark_lib.contestants import pick
from benchmark_lib.ours import kernel_label, weight_of
from benchmark_lib.table import ours_rows

from jitgemm.jit.cache import KernelCache
from jitgemm.select.devices import device_spec


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    for name in ("COPY_BYTES", "GROUPED_BYTES"):
        monkeypatch.setattr(f"benchmark_lib.data.{name}", 1)


def result(us: float | None, spread: float = 0.01, note: str = "", **more) -> dict:
    figures = {} if us is None else {"spread": spread, "tflops": 100.0, "gbs": 2000.0, "replays": 15}
    return {"us": us, "note": note, **figures, **more}


def document(**us: float | None) -> dict:
    """A recorded run: one decode cell with these times, and one prefill cell ten times as long."""
    times = {"e4m3_g128": 5.0, "int8_ch": 4.5, "fp8row": 13.0, "hum_fp8_g128": 9.0} | us
    cells = []
    for m, factor in ((16, 1), (4096, 10)):
        results = {name: result(None if value is None else value * factor) for name, value in times.items()}
        results["int8mm"] = result(None, note="refused: _int_mm: n and k must be multiples of 8")
        cells.append({"n": 4096, "k": 4096, "m": m, "layer": "", "floor_us": 2.0 * factor, "results": results})
    return {
        "schema": results_lib.SCHEMA,
        "mode": "burst",
        "date": "2025-01-02T03:04:05+00:00",
        "environment": {"device": "NVIDIA H200", "driver": "580", "commit": "0123456789abcdef", "dirty": False},
        "settings": {},
        "floor": cells_lib.H200.floor(),
        "contestants": [
            {"name": name, "label": f"the {name}", "kind": kind, "ours": ours, "version": "1", "missing": missing}
            for name, kind, ours, missing in (
                ("e4m3_g128", "exact", True, None), ("int8_ch", "channel", True, None), ("fp8row", "wider", False, None),
                ("int8mm", "wider", False, None), ("hum_fp8_g128", "exact", False, None),
                ("hum_int8_ch", "channel", False, "cannot import humming.layer: ModuleNotFoundError"),
            )
        ],
        "cells": cells,
    }  # fmt: skip


def script(*argv: object):
    return CliRunner().invoke(benchmark.app, [*map(str, argv)])


@pytest.fixture
def recorded(tmp_path):
    """Writes a document to a file of this name and returns its path."""

    def write(name: str, value: dict) -> Path:
        path = tmp_path / name
        results_lib.write_document(path, value)
        return path

    return write


# cells, formats, arguments


@pytest.mark.parametrize(
    ("n", "k", "m", "floor_us"),
    [(4096, 4096, 1, 1.93), (4096, 4096, 64, 2.1), (4096, 4096, 8192, 183.25), (28672, 4096, 16, 13.68)],
)
def test_the_floor_is_the_longer_of_bytes_and_operations(n, k, m, floor_us):
    assert Cell(n, k, m).floor_us() == pytest.approx(floor_us, abs=0.006)


def test_the_floor_of_8_bit_weights_is_that_of_their_bytes():
    n, k, m, rates = 28672, 4096, 16, cells_lib.H200
    assert Cell(n, k, m).floor_us(bits=8) == (n * k + m * k + 2 * m * n) / rates.hbm_bytes_per_us
    assert Cell(n, k, 8192).floor_us(bits=8) == Cell(n, k, 8192).floor_us()  # of operations
    assert "weights*(n*k)" in rates.floor([8, 8]) and "(n*k/2 + 2*n*k/128 or n*k)" in rates.floor([8, 4])
    grouped = GroupedCell(n, k, m, "", Experts(8, 2, 8))
    assert grouped.floor_bytes(8) - grouped.bytes_of(0) == pytest.approx(grouped.hit * n * k)


@pytest.mark.parametrize("name", [
    "e4m3_g128", "e4m3_chz_any_b128e_bi", "int8_g256o", "int8_g64z_x_bi", "e4m3_g32z_any_f16_bi", "w8_e4m3_block_b128",
    "w8_int8_ch_bi", "mxfp4_ch_b128", "mxfp4_g32_f16", "nvfp4_g16_bi", "int8_2l",
])  # fmt: skip
def test_a_format_says_what_its_name_says(name):
    fmt = parse_format(name)
    size = next((size for size in (32, 64, 128, 256) if f"_g{size}" in name), 128 * ("block" in name))
    letter = name.split("_")[2 if name.startswith("w8_") else 1][-1]
    assert (fmt.name, fmt.lhs, fmt.group_size) == (name, "s8" if "int8" in name else "e4m3", size)
    assert (fmt.bits, fmt.zero_point, fmt.offset) == (8 if "w8_" in name else 4, letter == "z", letter == "o")
    switches = (fmt.any_codes, fmt.f16_sums, fmt.corrects, fmt.lhs_blocks, fmt.lhs_e8m0, fmt.batch_invariant)
    assert switches == tuple(f"_{each}" in name for each in ("any", "f16", "x", "b128", "b128e", "bi"))
    assert (fmt.mxfp4, fmt.nvfp4, fmt.two_level) == ("mxfp4" in name, "nvfp4" in name, "2l" in name)


@pytest.mark.parametrize("text", [
    "e4m3", "bf16_g128", "e4m3_g48", "int8_g128_fast", "", "e4m3_g128_bi_any", "e4m3_g128_any_any",
    "e4m3_g128_", "z", "w8_e4m3_g32", "w8_int8_block_any", "w8_int8_chz", "e4m3_block", "e4m3_g128_bi_b128",
    "e4m3_g128_b128_b128e", "e4m3_g128_e", "int8_g128_f16", "e4m3_ch_f16", "e4m3_g128_f16_b128",
    "w8_e4m3_block_f16", "mxfp4_g32_f16_b128", "mxfp4_ch_f16", "nvfp4_g16_f16", "nvfp4_g128", "nvfp4_g16z", "e4m3_2l",
    "int8_2l_any", "int8_2lo", "w8_int8_2l", "int8_g128_x", "e4m3_g128z_x", "int8_g128zo", "int8_cho",
    "int8_g128z_x_b128", "e4m3_g128o_f16",
])  # fmt: skip
def test_an_unknown_format_is_refused_with_what_is_known(text):
    with pytest.raises(ValueError, match="--format: expected e4m3 or int8, then _g32"):
        parse_format(text)


def test_a_formats_bytes_count_scales_and_zero_points():
    codes = 4096 * 4096 / 2
    more = {"e4m3_g128": 32 * 2, "e4m3_g128z": 32 * 3, "int8_ch": 2, "int8_g128o": 32 * 4, "int8_g128z_x": 32 * 4}
    more |= {"nvfp4_g16": 256, "mxfp4_ch": 128, "int8_2l": 2 * 32 + 2}
    for name, scales in more.items():
        assert parse_format(name).weight_bytes(4096, 4096) == codes + 4096 * scales, name


def test_peers_are_picked_by_name_and_by_library():
    assert [e.name for e in pick(peers=["none"])] == ["e4m3_g128", "int8_g128", "int8_ch", "e4m3_g128_any"]
    assert [e.name for e in pick([parse_format("int8_g64_bi")], ["none"])] == ["int8_g64_bi"]
    names = [e.name for e in pick(peers=["humming", "bf16", "hum_int8_ch"]) if not e.ours]
    assert names[:3] == ["bf16", "hum_fp8_g128", "hum_int8_g128"] and len(names) == len(set(names)) == 7
    with pytest.raises(ValueError, match="--peer.*fp8row"):
        pick(peers=["cublas"])


# the command


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--shape", "4096"), "--shape"),
        (("--m", "0"), "--m"),
        (("--format", "int3_g128"), "--format"),
        (("--peer", "cublas"), "--peer"),
        (("--host", "--sustained"), "--sustained"),
        (("--host", "--moe"), "--host: expected none of"),
        (("--from", "nowhere.json"), "nowhere.json"),
        (("--moe", "--shape", "64,128"), "cannot be combined with it"),
        (("--moe", "--preset", "llama-8b"), "expected one of qwen3-30b, dsv3-ep8"),
        (("--moe", "--peer", "fp8ten"), "--peer: expected one of"),
    ],
)
def test_wrong_arguments_exit_2_and_say_which(argv, said):
    done = script(*argv)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())


# documents


def test_a_file_that_is_no_document_is_refused(tmp_path):
    path = tmp_path / "some.json"
    for text in ("[1]", '{"cells": []}', '{"schema": 1}', '{"schema": 99, "cells": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="some.json: expected a result of .* with schema 1"):
            results_lib.read_document(path)


# the gate


@pytest.mark.parametrize(
    ("times", "spread", "expected"),
    [(1.039, 0.01, "same"), (1.05, 0.01, "slower"), (1 / 1.05, 0.01, "faster"), (1.09, 0.05, "same"),
     (1.09, 0.04, "slower"), (None, 0.01, "lost"), ("wrong", 0.01, "lost")],
)  # fmt: skip
def test_a_cell_is_slower_beyond_the_noise_of_both_files_or_4_percent(times, spread, expected):
    wrong = times == "wrong"
    base, new = document(), document(e4m3_g128=5.0 if wrong else times and 5.0 * times)
    for one in (base, new):
        for cell in one["cells"]:
            cell["results"]["e4m3_g128"] |= {"spread": spread, "correct": not (wrong and one is new)}
    found = {(change.m, change.name): change.verdict for change in compare(base, new).changes}
    assert found[16, "e4m3_g128"] == found[4096, "e4m3_g128"] == expected and found[16, "int8_ch"] == "same"


def test_peers_do_not_fail_the_gate_but_their_drift_is_told():
    compared = compare(document(), document(fp8row=26.0, hum_fp8_g128=18.0))
    assert compared.regressions == []
    assert compared.peers_ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("breaking", "said"),
    [
        (lambda d: d.update(mode="sustained"), "baseline is burst"),
        (lambda d: d["environment"].update(device="NVIDIA H20"), "measured on"),
        (lambda d: d["cells"].clear(), "no cell"),
    ],
)
def test_documents_that_cannot_be_compared_are_refused(breaking, said):
    new = document()
    breaking(new)
    with pytest.raises(ValueError, match=said):
        compare(document(), new)


def test_the_command_exits_1_for_a_regression_and_for_a_wrong_result(recorded):
    base = recorded("base.json", document())
    assert script("--from", base, "--compare", base).exit_code == 0
    slower = script("--from", recorded("new.json", document(e4m3_g128=6.0)), "--compare", base)
    assert slower.exit_code == 1 and "slower" in slower.stdout and "+20.0%" in slower.stdout, slower.stderr
    wrong = document(e4m3_g128=None)
    wrong["cells"][0]["results"]["e4m3_g128"] = result(None, note="WRONG RESULT, not timed", correct=False)
    done = script("--from", recorded("wrong.json", wrong))
    assert done.exit_code == 1 and "m=16 e4m3_g128: WRONG RESULT" in done.stderr


# tables


def test_the_table_has_ours_in_detail_and_says_who_is_missing(recorded):
    done = script("--from", recorded("result.json", document()))
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    decode = next(line.split() for line in lines if line.split()[:4] == ["4096", "4096", "16", "e4m3_g128"])
    assert decode[4] == "5.00" and "hum_fp8_g128" in decode and "1.80" in decode  # 9 / 5
    assert "40" in decode  # % of the floor: 2 / 5
    assert "hum_int8_ch: cannot import humming.layer" in done.stdout
    assert "int8mm: refused: _int_mm" in done.stdout


def test_the_best_of_its_kind_leaves_other_kinds_out():
    row = next(row for row in ours_rows(document(fp8row=2.5)) if row[2:4] == ("16", "e4m3_g128"))
    assert row[9:13] == ("hum_fp8_g128 9.00", "1.80", "fp8row 2.50", "0.50")
    row = next(row for row in ours_rows(document()) if row[2:4] == ("16", "int8_ch"))
    assert row[9:11] == ("-", "-")


# the measurement, with nothing to measure on


class FakeTimed:
    """Takes the calls without a GPU: what the first returns is its time."""

    def __init__(self, calls):
        self.calls, self.turns, self.times, self.us, self.spread = len(calls), [], [0.0], calls[0](), 0.0

    def turn(self, replays):
        self.turns.append(replays)


def fake(name: str, us: float, ours: bool = False, error: Exception | None = None, bits: int = 4) -> Contestant:
    def load(source):
        def start(m):
            if error is not None:
                raise error
            return Run(calls=[lambda: us] * 2, rows=lambda rows: None, bytes=1e6, poison=lambda: None)

        return start

    return Contestant(name, name, EXACT if ours else WIDER, ours, "torch", None, load, floor_bits=bits)


@pytest.fixture
def no_gpu(monkeypatch):
    source = data.Source
    monkeypatch.setattr(timing, "Timed", FakeTimed)
    monkeypatch.setattr(data, "Source", lambda n, k: source(n, k, device="cpu"))
    monkeypatch.setattr(checks, "check", lambda run, source, m: {"correct": True})
    monkeypatch.setattr(run_lib, "_check_context", lambda error: None)
    monkeypatch.setattr(run_lib, "_free", lambda: None)


def measured(contestants: list[Contestant], ms=(1, 16), once=False) -> list[dict]:
    records: list[dict] = []
    cells = [Cell(64, 128, m) for m in ms]
    run_lib.measure(cells, contestants, run_lib.Settings(3, 2, False, once), records.append, lambda text: None)
    return records


def test_what_was_wrong_in_the_one_cell_of_a_weight_that_is_checked_is_not_timed_in_the_others(no_gpu, monkeypatch):
    checked: list[int] = []
    wrong = {"correct": False}
    monkeypatch.setattr(checks, "check", lambda run, source, m: checked.append(m) or dict(wrong))
    for expected in (None, 4.0):
        records = measured([fake("a", 4.0)], once=True)
        assert checked == [1] and [record["results"]["a"]["us"] for record in records] == [expected, expected]
        checked.clear()
        wrong["correct"] = True


@pytest.mark.parametrize(("others", "expected"), [((4, 8), (4, 8, 4)), ((8, 8), (8, 8, 8)), ((4, 4), (4, 4, 4))])
def test_each_format_has_the_floor_of_its_bits_and_peers_that_of_the_cell(no_gpu, others, expected):
    ours = [fake(f"ours{i}", 4.0, ours=True, bits=bits) for i, bits in enumerate(others)]
    (record,) = measured([*ours, fake("peer", 5.0)], ms=(1,))
    floors = {bits: Cell(64, 128, 1).floor_us(bits=bits) for bits in (4, 8)}
    assert record["floor_bits"] == min(others) and record["floor_us"] == round(floors[min(others)], 3)
    for (name, found), bits in zip(record["results"].items(), expected):
        assert found["floor_bits"] == bits and found["floor_us"] == round(floors[bits], 3), name
        assert found["floor_percent"] == round(100 * floors[bits] / found["us"], 1)


def test_everybody_gets_a_turn_a_round_with_changing_neighbours():
    names = [f"contestant {i}" for i in range(12)]
    turns = run_lib._turns(dict.fromkeys(names), run_lib.Settings(11, 1, False, False))
    rounds = [turns[i : i + 12] for i in range(0, len(turns), 12)]
    assert len(rounds) == 11 and all(sorted(each) == sorted(names) for each in rounds)
    before = {name: {a for a, b in zip(turns, turns[1:]) if b == name} for name in names}
    assert min(map(len, before.values())) >= 5
    assert turns == run_lib._turns(dict.fromkeys(names), run_lib.Settings(11, 1, False, False))


# our weights, right and wrong results, on the CPU


def source_of(moe: bool):
    return data.GroupedSource(72, 288, Experts(5, 2, 8), device="cpu") if moe else data.Source(72, 288, device="cpu")


@pytest.mark.parametrize(("name", "moe"), [
    *((name, False) for name in (
        "e4m3_g128", "int8_ch_bi", "w8_e4m3_block_b128", "int8_g128_b128e", "int8_g128z_x", "int8_g128o")),
    *((name, True) for name in ("e4m3_g128", "int8_g64z", "int8_ch_bi", "w8_int8_block_b128", "w8_e4m3_ch")),
])  # fmt: skip
def test_the_kernels_compiled_ahead_are_those_that_the_calls_take(name, moe, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("jitgemm.runtime.device.device_of", lambda index: device_spec("h200"))
    monkeypatch.setattr(KernelCache, "get_or_compile", lambda *some, **_: (compiled.append(some[1].label), True))
    fmt, source, ms = parse_format(name), source_of(moe), (1, 64, 1024)
    cells = [source.cell(m) for m in ms] if moe else [Cell(72, 288, m) for m in ms]
    assert run_lib.compile_ahead(cells, [fmt]) == (len(compiled), len(compiled))
    packed = [weight_of(fmt, each) for each in (source.distinct if moe else [source])]
    weight = type(packed[0]).stacked(5, packed.__getitem__) if moe else packed[0]
    assert set(compiled) == {kernel_label(fmt, weight, cell.most_rows if moe else cell.m) for cell in cells}


@pytest.mark.parametrize(("name", "moe"), [
    *((name, False) for name in (
        "e4m3_g128_any_bi", "e4m3_g64z", "int8_ch", "e4m3_g64_b128", "w8_int8_ch", "w8_e4m3_block_b128e", "nvfp4_g16",
        "int8_2l", "mxfp4_g32", "int8_g32o_x")),
    *((name, True) for name in ("e4m3_g128", "e4m3_g64z_bi", "int8_g32", "int8_ch", "w8_e4m3_block_b128e")),
])  # fmt: skip
def test_our_results_pass_both_checks_and_wrong_ones_do_not(name, moe):
    (mine,), source = pick([parse_format(name)], ["none"], moe=moe), source_of(moe)
    run = mine.load(source)(60)
    assert len(run.calls) == (cells_lib.ROUTINGS if moe else 2)
    assert run.calls[0].keywords.get("batch_invariant", False) == name.endswith("_bi")
    found = checks.check(run, source, 60)
    assert found["correct"] and 0 < found["error_over_bound"] <= 1 and 0.01 < found["error"] < 0.3

    out, good = run.calls[0].args[2], list(run.calls)
    for fault in (lambda: out.mul_(1.05), lambda: out[3].fill_(torch.nan)):
        run.calls = [lambda call=call: (call(), fault()) for call in good]
        assert not checks.check(run, source, 60)["correct"]
    assert len(run.snapshot()) == (sum(source.cell(60).loads[-1]) if moe else 60)  # no row of no expert


def test_a_call_s_host_time_is_told_and_a_contestant_that_fails_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    source = source_of(moe=False)
    monkeypatch.setattr(data, "Source", lambda n, k: source)
    monkeypatch.setattr(host, "BURST", 3)
    everybody = [*pick([parse_format("int8_ch")], ["int8mm"]), fake("x", 1.0, error=OSError("y"))]
    host.print_host(72, 288, 4, everybody, Console(width=160))
    ours, peer, failed, empty = (line.split() for line in capsys.readouterr().out.splitlines()[-4:])
    assert min(float(row[at]) for row in (ours, peer) for at in (-3, -2)) > float(empty[-2])
    assert failed == ["x", "-", "-", "-", "OSError:", "y"]


# the quantiser


@pytest.mark.parametrize("m", [1, 5])
def test_a_call_of_each_quantiser_mode_moves_the_bytes_it_says(m, monkeypatch):
    monkeypatch.setattr(benchmark_quantize, "COLD_BYTES", 1)
    for mode in benchmark_quantize.MODES:
        k = 384
        calls, copies, moved = benchmark_quantize.calls_of(mode, m, k, "bf16", "cpu")
        x = calls[0].__defaults__[0]
        results = calls[0]()
        q, scale, *more = results[: 3 if "affine" in mode else 2]
        assert q.shape == (m, 512 if "sums" in mode else k), mode
        assert scale.shape == ((m, 3) if "block" in mode else (m,)), mode
        assert 0 < float(q.view(torch.uint8).float().std()) and bool((scale > 0).all())
        parameters = 2 * k * ("rms_norm" in mode) + 4 * k * ("permuted" in mode) + 4 * m * k * ("residual" in mode)
        assert moved == x.nbytes + q.nbytes + 4 * scale.numel() + sum(each.nbytes for each in more) + parameters, mode
        assert copies[0].__defaults__[0].nbytes >= moved - 1


# mixtures of experts

RECORDED_PEERS = ROOT / "docs" / "performance" / "moe_peers_h200.json"


@pytest.mark.parametrize("experts", [(8, 2, 8), (32, 8, 256), (1, 1, 1), (3, 5, 9)], ids=str)
def test_the_experts_of_a_token_are_distinct_and_every_row_is_somebody_s(experts):
    experts = Experts(*experts)
    for tokens in (1, 7, 100):
        cell = GroupedCell(64, 128, tokens, "", experts)
        assert len(cell.loads) == cells_lib.ROUTINGS
        for load in cell.loads:
            assert len(load) == experts.count and max(load) <= tokens
            assert experts.count < experts.of or sum(load) == tokens * experts.top_k
        assert cell.most_rows == max(1, *map(sum, cell.loads))
        assert cell.loads == GroupedCell(8, 32, tokens, "", experts).loads


def test_a_cell_reads_back_from_its_record():
    for cell in (Cell(64, 128, 3, "down_proj"), GroupedCell(64, 128, 3, "tiny w2", Experts(4, 2, 8))):
        record = json.loads(json.dumps(to_record(cell) | {"results": {}}))
        assert from_record(record) == cell


def test_a_preset_gives_both_gemms_of_its_experts():
    cells = make_moe_cells(["qwen3-30b"], ms=[1, 64])
    experts = Experts(128, 8, 128)
    assert {(cell.n, cell.k, cell.experts) for cell in cells} == {(1536, 2048, experts), (2048, 768, experts)}
    assert [cell.m for cell in cells] == 2 * [1, 64]


def test_torch_s_grouped_gemm_passes_the_check_and_another_expert_s_weight_does_not():
    pytest.importorskip("torch", minversion="2.13")  # 2.8 has none on the CPU
    source = source_of(moe=True)
    bf16 = next(each for each in pick([], ["bf16"], moe=True))
    assert checks.check(bf16.load(source)(40), source, 40)["correct"]
    run = bf16.load(source)(40)
    source.distinct.reverse()
    assert not checks.check(run, source, 40)["correct"]


@pytest.mark.parametrize("mode", ["e4m3", "int8-channel", "w8-e4m3", "w8-int8", "w8-e4m3-block"])
@pytest.mark.parametrize("everywhere", [4, 8])
def test_the_parts_of_a_fused_layer_make_the_layer_s_result(mode, everywhere):
    torch.manual_seed(5)
    model = {"experts": 4, "everywhere": everywhere, "top_k": 2, "k": 256, "inter": 160}
    dtype_name, bits, group_size, _ = benchmark_moe_layer.MODES[mode]
    weights = benchmark_moe_layer.weights_of(model, bits, group_size, getattr(torch, dtype_name), "cpu")
    assert {type(weight).__name__ for weight in weights} == {f"W{bits}Weight"}
    calls = benchmark_moe_layer.calls_of(model, 6, weights, mode, 1, "cpu")
    out = calls["layer"][0].__defaults__[-1]
    calls["layer"][0]()
    expected = out.clone()
    for part in benchmark_moe_layer.PARTS:
        calls[part][0]()
    assert expected.float().norm() > 0
    assert torch.equal(out, expected)


def moe_document(**us: float) -> dict:
    """A recorded run of two models' cells that have n, k and tokens in common."""
    found = document()
    times = {"e4m3_g128": 20.0, "int8_ch": 15.0} | us
    cells = [
        GroupedCell(1536, 2048, 8, "qwen3-30b w13", Experts(128, 8, 128)),
        GroupedCell(1536, 2048, 8, "x w13", Experts(64, 8, 64)),
    ]
    found["cells"] = [
        to_record(cell) | {"floor_us": 18.98, "results": {name: result(value) for name, value in times.items()}}
        for cell in cells
    ]
    return found


def test_recorded_peers_stand_beside_ours_where_the_layer_is_theirs():
    found = moe_document()
    results_lib.add_recorded_peers(found, RECORDED_PEERS)
    first, second = (cell["results"] for cell in found["cells"])
    assert first["vllm_w4a8"]["us"] == 48.46 and "vllm_w4a8" not in second
    found["environment"]["device"] = "NVIDIA H100 80GB HBM3"
    with pytest.raises(ValueError, match="was measured on NVIDIA H200, this on NVIDIA H100"):
        results_lib.add_recorded_peers(found, RECORDED_PEERS)


def test_grouped_cells_are_compared_with_those_of_the_same_experts():
    slower = moe_document()
    slower["cells"][1]["results"]["int8_ch"]["us"] = 30.0
    assert [change.verdict for change in compare(moe_document(), slower).changes].count("slower") == 1
