"""The batcher, one loop for each GPU: claim, run, complete."""
