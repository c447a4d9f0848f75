"""Keep libraries' chatter off the user's terminal, each line by name, so that real warnings still show."""

import warnings

# (message, category): said on every run, about code of a library and not of the user.
CHATTER = (
    (r".*is_gradient_checkpointing.*is deprecated", FutureWarning),  # PEFT reads transformers' old name
    (r".*reduce_scatter_tensor.*deprecated", FutureWarning),  # DeepSpeed, every step
)


def keep_clean() -> None:
    """Call once per rank, before models are loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for message, category in CHATTER:
        warnings.filterwarnings("ignore", message=message, category=category)
