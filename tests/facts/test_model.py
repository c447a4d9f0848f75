"""Reading a model's shape from folders, files, headers and the catalogue."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ModelError, RecipeError
from shardwise.facts.catalogue import catalogue_shape, known_models, named_shape
from shardwise.facts.model import ModelShape, read_model, shape_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def known(name: str) -> ModelShape:
    shape = catalogue_shape(name)
    assert shape is not None
    return shape


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """A model folder whose safetensors file has a real header and no data behind it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        header = {n: {"dtype": d, "shape": s, "data_offsets": [0, 2]} for n, (d, s) in tensors.items()}
        raw = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return folder


def stored(shape: ModelShape) -> dict[str, tuple[str, list[int]]]:
    """The tensors a checkpoint of this shape would hold."""
    return {
        g.name.replace("*", str(i)): ("BF16", list(g.shape)) for g in shape.tensors for i in range(g.count)
    }


def test_m02_a_mixture_is_sized_by_all_its_parameters_and_timed_by_the_active_ones() -> None:
    shape = known("Qwen/Qwen3-30B-A3B")
    assert round(shape.total_parameters / 1e9, 2) == 30.53
    assert round(2 * shape.total_parameters / 2**30, 1) == 56.9
    assert round(16 * shape.total_parameters / 2**30) == 455
    assert round(shape.active_parameters / 1e9, 1) == 3.4
    assert round(2 * known("mistralai/Mixtral-8x7B-v0.1").total_parameters / 2**30) == 87


@pytest.mark.parametrize(
    ("name", "millions"),
    [("Qwen/Qwen3-4B", 943.7), ("google/gemma-3-270m", 29.5), ("google/gemma-2-2b", 368.1)],
)
def test_m04_attention_uses_the_config_s_head_size(name: str, millions: float) -> None:
    shape = known(name)
    attention = sum(
        t.parameters for t in shape.tensors if t.module in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    assert round(attention / 1e6, 1) == pytest.approx(millions, abs=0.11)


def test_m05_tied_and_untied_heads_and_what_four_bits_hold() -> None:
    small, large = known("meta-llama/Llama-3.2-1B"), known("meta-llama/Llama-3.1-8B")
    assert (small.total_parameters, large.total_parameters) == (1_235_814_400, 8_030_261_248)
    assert small.total_parameters + small.count("embedding") == pytest.approx(1.498e9, rel=1e-3)
    four_bit = 0.516 * large.quantised_parameters + 2 * (large.total_parameters - large.quantised_parameters)
    assert four_bit / 2**30 == pytest.approx(5.31, abs=0.02)  # not 3.74: embedding and head keep 16 bits


def test_m15_adapters_are_counted_from_rank_and_real_targets() -> None:
    shape = known("meta-llama/Llama-3.1-8B")
    assert shape.lora_parameters(8, ("q_proj", "k_proj")) == 3_407_872
    assert shape.lora_parameters(256, "all-linear") == 671_088_640
    assert shape.lora_parameters(8, "attention") < shape.lora_parameters(8, "all-linear")
    assert shape.lora_parameters(8, "q_proj", dora=True) == shape.lora_parameters(8, "q_proj") + 32 * 4096


def test_m15_the_count_is_what_peft_trains() -> None:
    torch = pytest.importorskip("torch")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(LLAMA)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = shape_from_config(LLAMA, "test")
    assert shape.lora_parameters(4, ("q_proj", "v_proj", "down_proj")) == trained


def test_m16_the_vision_tower_is_counted_and_never_adapted() -> None:
    shape = known("google/gemma-3-4b-it")
    assert 400e6 < shape.vision_parameters < 450e6
    assert all(t.part == "text" for t in shape.adapted("all-linear"))
    towers = sum(t.part == "vision" and t.kind == "linear" for t in shape.tensors)
    assert towers > 0  # there is something that a match by suffix would have hit


def test_targets_that_name_no_layer_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match="q_porj") as caught:
        known("meta-llama/Llama-3.1-8B").adapted(("q_porj",))
    assert "q_proj" in caught.value.hint


def test_s02_code_beside_a_model_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "model.py").write_text(f"open({str(marker)!r}, 'w').write('ran')")
    (tmp_path / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w').write('ran')")
    auto = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "model.X"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"auto_map": auto}))
    shape = read_model(str(tmp_path))
    assert not marker.exists()
    assert shape.needs_own_code
    assert any("trust_remote_code" in note for note in shape.notes)


def test_headers_that_agree_say_nothing(tmp_path: Path) -> None:
    expected = shape_from_config(LLAMA, "x")
    shape = read_model(str(write_model(tmp_path / "m", LLAMA, stored(expected))))
    assert shape.total_parameters == expected.total_parameters
    assert shape.notes == ()
    assert shape.dtype == "bf16"


def test_headers_that_disagree_win_and_that_is_said(tmp_path: Path) -> None:
    tensors = stored(shape_from_config(LLAMA, "x"))
    tensors["model.layers.0.extra.weight"] = ("BF16", [48, 7])
    shape = read_model(str(write_model(tmp_path / "m", LLAMA, tensors)))
    assert shape.total_parameters == shape_from_config(LLAMA, "x").total_parameters + 48 * 7
    assert any("config.json says" in note for note in shape.notes)


def test_a_stored_tied_head_is_counted_once(tmp_path: Path) -> None:
    tensors = stored(shape_from_config(LLAMA, "x")) | {"lm_head.weight": ("BF16", [100, 48])}
    shape = read_model(str(write_model(tmp_path / "m", LLAMA, tensors)))
    assert shape.total_parameters == shape_from_config(LLAMA, "x").total_parameters
    assert any("counted once" in note for note in shape.notes)


def test_an_unknown_family_is_read_from_headers(tmp_path: Path) -> None:
    config = LLAMA | {"model_type": "brandnew"}
    shape = read_model(str(write_model(tmp_path / "m", config, stored(shape_from_config(LLAMA, "x")))))
    assert shape.total_parameters == shape_from_config(LLAMA, "x").total_parameters
    assert shape.lora_parameters(2, ("q_proj",)) == shape_from_config(LLAMA, "x").lora_parameters(
        2, ("q_proj",)
    )


def test_an_unknown_family_without_headers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="brandnew"):
        read_model(str(write_model(tmp_path / "m", LLAMA | {"model_type": "brandnew"}, {})))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("[1]", "not a model's config"), ("{}", "does not describe a language model"),
     ('{"model_type": "llama", "hidden_size": "big"}', "does not describe")],
)  # fmt: skip
def test_a_broken_config_is_a_model_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_model(str(tmp_path))


def test_a_folder_without_config_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(ModelError) as caught:
        read_model(str(tmp_path))
    assert "weights.gguf" in caught.value.why


def test_an_adapter_folder_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelError) as caught:
        read_model(str(tmp_path))
    assert "org/base" in caught.value.hint


def test_a_git_lfs_pointer_is_told_apart_from_a_safetensors_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", LLAMA, {})
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_model(str(folder))


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "smollm").mkdir()
    with pytest.raises(ModelError) as caught:
        read_model(str(tmp_path / "smolm"))
    assert "smollm" in caught.value.hint


def test_an_unreachable_hub_falls_back_to_the_catalogue_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.facts import hub

    def unreachable(source: str, revision: str | None) -> ModelShape:
        raise hub._Unreachable("no answer")

    monkeypatch.setattr(hub, "_fetch", unreachable)
    shape = read_model("meta-llama/Llama-3.1-8B")
    assert shape.total_parameters == 8_030_261_248
    assert any("catalogue" in note for note in shape.notes)
    with pytest.raises(ModelError) as caught:
        read_model("meta-llama/Llama-3.1-8C")
    assert "Llama-3.1-8B" in caught.value.hint


def test_every_catalogue_record_has_a_shape_and_a_name_tables_use() -> None:
    for name in known_models():
        assert known(name).total_parameters > 1e6
    assert named_shape("Llama-2-7B") == named_shape("meta-llama/Llama-2-7b-hf")
    assert named_shape("no such model") is None


def test_defaults_of_a_silent_config_are_the_family_s() -> None:
    """Real config.json files leave out what equals the family's default: Gemma's tied head, for one."""
    shape = shape_from_config({"model_type": "gemma2", "num_hidden_layers": 26}, "x")
    assert shape.total_parameters == known("google/gemma-2-2b").total_parameters


def test_sliding_windows_are_counted_per_layer() -> None:
    assert known("google/gemma-3-1b-it").full_attention_layers == 4  # every sixth of 26
    assert known("google/gemma-2-2b").full_attention_layers == 13  # every second
    assert known("meta-llama/Llama-3.1-8B").sliding_window is None
