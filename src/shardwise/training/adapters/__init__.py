"""Adapters on a frozen base, through PEFT: LoRA, rsLoRA, DoRA, and the 4-bit base of QLoRA."""
