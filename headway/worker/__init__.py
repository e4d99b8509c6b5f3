"""One loop for each GPU: claim, run, complete."""
