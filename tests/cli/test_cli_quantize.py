"""jitgemm quantize: what it writes is what quantize_ makes, every reader reads it, and an interruption changes
nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from functools import partial, partialmethod
from itertools import groupby
from pathlib import Path

import pytest
import rich.progress
import torch
from byte_tokenizer import byte_tokenizer
from disks import disk_of
from model_folders import LAYERS, MOE, SIZES, emptied, folder_of, logits, model_of, quantised, short_texts, transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import quantised_names, same_state
from terminals import on_a_terminal

import jitgemm.nn
from jitgemm.nn.quantize import evaluate
from jitgemm.nn.quantize.evaluate import compared, help_texts, log_probabilities, texts_of, windows_of
from jitgemm.nn.recipe import Recipe
from jitgemm.nn.save import export, model_folder
from jitgemm.nn.save.resume import ResumableFolder
from jitgemm.nn.warm.ahead import models_ahead

pytest.importorskip("tokenizers")

from jitgemm.cli import main

FEW = ("--tokens", "512")
"""Two windows of calibration."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch, quiet_transformers):
    monkeypatch.setattr(evaluate, "help_texts", short_texts)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def run(command):
    """The command on the CPU: run(folder, out, "--tokens", "512")."""
    return partial(command, "quantize", "--device", "cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Tests only read it."""
    return folder_of(tmp_path_factory.mktemp("llama") / "model", model_of("Llama", **SIZES))


@pytest.fixture
def own_llama(llama, tmp_path) -> Path:
    """A copy of this test's own."""
    return Path(shutil.copytree(llama, tmp_path / "own"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(llama, tmp_path_factory) -> Path:
    """The folder that the command makes of `llama`."""
    out = tmp_path_factory.mktemp("written") / "out"
    with pytest.raises(SystemExit) as exit:
        main(["quantize", str(llama), str(out), *FEW, "--device", "cpu", "--json"])
    assert not exit.value.code
    return out


def test_load_makes_the_model_that_quantize_makes(llama, written):
    loaded = emptied(written)
    report = jitgemm.nn.load_(loaded, written)
    expected = quantised(llama)
    assert list(report) == LAYERS and same_state(loaded, expected)
    assert torch.equal(logits(loaded), logits(expected))
    hf = pytest.importorskip("jitgemm.hf")
    by_hf = transformers.AutoModelForCausalLM.from_pretrained(written, dtype="auto", config=hf.config(written))
    assert quantised_names(by_hf) == LAYERS and torch.equal(logits(by_hf), logits(expected))


def test_all_that_is_not_quantised_is_the_sources_byte_for_byte(llama, written):
    before, after = contents(llama), contents(written)
    assert before.keys() - after.keys() == {"pytorch_model.bin"} and after.keys() <= before.keys()
    for name in ("LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert after[name] == before[name]
    config = json.loads(after["config.json"])
    said = config.pop("quantization_config")
    assert config == json.loads(before["config.json"]) and said["ignore"] == ["lm_head"]
    index = json.loads(after["model.safetensors.index.json"])
    shards = [name for name in after if name.endswith(".safetensors")]
    assert len(shards) > 1 and set(index["weight_map"].values()) == set(shards)
    total = 0
    for shard in shards:
        old, new = load_file(llama / shard), load_file(written / shard)
        assert {index["weight_map"][name] for name in new} == {shard}
        total += sum(tensor.nbytes for tensor in new.values())
        for name, tensor in old.items():
            layer = name.removesuffix(".weight")
            if layer in LAYERS:
                suffixes = {each.removeprefix(f"{layer}.") for each in new if each.startswith(f"{layer}.")}
                assert suffixes == {"weight_packed", "weight_scale", "weight_shape"}
                assert bool((new[f"{layer}.weight_scale"] > 0).all())  # as other readers expect
            else:
                assert torch.equal(new[name], tensor)
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("scheme, activation, code, options", [
    ("two-level", "int8", "two_level", ("--data", "none")), ("mxfp4", "e4m3", "e2m1", ("--data", "none")),
    ("mxfp4", "e4m3", "e2m1", (*FEW, "--keep-8bit", "0.003")),
    ("int4", "int8", "int4", (*FEW, "--keep-8bit", "0.002", "--activation", "int8")),
])  # fmt: skip
def test_a_scheme_is_written_as_its_engines_read_it(run, llama, tmp_path, scheme, activation, code, options):
    out, limit = tmp_path / "out", float(options[3]) if "--keep-8bit" in options else None
    facts = run(llama, out, *options, "--scheme", scheme, "--json").json
    assert (facts["scheme"], facts["activation"]) == (scheme, activation)
    eight = {each["name"] for each in facts["layers"] if each["bits"] == 8}
    assert bool(eight) == ("--keep-8bit" in options) and len(eight) < len(LAYERS)
    loaded = emptied(out)
    assert list(jitgemm.nn.load_(loaded, out)) == LAYERS
    said = {"scheme": scheme, "activation": activation}
    said |= {} if scheme == "int4" else {"group_size": None, "positive_scales": None}
    expected = quantised(llama, 2 if eight else None, keep_8bit=limit, **said)
    for name in LAYERS:
        weights = [model.get_submodule(name).weight for model in (loaded, expected)]
        of_8 = "int8" if activation == "int8" else "e4m3"
        assert weights[0].format.code == weights[1].format.code == (of_8 if name in eight else code)
        assert torch.equal(*(weight.dequantize() for weight in weights))
    assert torch.equal(logits(loaded), logits(expected))
    if eight:  # as vLLM's first match counts
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        first, second = config["config_groups"].values()
        assert set(first["targets"]) == eight and "Linear" not in second["targets"]


WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
"""Layers of whole blocks of 128 columns."""


@pytest.mark.parametrize("options, said", [
    (("--scheme", "two-level", *FEW), {"scheme": "two-level"}),
    (("--scheme", "two-level", "--keep-8bit", "0.0012", *FEW), {"scheme": "two-level", "keep_8bit": 0.0012}),
    (("--data", "none", "--scheme", "int4"), {"scheme": "int4"}),
    (("--data", "none", "--scheme", "mxfp4"), {"scheme": "mxfp4", "positive_scales": None}),
], ids=["two levels", "two levels and 8 bits", "groups", "mxfp4"])  # fmt: skip
def test_rotated_layers_are_written_as_compressed_tensors_says_them(run, tmp_path, options, said):
    """jitgemm and transformers with its config read them as `quantize_` makes them."""
    hf, source, out = pytest.importorskip("jitgemm.hf"), tmp_path / "source", tmp_path / "out"
    folder_of(source, model_of("Llama", **WIDE))
    assert run(source, out, "--rotation", 128, *options).code == 0
    said = {"rotation": 128, "positive_scales": True if said["scheme"] == "int4" else None, "group_size": None} | said
    expected = quantised(source, None if "none" in options else 2, **said)
    loaded, config = emptied(out), json.loads((out / "config.json").read_text())["quantization_config"]
    layers = list(jitgemm.nn.load_(loaded, out))
    assert layers == LAYERS[:7] and config["quant_method"] == "compressed-tensors"
    for name in layers:
        mine, other = (model.get_submodule(name) for model in (loaded, expected))
        assert mine.weight.rotation == 128 and mine.activation == other.activation
        assert (mine.weight.format.code, mine.weight.bits) == (other.weight.format.code, other.weight.bits)
        assert torch.equal(mine.weight.dequantize(), other.weight.dequantize())
    ahead = [{n: (x.weight.format, x.weight.rotation, x.activation) for n, x in model.named_modules() if n in layers}
             for model in (*models_ahead(out), loaded)]  # fmt: skip
    assert ahead[0] == ahead[1]
    if "keep_8bit" in said:
        assert {loaded.get_submodule(name).weight.format.code for name in layers} == {"two_level", "int8"}
        return  # transformers does not read mixtures with zero points
    assert torch.equal(logits(loaded), logits(expected))
    by_hf = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", config=hf.config(out))
    assert torch.equal(logits(by_hf), logits(loaded))


def test_layers_that_qserve_s_tiles_do_not_hold_stay():
    """96 columns are three tiles, 160 no group of 128 and a part."""
    from jitgemm.nn.quantize.folder import filter_for

    model, reasons = model_of("Llama", **(SIZES | {"intermediate_size": 160})), {}
    fits, mlp = filter_for(model, Recipe(scheme="two-level"), reasons), model.model.layers[0].mlp
    assert fits("model.layers.0.mlp.up_proj", mlp.up_proj) and not fits("model.layers.0.mlp.down_proj", mlp.down_proj)
    assert "columns in multiples of 128, or of 32 up to there" in reasons["model.layers.0.mlp.down_proj"]


MIXTURES = {"Qwen3Moe": MOE | {"head_dim": 16}, "GptOss": MOE | {"head_dim": 16, "intermediate_size": 64}}


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_written_under_a_name_for_each(run, tmp_path, kind):
    """GPT-OSS's files stack them, gates and ups in turn, with biases; the others name each."""
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 stacks no experts")
    folder = folder_of(tmp_path / "model", model_of(kind, **MIXTURES[kind]))
    out = tmp_path / "out"
    done = run(folder, out, *FEW, "--group-size", 32, "--json")
    assert done.code == 0, done.stderr
    loaded = emptied(out)
    jitgemm.nn.load_(loaded, out)
    expected = quantised(folder)
    assert quantised_names(loaded) == quantised_names(expected) and any("experts" in n for n in quantised_names(loaded))
    assert kind == "GptOss" or same_state(loaded, expected)  # GPT-OSS's gates come from files in another order
    assert torch.equal(logits(loaded), logits(expected))
    names = {name for file in out.glob("*.safetensors") for name in load_file(file)}
    assert sum(name.endswith("weight_packed") and ".experts.3." in name for name in names) == 6
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(name.endswith(("gate", "router")) for name in ignored)


def test_weights_that_the_model_joins_are_written_apart(run, own_llama, tmp_path, monkeypatch):
    """The files have q, k and v, Phi-3 has them in one Linear: so this transformers is told."""
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 joins none")
    from transformers import conversion_mapping, modeling_utils
    from transformers.core_model_loading import Concatenate, WeightConverter

    parts = {"gate_up_proj": ("gate", "up"), "qkv_proj": "qkv"}
    join = [Concatenate(dim=0)]
    rules = [WeightConverter([f"{each}_proj.weight" for each in of], [f"{whole}.weight"], operations=join)
             for whole, of in parts.items()]  # fmt: skip
    for module in (conversion_mapping, modeling_utils):
        monkeypatch.setattr(module, "get_model_conversion_mapping", lambda *_, **__: rules)
    transformers.Phi3Config(**SIZES, pad_token_id=0, dtype=torch.bfloat16).save_pretrained(own_llama)
    done = run(own_llama, tmp_path / "out", *FEW, "--json")
    assert done.code == 0, done.stderr
    names = {layer["name"] for layer in done.json["layers"]}
    assert "model.layers.0.self_attn.qkv_proj" in names and len(names) == 8
    loaded = emptied(tmp_path / "out")
    jitgemm.nn.load_(loaded, tmp_path / "out")
    assert torch.equal(logits(loaded), logits(quantised(own_llama)))
    written = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert {f"{layer}.weight_packed" for layer in LAYERS} <= written


def test_of_a_model_that_sees_images_the_text_decoder_is_quantised(run, tmp_path):
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 renames its tensors by rules that are not read here")
    sees = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    sees |= {"image_size": 28, "patch_size": 14}
    text = WIDE | {"head_dim": 16}  # of 64 columns: o_proj is not rotated
    sizes = {"text_config": text, "vision_config": sees, "mm_tokens_per_image": 4}
    folder = folder_of(tmp_path / "model", model_of("Gemma3", **sizes))
    done = run(folder, tmp_path / "out", *FEW, "--json")
    assert done.code == 0, done.stderr
    names = [layer["name"] for layer in done.json["layers"]]
    assert len(names) == 7 and all("language_model.layers.0." in name for name in names)
    loaded = emptied(tmp_path / "out")
    report = jitgemm.nn.load_(loaded, tmp_path / "out")
    assert sorted(report) == sorted(names) and torch.isfinite(logits(loaded)).all()
    assert all((loaded.get_submodule(name).weight.rotation == 128) != ("o_proj" in name) for name in names)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "vision_tower.encoder.layers.0.mlp.fc1" in ignored


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_shards_in_folders_of_one_name_are_written_side_by_side(run, own_llama, written, tmp_path):
    index = own_llama / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    for number, name in enumerate(sorted(set(said["weight_map"].values()))):
        (own_llama / f"part{number}").mkdir()
        (own_llama / name).rename(own_llama / f"part{number}" / "model.safetensors")
        said["weight_map"] = {
            tensor: f"part{number}/model.safetensors" if file == name else file
            for tensor, file in said["weight_map"].items()
        }
    index.write_text(json.dumps(said))
    out = tmp_path / "out"
    assert run(own_llama, out, *FEW).code == 0
    files = [path for path in out.rglob("*.safetensors")]
    assert len(files) == number + 1 and all(path.parent == out for path in files)
    loaded, expected = ({n: t for path in each.glob("*.safetensors") for n, t in load_file(path).items()}
                        for each in (out, written))  # fmt: skip
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)
    (own_llama / "part0" / "model.safetensors").unlink()
    ended(run(own_llama, tmp_path / "none"), 3, "found no part0/model.safetensors", tmp_path / "none")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_evaluated_is_the_model_that_load_makes(run, llama, tmp_path, device):
    """By the kernels on a GPU, whose results are the same bits in every run."""
    facts = run(llama, tmp_path / "out", *FEW, "--device", device, "--json").json
    errors = [layer["error"] for layer in facts["layers"]]
    assert {layer["name"] for layer in facts["layers"]} == set(LAYERS) and facts["tokens"] == 512
    assert errors == sorted(errors, reverse=True) and 0 < errors[-1] and errors[0] < 0.2
    tensors = {name: each for file in llama.glob("*.safetensors") for name, each in load_file(file).items()}
    assert facts["bytes_before"] == sum(tensor.nbytes for tensor in tensors.values()) > facts["bytes_after"] / 0.6
    before = facts["evaluation"]["before"]
    assert (before["kl"], before["same"], facts["evaluation"]["tokens"]) == (0, 1, 8 * 255)
    loaded = emptied(tmp_path / "out")
    jitgemm.nn.load_(loaded, tmp_path / "out", device=device)
    ids = windows_of(byte_tokenizer(), help_texts()[0], 8).to(device)
    floats = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto").to(device)
    base, got = ([*log_probabilities(model, ids)] for model in (floats, loaded))
    assert facts["evaluation"]["after"] == pytest.approx(compared(base, got, ids), rel=1e-6)


def test_perplexity_and_divergence_are_their_definitions():
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (5, 9))
    base, got = (torch.randn(5, 8, 50).log_softmax(-1) for _ in range(2))
    base[0, 0, 3] = got[0, 0, 3] = -torch.inf  # which adds nothing
    targets = ids[:, 1:]
    targets[0, 0] = 4
    found = compared(base.split(2), iter(got.split(2)), ids)
    loss = torch.nn.functional.nll_loss(got.flatten(0, 1), targets.flatten())
    finite = (each.flatten(0, 1)[1:] for each in (got, base))
    expected = torch.nn.functional.kl_div(*finite, log_target=True, reduction="sum")
    terms = base[0, 0].exp() * (base[0, 0] - got[0, 0])
    assert found["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert found["kl"] == pytest.approx(float(expected + terms[terms.isfinite()].sum()) / 40, rel=1e-5)
    assert found["same"] == float((base.argmax(-1) == got.argmax(-1)).double().mean())


def test_a_table_goes_to_stdout_and_notes_to_stderr(run, llama, tmp_path):
    done = run(llama, tmp_path / "out", *FEW)
    assert done.stdout.startswith("layer ") and done.stdout.count(" dB") == 10
    assert "perplexity" in done.stdout and "KL divergence" in done.stdout
    out = tmp_path / "out"
    phases = f"reading {llama}", "7 of 14 layers are quantised\n14 of 14 layers are quantised\n", f"{out} is complete; "
    assert sorted(phases, key=done.stderr.index) == [*phases]
    for text in (
        "Python's help topics",
        "groups of 32: model.layers.",
        "14 layers of 4 bits, 0 of 8",
        "--quantization jitgemm",
    ):
        assert text in done.stderr and text not in done.stdout


def test_a_terminal_shows_every_phase_with_the_time_left(llama, tmp_path, monkeypatch):
    drawn = partialmethod(rich.progress.Progress.update, refresh=True)  # not ten times a second
    monkeypatch.setattr(rich.progress.Progress, "update", drawn)
    with on_a_terminal(monkeypatch, columns=100) as screen, pytest.raises(SystemExit):
        main(["quantize", "--device", "cpu", str(llama), str(tmp_path / "out"), *FEW])
    seen = re.findall(r"(evaluating|quantising|writing) \S+ +(\d+)/(\d+) .*? left ([\w. :]*)", screen())
    assert [phase for phase, _ in groupby(seen, lambda each: each[0])] == [
        "evaluating", "quantising", "writing", "evaluating",
    ]  # fmt: skip
    for phase, total in (("evaluating", "4"), ("quantising", "14")):
        assert {"0", "1", total} <= {done for of, done, out_of, _ in seen if of == phase and out_of == total}
    for what in ("batch 1 of 1: order of layers", "batch 1 of 1: inputs of model.layers.1"):
        assert any(what in text for *_, text in seen)
    assert re.search(r"\d:\d\d:\d\d left", screen())


def test_text_comes_from_a_file_whose_first_eighth_is_held_back(run, llama, tmp_path):
    text = "".join(f"Line {number} of a text that repeats nothing. " for number in range(400))
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text(text)
    lines.write_text("".join(json.dumps({"text": part}) + "\n\n" for part in (text[:4000], text[4000:])))
    held, rest = texts_of(plain)
    assert held + rest == text and len(held) == len(text) // 8
    assert "".join(texts_of(lines)) == text[:4000] + "\n\n" + text[4000:]
    facts = run(llama, tmp_path / "out", "--data", plain, "--tokens", 1024, "--json").json
    assert facts["tokens"] == 1024 and facts["evaluation"]["tokens"] == (len(held) // 255) * 255
    few = run(llama, tmp_path / "more", "--data", lines, "--tokens", 1 << 20)
    assert few.code == 0 and "less than --tokens 1048576" in few.stderr


def test_lines_of_json_end_where_their_format_says(tmp_path):
    """Not at what `str.splitlines` and `open` take for ends of lines, which JSON allows in strings and between
    tokens."""
    file = tmp_path / "a.jsonl"
    texts = [f"{end}x" for end in "\u2028\u2029\x85\x1c\x0b\x0c\u00a0"] + ["half \ud800 whole \U0001f600"]
    rows = [json.dumps({"text": text}, ensure_ascii="\ud800" in text) for text in texts]
    file.write_bytes("\r\n".join(["\ufeff" + rows[0], *rows[1:], " \t\r", '{"text":\r"carriage"}', ""]).encode())
    assert "".join(texts_of(file)).split("\n\n") == [*texts[:-1], "half \ufffd whole \U0001f600", "carriage"]
    for last, message in (("[" * 100_000, "line 2"), ("\u00a0", "line 2")):
        file.write_text('{"text": "a"}\n' + last)
        with pytest.raises(ValueError, match=f'{file}: expected a JSON object with a "text" in {message}, got'):
            texts_of(file)


def test_without_calibration_weights_alone_decide_and_no_tokenizer_is_needed(run, own_llama, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own_llama / name).unlink()
    done = run(own_llama, tmp_path / "out", *FEW)
    assert done.code == 2 and "expected a tokenizer, got " in done.stderr and "; --data none" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run(own_llama, tmp_path / "out", "--data", "none", "--json")
    assert done.code == 0 and "nothing is evaluated: " in done.stderr
    assert done.json["evaluation"] is None and done.json["tokens"] == 0
    loaded = emptied(tmp_path / "out")
    jitgemm.nn.load_(loaded, tmp_path / "out")
    assert same_state(loaded, quantised(own_llama, None, symmetric=False))
    assert all(loaded.get_submodule(name).weight.format.zero_point for name in LAYERS)
    assert run(own_llama, tmp_path / "more", "--data", "none", "--group-size", 32).code == 0
    jitgemm.nn.load_(loaded, tmp_path / "more")
    assert same_state(loaded, quantised(own_llama, None))


# ---- interruptions ---------------------------------------------------------------------------------------------------


def interrupted(monkeypatch, run, *argv: object):
    """The command, with Ctrl-C behind the first stage that is kept."""
    keep = ResumableFolder.save_stage
    with monkeypatch.context() as patch:
        patch.setattr(ResumableFolder, "save_stage", lambda *args: (keep(*args), os.kill(os.getpid(), signal.SIGINT)))
        return run(*argv)


def test_interrupted_the_same_command_goes_on_and_none_of_other_settings(run, llama, written, tmp_path, monkeypatch):
    out = tmp_path / "out"
    done = interrupted(monkeypatch, run, llama, out, *FEW)
    (count,) = re.findall(rf"interrupted: (\d+) layers are kept in {out}; the same", done.stderr)
    assert done.code == 130 and 0 < int(count) < len(LAYERS) and not (out / "config.json").exists()
    other = run(llama, out, *FEW, "--activation", "int8")
    said = "other settings: --activation e4m3 (now int8); give the same to go on, or --restart"
    assert other.code == 2 and said in other.stderr
    again = run(llama, out, *FEW, "--json")
    assert again.code == 0 and f"going on with {count} layers" in again.stderr
    assert contents(out) == contents(written)
    assert {layer["name"] for layer in again.json["layers"]} == set(LAYERS)  # with the errors that were kept


def test_an_interruption_while_evaluating_leaves_a_complete_folder(run, llama, written, tmp_path, monkeypatch):
    monkeypatch.setattr("jitgemm.nn.quantize.evaluate.compared", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    done = run(llama, tmp_path / "out", *FEW)
    assert done.code == 130 and f"interrupted: {tmp_path / 'out'} is complete, but not evaluated" in done.stderr
    assert contents(tmp_path / "out") == contents(written)


def test_a_damaged_file_of_an_interrupted_run_is_named(run, llama, tmp_path, monkeypatch):
    interrupted(monkeypatch, run, llama, tmp_path / "out", *FEW)
    (file,) = (tmp_path / "out" / ".jitgemm-quantize").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["about"])
    tensors, whole = {name: each.clone() for name, each in load_file(file).items()}, file.read_bytes()
    less = {name: tensor for name, tensor in tensors.items() if not name.endswith("q_proj.blocks")}
    for damaged, said in (
        (None, about), (tensors, None), (tensors, []), (tensors, {"names": 3}), (tensors, about | {"errors": []}),
        (tensors, {name: each for name, each in about.items() if name != "names"}), (less, about),
    ):  # fmt: skip
        if damaged is None:
            file.write_bytes(whole[:100])
        else:
            save_file(damaged, file, {"about": json.dumps(said)} if said is not None else {"format": "pt"})
        done = run(llama, tmp_path / "out", *FEW)
        assert done.code == 2 and f"{file}: expected what an interrupted run left, got" in done.stderr, (said, done)
        assert "delete it" in done.stderr


@pytest.mark.parametrize("room, left", [(3000, 0), (60000, 14)])
def test_a_full_disk_names_the_file_and_the_same_command_goes_on(run, llama, written, tmp_path, room, left):
    """While a stage is kept, and while a shard is written."""
    out, before = tmp_path / "out", contents(llama)
    with disk_of(room):
        done = run(llama, out, *FEW)
    assert done.code == 3 and contents(llama) == before
    name = ".jitgemm-quantize/model.layers.0" if not left else "model-0000"
    assert f"{out}/{name}" in done.stderr and ".safetensors'" in done.stderr
    assert out.exists() == bool(left)
    again = run(llama, out, *FEW)
    assert again.code == 0 and ("going on with 14 layers" in again.stderr) == bool(left)
    assert contents(out) == contents(written)


def test_a_restart_drops_the_files_of_the_run_before_it_and_no_others(run, llama, own_llama, tmp_path, monkeypatch):
    """Which had other shards, and a file that this one has not."""
    out = tmp_path / "out"
    (own_llama / "merges.txt").write_text("of another tokenizer")
    with monkeypatch.context() as patch:
        patch.setattr("jitgemm.nn.save.export._check_written", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert run(own_llama, out, *FEW).code == 130
    left = contents(out)
    assert (out / "merges.txt").exists() and len([name for name in left if name.endswith(".safetensors")]) > 3
    (out / ".model.safetensors.unfinished").write_text("as SIGKILL leaves it")
    (out / "mine.txt").write_text("mine")
    one = folder_of(tmp_path / "one", model_of("Llama", **SIZES), "1GB")
    assert run(one, out, *FEW).code == 2  # not without being asked
    assert run(one, out, *FEW, "--restart").code == 0 and run(one, tmp_path / "new", *FEW).code == 0
    assert contents(out) == contents(tmp_path / "new") | {"mine.txt": b"mine"}


@pytest.mark.parametrize(
    "when", [(model_folder, "load_tokenizer"), (ResumableFolder, "save_stage")], ids=["before", "after"]
)
@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "config.json", None])
def test_a_folder_that_changes_while_it_is_read_makes_no_model(run, own_llama, tmp_path, monkeypatch, when, file):
    """Before the model is read, and after."""
    call = getattr(*when)

    def change(*args):
        if file is None:
            (own_llama / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
        else:
            (own_llama / file).write_bytes((own_llama / file).read_bytes())
        return call(*args)

    monkeypatch.setattr(*when, change)
    done = run(own_llama, tmp_path / "out", *FEW)
    said = f"{own_llama / (file or '')}", "expected a file that stays as it is while it is read"
    assert done.code == (2 if file else 3)
    assert all(text in done.stderr for text in (said if file else ("model-00002-of-00002.safetensors",)))
    assert not (tmp_path / "out" / "config.json").exists()


def changed(shard: Path, name: str, to=lambda tensor: None) -> None:
    """The file with another tensor of this name, or without it."""
    tensors = load_file(shard)
    tensors[name] = to(tensors[name])
    save_file({name: each for name, each in tensors.items() if each is not None}, shard, {"format": "pt"})


def cut_off(shard: Path, name: str) -> None:
    shard.write_bytes(shard.read_bytes()[:-10])


@pytest.mark.parametrize("spoil, name", [
    (changed, "model.embed_tokens.weight"), (changed, "model.layers.1.mlp.up_proj.weight_scale"),
    (partial(changed, to=lambda tensor: tensor[:-8].clone()), "model.layers.1.mlp.up_proj.weight_scale"),
    (cut_off, "model.embed_tokens.weight"), (lambda shard, name: shard.unlink(), "model.embed_tokens.weight"),
])  # fmt: skip
def test_what_cannot_be_read_back_is_no_success(run, llama, tmp_path, monkeypatch, name, spoil):
    out = tmp_path / "out"
    check = export._check_written

    def spoilt(*args):
        spoil(next(file for file in out.glob("*.safetensors") if name in load_file(file)), name)
        check(*args)

    monkeypatch.setattr(export, "_check_written", spoilt)
    done = run(llama, out, *FEW)
    assert done.code == 3 and f"{out}: expected to read back what was written: " in done.stderr
    assert (name.removesuffix(".weight_scale") in done.stderr or "model-0000" in done.stderr) and not done.stdout
    assert not (out / "config.json").exists()


# ---- what cannot be done ---------------------------------------------------------------------------------------------


def ended(done, code: int, message: str, out: Path) -> None:
    """The command ended so, with one line that says why, and left no folder."""
    assert done.code == code and message in done.stderr and not done.stdout, (done.code, done.stderr)
    assert not out.exists()


@pytest.mark.parametrize("out", ["mine", "link", "deep/down/out"])
def test_a_run_that_fails_says_why_and_removes_what_it_made_alone(run, own_llama, tmp_path, out):
    for name in ("mine", "linked"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    name = {"mine": "model.norm.weight", "link": "model.embed_tokens.weight"}.get(
        out, "model.layers.1.mlp.up_proj.weight"
    )
    shard = next(file for file in own_llama.glob("*.safetensors") if name in load_file(file))
    changed(shard, name, to=lambda tensor: torch.full_like(tensor, torch.nan))
    done = run(own_llama, tmp_path / out, *FEW)
    assert done.code == 2 and f"{name}: expected finite values, got nan at [0" in done.stderr
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "deep").exists()
    for folder in ("mine", "linked"):
        assert contents(tmp_path / folder) == {} and (tmp_path / folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change, message", [
    ({"architectures": [3]}, "architectures: expected a list of names in {config}, got [3]"),
    ({"architectures": "Llama"}, "architectures: expected a list of names in {config}, got Llama"),
    ({"model_type": {}}, "model_type: expected a name in {config}"),
    ({"hidden_size": 128}, "lm_head.weight: expected shape [272, 128], as {config} says, got [272, 64]"),
    ({"num_attention_heads": 0}, "{config}: expected a model that transformers can make, got "),
    ("{", "expected JSON in {config}, got"),
    ("[" * 100000, "expected JSON in {config}, got"),
    ("[]", "expected a JSON object in {config}, got list"),
    ("\udcff", "expected JSON in {config}, got"),
], ids=lambda each: str(each)[:20].encode("ascii", "replace").decode())  # fmt: skip
def test_a_damaged_config_is_named(run, own_llama, tmp_path, change, message):
    config = own_llama / "config.json"
    text = change if isinstance(change, str) else json.dumps(json.loads(config.read_text()) | change)
    config.write_text(text, errors="surrogateescape")
    ended(run(own_llama, tmp_path / "out", *FEW), 2, message.format(config=config), tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100000, '{"files": 3}', '{"files": ["../mine"]}'], ids=lambda each: each[:9]
)
@pytest.mark.parametrize("name", ["settings.json", "files.json"])
def test_damaged_notes_of_an_interrupted_run_are_named(run, llama, tmp_path, name, text):
    work = tmp_path / "out" / ".jitgemm-quantize"
    work.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (work / name).write_text(text)
    done = run(llama, tmp_path / "out", *FEW, *(["--restart"] if name == "files.json" else []))
    assert done.code == 2 and f" in {work / name}, got" in done.stderr and f"delete {work}" in done.stderr
    assert contents(tmp_path / "out").keys() == {f".jitgemm-quantize/{each}" for each in (name, "lock")}
    assert (tmp_path / "mine").exists()


def test_a_shard_or_tensor_that_is_missing_or_cut_off_is_named(run, own_llama, tmp_path):
    first, shard = sorted(own_llama.glob("*.safetensors"))[:2]
    whole, out = shard.read_bytes(), tmp_path / "out"
    cut_off(shard, "")
    ended(run(own_llama, out), 2, f"expected a safetensors file, got {shard}", out)
    shard.unlink()
    ended(run(own_llama, out), 3, f"found no {shard.name}", out)
    shard.write_bytes(whole)
    name = next(iter(load_file(first)))
    changed(first, name)
    ended(run(own_llama, out), 2, f"found no {name}", out)
    index = own_llama / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    del said["weight_map"][name]
    index.write_text(json.dumps(said))
    ended(run(own_llama, out), 2, f"expected all tensors of the model, found no {name}", out)


def test_folders_that_are_no_model_in_floats_or_no_empty_ones_are_named(run, llama, written, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    ended(run(written, out), 2, "expected a model in floats, got one that compressed-tensors", out)
    ended(run(tmp_path / "none", out), 3, "expected a model's folder, found no config.json", out)
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    done, same = run(llama, mine, *FEW), run(llama, llama, *FEW)
    assert done.code == 2 and f"{mine}: expected an empty folder, or what an interrupted run left" in done.stderr
    assert contents(mine) == {"mine.txt": b"mine"}
    assert same.code == 2 and "OUT: expected another folder than FOLDER" in same.stderr
    held = ResumableFolder(out, {})
    ended(run(llama, out, *FEW), 2, "expected no other process that writes to it", tmp_path / "none")
    held.close()


def test_a_copy_that_the_index_does_not_name_is_named(run, own_llama, tmp_path):
    """transformers, which opens the model, would take either of them."""
    first, *_, last = sorted(own_llama.glob("*.safetensors"))
    (name, tensor), tensors = next(iter(load_file(first).items())), load_file(last)
    save_file(tensors | {name: torch.zeros_like(tensor)}, last, {"format": "pt"})
    message = f"expected '{name}' in {first} alone, as the index says, got another one in {last.name}, and transformers"
    ended(run(own_llama, tmp_path / "out", *FEW), 2, message, tmp_path / "out")
    save_file(tensors | {"model.extra": tensor}, last, {"format": "pt"})
    message = "expected an index that names all tensors of its files, found model.extra in none"
    ended(run(own_llama, tmp_path / "out", *FEW), 2, message, tmp_path / "out")


def test_a_model_with_nothing_to_quantise_says_why(run, tmp_path):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 272, "n_positions": 256}
    folder = folder_of(tmp_path / "model", model_of("GPT2", **sizes))
    done = run(folder, tmp_path / "out", *FEW)
    ended(done, 2, "expected a layer that can be quantised, found none", tmp_path / "out")
    assert "Conv1D, which is no torch.nn.Linear" in done.stderr


@pytest.mark.parametrize("options, code, message", [
    (("--scheme", "mxfp4", "--group-size", "32"), 2, "--group-size: expected none with --scheme mxfp4"),
    (("--scheme", "mxfp4", "--activation", "int8"), 2, "--activation: expected float8_e4m3fn"),
    (("--scheme", "int4", "--bits", "8"), 2, "--bits: expected 4 with --scheme int4"),
    (("--bits", "8", "--zero-point"), 2, "--zero-point: expected none with --bits 8"),
    (("--bits", "8", "--keep-8bit", "AUTO"), 2, "--keep-8bit: expected none with --bits 8"),
    (("--scheme", "two-level", "--keep-8bit", "AUTO"), 2, "--keep-8bit: expected none with --scheme two-level"),
    (("--rotation", "64"), 2, "--rotation: expected None or 128"),
    (("--group-size", "48"), 2, "--group-size: expected one of 128, 64, 32"),
    (("--group-size", "64"), 2, "--group-size: expected one of [32], got 64, and model.layers.0.mlp.down_proj"),
    (("--keep-8bit", "much"), 2, "--keep-8bit: expected AUTO or a number"),
    (("--keep-8bit", "AUTO", "--data", "none"), 2, "--keep-8bit: expected --data other than none"),
    (("--data", "nowhere.txt"), 3, "nowhere.txt"),
    (("--data", "short.txt"), 2, "--data: expected text of at least 512 tokens"),
    (("--data", "odd.jsonl"), 2, 'expected a JSON object with a "text" in line 2, got \'{"txt": 1}\''),
    (("--device", "tpu"), 2, "--device: expected cuda or cpu, got 'tpu'"),
])  # fmt: skip
def test_a_wrong_option_is_named(run, llama, tmp_path, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short")
    Path("odd.jsonl").write_text('{"text": "a"}\n{"txt": 1}\n')
    ended(run(llama, "out", *options), code, message, tmp_path / "out")


def test_without_transformers_the_command_says_what_to_install(run, llama, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for options in ((), ("--data", "none")):
        ended(run(llama, tmp_path / "out", *options), 2, "pip install transformers", tmp_path / "out")
