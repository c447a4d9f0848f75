"""The only room that imports torch: the loop, batches, the meter, adapters, engines, checkpoints, export."""
