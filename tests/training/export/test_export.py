"""Every export is read back and is the model that was trained; what is not is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import ModelError, RunError, UsageError
from shardwise.runs import RunFolder
from shardwise.training.export.main import export_run, main
from shardwise.training.export.origin import check_base, with_adapter
from shardwise.training.export.write import copy_tokenizer

Made = Callable[..., RunFolder]


def test_adapter_merged_and_gguf_of_one_run(small_run: Made, tmp_path: Path) -> None:
    run = small_run("lora")
    for kind in ("adapter", "merged"):
        (tmp_path / kind).mkdir()
        note = export_run(run, kind, tmp_path / kind, None, None)
        assert float(note.split("differ by ")[1].split()[0]) < {"adapter": 1e-6, "merged": 1e-2}[kind]
        assert "held-out loss before and after" in (tmp_path / kind / "README.md").read_text()
        assert (tmp_path / kind / "tokenizer.json").is_file()
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged.state_dict()[name], base.state_dict()[name])
    for kind, limit in (("f16", 1e-3), ("q8_0", 5e-2)):
        folder = tmp_path / kind
        folder.mkdir()
        note = export_run(run, "gguf", folder, kind, None)
        assert float(note.split("differ by ")[1].split()[0]) < limit
        assert [p.name for p in folder.glob("*.gguf")] == [f"{run.name}-{kind}.gguf"]
        assert not (folder / "whole").exists()


def test_gguf_keeps_the_tokenizer(small_run: Made, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = small_run("full")
    assert main([str(run.path), "--to", "gguf", "--output", str(tmp_path / "out")]) == 0
    file = next((tmp_path / "out").glob("*.gguf"))
    ours = AutoTokenizer.from_pretrained(run.model_path)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "the quick brown fox <|im_end|> jumps é"
    assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    assert theirs.chat_template == ours.chat_template


def test_c06_kill_9_during_an_export_leaves_nothing_under_its_name(small_run: Made, tmp_path: Path) -> None:
    import subprocess
    import sys
    import time

    target = tmp_path / "out"
    arguments = [str(small_run("lora").path), "--to", "merged", "--output", str(target)]
    process = subprocess.Popen([sys.executable, "-m", "shardwise.training.export.main", *arguments])
    while not list(tmp_path.glob("out.writing/*")) and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -9
    assert not target.exists() and (tmp_path / "out.writing").exists()
    assert main(arguments) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_c09_qlora_merges_into_the_16_bit_base_and_says_how_far_it_is(
    small_run: Made, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    note = export_run(small_run("qlora"), "merged", tmp_path, None, None)
    assert "merged into the 16-bit base" in note and "logits differ by" in note
    weights = load_file(tmp_path / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in weights.values())  # 16 bits, and nothing of 4
    exact, to_trained = (float(part.split()[0]) for part in note.split("differ by ")[1:])
    assert (
        exact < 1e-2 < to_trained
    )  # the merge is right, and is not the model that was trained: both are said
    with pytest.raises(UsageError, match="--type q8_0 does not go with --to merged"):
        export_run(small_run("qlora"), "merged", tmp_path, "q8_0", None)


def test_c08_a_tied_model_is_written_once_and_reads_back(small_run: Made, tmp_path: Path) -> None:
    run = small_run("full")
    assert "lm_head.weight" not in load_file(run.model_path / "model.safetensors")
    assert "100.0%" in export_run(run, "full", tmp_path, None, None)


def test_c11_an_adapter_knows_its_base_and_refuses_another_of_the_same_shape(
    small_run: Made, tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    adapter = shutil.copytree(small_run("lora").adapter_path, tmp_path / "adapter")
    base = json.loads((adapter / "shardwise.json").read_text())["base"]
    assert base["id"] == tiny_model.name and len(base["weights"]) == 16
    moved = shutil.copytree(tiny_model, tmp_path / "elsewhere")
    with_adapter(AutoModelForCausalLM.from_pretrained(moved), adapter, moved)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({k: v.flip(0).contiguous() for k, v in weights.items()}, other / "model.safetensors")
    with pytest.raises(ModelError, match="was trained on other weights"):
        check_base(adapter, other)


def test_s01_an_adapter_that_is_a_pickle_is_never_opened(
    small_run: Made, tiny_model: Path, tmp_path: Path
) -> None:
    import pickle

    class Payload:
        def __reduce__(self) -> object:
            return (open, (str(tmp_path / "ran"), "w"))

    adapter = shutil.copytree(small_run("lora").adapter_path, tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        with_adapter(None, adapter, tiny_model)
    assert not (tmp_path / "ran").exists()


def test_an_export_that_is_not_the_trained_model_is_not_handed_over(
    small_run: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shardwise.training.export.main as module

    def broken(source: Path, target: Path) -> None:
        copy_tokenizer(source, target)
        for file in target.glob("*.safetensors"):
            save_file({k: v * 1.1 for k, v in load_file(file).items()}, file, metadata={"format": "pt"})

    monkeypatch.setattr(module, "copy_tokenizer", broken)
    with pytest.raises(RunError, match="is not the trained model"):
        export_run(small_run("lora"), "merged", tmp_path, None, None)


def test_a_checkpoint_can_be_exported_and_a_wrong_kind_is_refused(small_run: Made, tmp_path: Path) -> None:
    run = small_run("lora")
    export_run(run, "adapter", tmp_path, None, "3")
    early, last = (load_file(p / "adapter_model.safetensors") for p in (tmp_path, run.adapter_path))
    best = tmp_path / "best"
    best.mkdir()
    export_run(run, "adapter", best, None, "best")
    export_run(run, "adapter", tmp_path, None, "last")
    again = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(again[k], last[k]) for k in last)  # last is what the run ended with
    with pytest.raises(UsageError, match="--checkpoint first"):
        export_run(run, "adapter", tmp_path, None, "first")
    assert early.keys() == last.keys() and any(not torch.equal(early[k], last[k]) for k in early)
    with pytest.raises(UsageError, match="trained an adapter"):
        export_run(run, "full", tmp_path, None, None)
    with pytest.raises(UsageError, match="there is no adapter"):
        export_run(small_run("full"), "adapter", tmp_path, None, None)
