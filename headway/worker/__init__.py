"""The batcher, one loop for each GPU: claim, run, complete. The pool of them, which can grow and shrink."""
