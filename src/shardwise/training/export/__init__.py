"""What is handed over: an adapter in PEFT's format or a whole model in transformers' format, both read back."""
