"""Batchers, one loop for each GPU: claim, run, complete. Pools of batchers can grow and shrink."""
