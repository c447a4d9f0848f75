"""The only room that imports torch: the loop, batches, the meter, adapters, engines, checkpoints, export."""

import logging

# At import bitsandbytes reports that an optional CPU kernel package is absent; PEFT imports it on every run.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
