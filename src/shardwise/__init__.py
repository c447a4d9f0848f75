"""shardwise: plan an LLM fine-tuning run, run exactly that plan, and report estimate against measurement."""

__version__ = "0.1.0"
