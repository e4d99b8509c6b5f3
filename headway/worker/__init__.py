"""Batchers: one loop per GPU that claims a batch, runs it and completes it. Pools of batchers can grow and shrink."""
