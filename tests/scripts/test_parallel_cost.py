"""scripts/parallel_cost.py: the simulation meets what was measured, and does what physics would."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cost():
    spec = importlib.util.spec_from_file_location("parallel_cost", ROOT / "scripts" / "parallel_cost.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["parallel_cost"] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["parallel_cost"]


def run(cost, *arguments: str):
    return CliRunner().invoke(cost.app, [*arguments])


def test_measured_points_are_met(cost):
    for m, (without, with_it) in cost.MEASURED.items():
        predicted = cost.mlp_us(m)
        assert predicted == pytest.approx((without, with_it), rel=0.1)
        assert predicted[1] - predicted[0] == pytest.approx(with_it - without)
    assert 0 < cost.NVLINK_SHARE < 1 and cost.START_US > 0


def test_quantisers_are_within_30_percent_of_what_was_measured(cost):
    rows = json.loads((ROOT / "docs" / "performance" / "quantize_h200.json").read_text())["rows"]
    rows = [r for r in rows if r["x"] == "bf16" and not any(word in r["mode"] for word in ("affine", "permuted"))]
    assert len(rows) > 40
    for row in rows:
        found = cost.quantise_us(row["m"], row["k"], 5 if "silu" in row["mode"] else 3)
        assert found == pytest.approx(row["us"], rel=0.3), row


def test_exchanges_over_nvlink_are_met(cost):
    """The outer two points by construction."""
    start, share = cost.exchange_figures()
    goes, there, back = cost.exchanged(cost.MODELS["Qwen3-30B-A3B"], cost.WORLD)
    for tokens, (without, with_it) in cost.measured_exchanges().items():
        predicted = without + cost.Cluster().exchange_us(cost.WORLD, tokens * goes * (there + back))
        assert predicted == pytest.approx(with_it, rel=1e-6 if tokens in (1, 2048) else 0.2)
    assert start > 0 and share * cost.NVLINK_SHARE < 1


def test_faster_links_never_take_longer(cost):
    slow, faster = cost.Cluster(), set()
    for model in cost.MODELS.values():
        for (tp, gpus), m in itertools.product(model.layouts, (1, 64, 4096)):
            base = cost.layer(model, slow, m, tp, gpus)
            for link in ("nvlink", "network"):
                fast = cost.layer(model, replace(slow, **{link: 2 * getattr(slow, link)}), m, tp, gpus)
                assert (fast.gemm_us, fast.quantise_us) == (base.gemm_us, base.quantise_us)
                used = gpus > 1 if link == "nvlink" else gpus > slow.gpus_per_node and gpus > tp
                assert fast.us <= base.us if used else fast == base
                if fast.us < base.us:
                    faster.add((link, model.name))
            assert (base.communication_us > 0) == (gpus > 1)
            assert cost.layer(model, slow, 2 * m, tp, gpus).us >= base.us
    assert faster == {("network", "DeepSeek-V3")} | {("nvlink", n) for n in cost.MODELS}


def test_the_host_is_waited_for_where_few_ranks_are_wanted(cost):
    model, cluster = cost.MODELS["DeepSeek-V3"], cost.Cluster()
    few, some, many = (cost.layer(model, cluster, m, 1, 32) for m in (1, 512, 4096))
    assert few.rows == "max_tokens" and few.wait_us == 0 and few.us < cost.host_us()
    assert some.rows in ("any", "max_tokens") and some.us <= max(cost.host_us(), some.us - some.wait_us)
    assert many.rows == "any" and many.wait_us == 0 and many.us > cost.host_us()
    assert cost.layer(model, cluster, 64, 8, 8).rows == ""


def test_a_token_goes_once_to_each_rank_that_has_an_expert_of_its(cost):
    model = replace(cost.MODELS["Qwen3-30B-A3B"], experts=cost.Experts(8, 3, 768))
    for gpus in (2, 4):
        owners = [{expert // (8 // gpus) for expert in chosen} for chosen in itertools.combinations(range(8), 3)]
        goes = sum(map(len, owners)) / len(owners) / gpus
        assert cost.exchanged(model, gpus) == (pytest.approx(goes), 2048 + 4 + 24, 4096)
    # docs/parallel.md has the library's own counts
    there, bf16 = (cost.exchanged(cost.MODELS["Qwen3-30B-A3B"], 2, size)[1] for size in (1, 2))
    assert (there, bf16) == (2116, 4160)


def test_the_page_has_the_table_that_the_script_makes(cost):
    result = run(cost)
    assert result.exit_code == 0, result.output
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert "\n".join(line.rstrip() for line in result.stdout.splitlines()) in page


def test_json_and_layouts(cost):
    arguments = ["--model", "DeepSeek-V3", "--m", "8", "--layout", "1x16,8x8", "--network", "20", "--json"]
    document = json.loads(run(cost, *arguments).stdout)
    assert document["simulated"] is True and document["cluster"]["network"] == 20e3
    far, near = document["rows"]
    assert (far["tp"], far["gpus"], near["tp"], near["gpus"]) == (1, 16, 8, 8)
    assert far["us_with_bf16"] > far["us"] and "us_with_bf16" not in near
    for row in document["rows"]:
        parts = row["gemm_us"] + row["quantise_us"] + row["collective_us"] + row["wait_us"]
        assert row["us"] == pytest.approx(parts) and 0 < row["communication"] < 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "GPT"], "--model: expected one of Llama-3-8B"),
        (["--m", "1,x"], "--m: expected a list such as 1,16,2048, got '1,x'"),
        (["--layout", "2"], "--layout: expected a list such as 1x1,2x2,1x8, got '2'"),
        (["--model", "Llama-3-8B", "--layout", "1x8"], "layout: expected tp up to 8 that divides 8 heads"),
        (["--model", "Qwen3-30B-A3B", "--layout", "8x8"], "layout: expected tp up to 8 that divides 4 heads"),
        (["--model", "DeepSeek-V3", "--layout", "1x3"], "layout: expected GPUs that share 256 experts alike, got 3"),
    ],
)
def test_wrong_arguments_exit_with_2(cost, arguments, text):
    result = run(cost, *arguments)
    assert result.exit_code == 2 and text in result.stderr
