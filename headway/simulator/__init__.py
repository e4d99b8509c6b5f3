"""Simulator, which runs the production core under virtual time, and planner, which uses it to find how many GPUs a load needs."""
