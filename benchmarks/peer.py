"""One run of one trainer on given rows, in that trainer's own environment: `python peer.py JOB.json RESULT.json`.

JOB.json holds peer, model, rows (a JSON Lines file of {"input_ids", "labels"}, in training order), cache (a folder
for converted models), method (lora, full), steps, batch (rows per step), learning_rate, rank, seed, threads and
command_time (when the command was given, in seconds since the epoch). Started by compare.py; nothing here imports
shardwise.

Each trainer keeps its own ways: fp32 weights under bf16 autocast for full fine-tuning where it does that, its
padding, its loss. Gradient checkpointing is off everywhere, as it is in shardwise's recipe. litgpt does not clip
gradients.
"""

# ruff: noqa: PLC0415

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

JOB = json.loads(Path(sys.argv[1]).read_text())
ROWS = [json.loads(line) for line in Path(JOB["rows"]).read_text().splitlines()]


class Record:
    """Step times, losses and the moment of the first step."""

    def __init__(self):
        self.seconds, self.cpu_seconds, self.losses, self.first = [], [], [], None
        self.peak, self.seen, self.tokens, self.first_began = 0, 0, [], None

    def begin(self):
        self.began, self.cpu = time.perf_counter(), time.process_time()
        self.first_began = self.first_began or time.time() - JOB["command_time"]

    def end(self):
        self.seconds.append(time.perf_counter() - self.began)
        self.cpu_seconds.append(time.process_time() - self.cpu)
        self.first = self.first or time.time() - JOB["command_time"]
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


RECORD = Record()


def callback():
    from transformers import TrainerCallback

    class Times(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            RECORD.begin()

        def on_step_end(self, *args, **kwargs):
            RECORD.end()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                RECORD.losses.append(float(logs["loss"]))
                if "num_tokens" in logs:  # trl counts what its own packing put into a step
                    RECORD.tokens.append(int(logs["num_tokens"]) - RECORD.seen)
                    RECORD.seen = int(logs["num_tokens"])

    return Times()


def arguments(folder):
    """What TrainingArguments and its children are given: logging of every step, nothing saved, no shuffling."""
    return {
        "output_dir": folder,
        "max_steps": JOB["steps"],
        "per_device_train_batch_size": JOB["batch"],
        "gradient_accumulation_steps": 1,
        "learning_rate": JOB["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": "none",
        "seed": JOB["seed"],
        "use_cpu": True,
        "bf16": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
    }


def model_and_tokenizer():
    """Frozen bases in bf16; weights that are trained in fp32 under autocast, as these trainers keep them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if JOB["method"] == "lora" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=dtype, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(JOB["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def lora():
    from peft import LoraConfig

    return LoraConfig(
        r=JOB["rank"],
        lora_alpha=2 * JOB["rank"],
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def run_transformers():
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    model, tokenizer = model_and_tokenizer()
    if JOB["method"] == "lora":
        from peft import get_peft_model

        model = get_peft_model(model, lora())
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**arguments(folder), train_sampling_strategy="sequential"),
            train_dataset=Dataset.from_list(ROWS),
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
            callbacks=[callback()],
        )
        trainer.train()


def run_trl():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = model_and_tokenizer()
    options = (
        {"packing": True, "packing_strategy": "bfd"} if JOB["peer"] == "trl-packing" else {"packing": False}
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                **arguments(folder),
                train_sampling_strategy="sequential",
                max_length=max(len(r["input_ids"]) for r in ROWS),
                **options,
            ),
            train_dataset=Dataset.from_list(ROWS),
            processing_class=tokenizer,
            peft_config=lora() if JOB["method"] == "lora" else None,
            callbacks=[callback()],
        )
        trainer.train()


def run_llamafactory():
    import importlib.machinery
    import types

    # LLaMA-Factory imports torchaudio, of which there is no build beside a torch without CUDA; text needs none of it.
    audio = types.ModuleType("torchaudio")
    audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = audio
    from datasets import Dataset, DatasetDict
    from llamafactory.train.tuner import run_exp

    with tempfile.TemporaryDirectory() as folder:
        rows = [{**r, "attention_mask": [1] * len(r["input_ids"])} for r in ROWS]
        DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(f"{folder}/rows")
        settings = {
            **{k: v for k, v in arguments(f"{folder}/out").items() if k not in ("gradient_checkpointing",)},
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": JOB["model"],
            "dataset": "rows",
            "tokenized_path": f"{folder}/rows",
            "template": "default",
            "finetuning_type": JOB["method"],
            "disable_shuffling": True,
            "disable_gradient_checkpointing": True,
            "flash_attn": "sdpa",
        }
        if JOB["method"] == "lora":
            settings.update(
                lora_rank=JOB["rank"], lora_alpha=2 * JOB["rank"], lora_target="all", lora_dropout=0.0
            )
        run_exp(settings, callbacks=[callback()])


def run_swift():
    """`swift sft` with rows that are tokenized already."""
    from swift.arguments import SftArguments
    from swift.pipelines.train.sft import SwiftSft

    class Sft(SwiftSft):
        def _prepare_dataset(self):
            return [{**r, "length": len(r["input_ids"])} for r in ROWS], None

        def train(self, trainer):
            trainer.add_callback(callback())
            return super().train(trainer)

    with tempfile.TemporaryDirectory() as folder:
        kept = {
            k: v for k, v in arguments(folder).items() if k not in ("disable_tqdm", "gradient_checkpointing")
        }
        adapters = {"lora_rank": JOB["rank"], "lora_alpha": 2 * JOB["rank"], "lora_dropout": 0.0}
        options = {
            **kept,
            **(adapters if JOB["method"] == "lora" else {}),
            "model": JOB["model"],
            "model_type": "llama",
            "template": "chatml",
            "dataset": [JOB["rows"]],
            "tuner_type": JOB["method"],
            "target_modules": ["all-linear"],
            "torch_dtype": "bfloat16" if JOB["method"] == "lora" else "float32",
            "attn_impl": "sdpa",
            "fp16": False,
            "gradient_checkpointing": False,
            "train_dataloader_shuffle": False,
            "dataloader_num_workers": 0,
            "split_dataset_ratio": 0.0,
            "report_to": [],
        }
        Sft(SftArguments(**options)).run()


def run_unsloth():
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel  # before trl, which it patches

    longest = max(len(r["input_ids"]) for r in ROWS)
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=JOB["model"],
        max_seq_length=longest,
        dtype=torch.bfloat16 if JOB["method"] == "lora" else torch.float32,
        load_in_4bit=False,
        full_finetuning=JOB["method"] == "full",
    )
    if JOB["method"] == "lora":
        model = FastLanguageModel.get_peft_model(
            model,
            r=JOB["rank"],
            lora_alpha=2 * JOB["rank"],
            lora_dropout=0.0,
            bias="none",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            use_gradient_checkpointing=False,
            random_state=JOB["seed"],
        )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                **arguments(folder),
                train_sampling_strategy="sequential",
                max_length=longest,
                packing=False,
            ),
            train_dataset=Dataset.from_list(ROWS),
            processing_class=tokenizer,
            callbacks=[callback()],
        )
        trainer.train()


def litgpt_folder():
    """The model in litgpt's own format, converted once."""
    import shutil

    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    source = Path(JOB["model"])
    folder = Path(JOB["cache"]) / "litgpt-models" / "SmolLM2-135M-Instruct"
    if not (folder / "lit_model.pth").exists():
        work = folder.with_suffix(".part") / folder.name
        shutil.rmtree(work.parent, ignore_errors=True)
        shutil.copytree(source, work)
        convert_hf_checkpoint(checkpoint_dir=work)
        folder.parent.mkdir(parents=True, exist_ok=True)
        work.rename(folder)
        JOB["command_time"] = time.time()  # a conversion is done once per model, not per run
    return folder


def run_litgpt():
    import torch
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data.base import DataModule, get_sft_collate_fn
    from torch.utils.data import DataLoader

    if JOB["method"] == "lora":
        from litgpt.finetune import lora as recipe
    else:
        from litgpt.finetune import full as recipe

    def item(row):
        ids, labels = (torch.tensor(row[k]) for k in ("input_ids", "labels"))
        return {
            "input_ids": ids,
            "labels": labels,
            "token_counts": {"raw": len(ids), "raw_plus_prompt_template": len(ids)},
        }

    class Given(DataModule):
        prompt_style = None

        def connect(self, tokenizer=None, batch_size=1, max_seq_length=None, **kwargs):
            self.batch = batch_size

        def train_dataloader(self):
            collate = get_sft_collate_fn(max_seq_length=-1, pad_id=0)
            return DataLoader([item(r) for r in ROWS], batch_size=self.batch, collate_fn=collate)

        def val_dataloader(self):
            few = {k: v[:8] for k, v in ROWS[0].items()}
            return DataLoader([item(few)], batch_size=1, collate_fn=get_sft_collate_fn(pad_id=0))

    class Steps(recipe.CycleIterator):
        def __next__(self):
            RECORD.begin()
            return super().__next__()

    class Log:
        """Stands for the CSV logger: what is logged after every step."""

        name, version, root_dir, log_dir, group_separator = "none", 0, None, None, "/"

        def log_metrics(self, metrics, step=None):
            if "loss" in metrics:
                RECORD.end()
                RECORD.losses.append(float(metrics["loss"]))
                if len(RECORD.losses) == JOB["steps"]:
                    raise StopIteration  # what follows writes merged weights, which no rate counts

    recipe.CycleIterator = Steps
    recipe.choose_logger = lambda *args, **kwargs: Log()
    recipe.get_lr_scheduler = lambda optimizer, **kwargs: torch.optim.lr_scheduler.ConstantLR(
        optimizer, factor=1.0
    )
    adapters = {
        "lora_r": JOB["rank"],
        "lora_alpha": 2 * JOB["rank"],
        "lora_dropout": 0.0,
        **{f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp")},
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            recipe.setup(
                checkpoint_dir=litgpt_folder(),
                out_dir=Path(folder),
                precision="bf16-true" if JOB["method"] == "lora" else "bf16-mixed",
                devices=1,
                data=Given(),
                train=TrainArgs(
                    save_interval=None,
                    log_interval=1,
                    global_batch_size=JOB["batch"],
                    micro_batch_size=JOB["batch"],
                    lr_warmup_steps=0,
                    epochs=2,
                    max_steps=JOB["steps"],
                ),
                eval=EvalArgs(interval=10**6, max_new_tokens=1, max_iters=1, final_validation=False),
                optimizer={
                    "class_path": "torch.optim.AdamW",
                    "init_args": {"lr": JOB["learning_rate"], "weight_decay": 0.0},
                },
                seed=JOB["seed"],
                **(adapters if JOB["method"] == "lora" else {}),
            )
    except StopIteration:
        pass


def main():
    os.environ["OMP_NUM_THREADS"] = str(JOB["threads"])
    import torch

    torch.set_num_threads(JOB["threads"])
    {
        "transformers": run_transformers,
        "trl": run_trl,
        "trl-packing": run_trl,
        "llamafactory": run_llamafactory,
        "ms-swift": run_swift,
        "litgpt": run_litgpt,
        "unsloth": run_unsloth,
    }[JOB["peer"]]()
    from importlib.metadata import version

    names = (
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "trl",
        "llamafactory",
        "ms_swift",
        "litgpt",
        "unsloth",
    )
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except Exception:
            continue
    Path(sys.argv[2]).write_text(
        json.dumps(
            {
                "step_seconds": RECORD.seconds,
                "step_cpu_seconds": RECORD.cpu_seconds,
                "losses": RECORD.losses,
                "step_tokens": RECORD.tokens,
                "first_step_began_seconds": RECORD.first_began,
                "first_step_seconds": RECORD.first,
                "peak_resident_bytes": RECORD.peak,
                "versions": versions,
            }
        )
    )


if __name__ == "__main__":
    main()
