"""One run of one trainer on given rows, in that trainer's own environment: `python peer.py JOB.json RESULT.json`.

JOB.json holds peer, model, rows (a JSON Lines file of {"input_ids", "labels"}, in training order), method (lora,
full), steps, batch (rows per step), learning_rate, rank, seed, threads and command_time (when the command was given,
in seconds since the epoch). Started by compare.py; nothing here imports shardwise.
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

    def begin(self):
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def end(self):
        self.seconds.append(time.perf_counter() - self.began)
        self.cpu_seconds.append(time.process_time() - self.cpu)
        self.first = self.first or time.time() - JOB["command_time"]


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


def main():
    os.environ["OMP_NUM_THREADS"] = str(JOB["threads"])
    import torch

    torch.set_num_threads(JOB["threads"])
    began = time.time()
    {
        "transformers": run_transformers,
        "trl": run_trl,
        "trl-packing": run_trl,
        "llamafactory": run_llamafactory,
    }[JOB["peer"]]()
    from importlib.metadata import version

    names = ("torch", "transformers", "peft", "accelerate", "trl", "llamafactory")
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
                "first_step_seconds": RECORD.first,
                "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "versions": versions,
                "seconds": time.time() - began,
            }
        )
    )


if __name__ == "__main__":
    main()
