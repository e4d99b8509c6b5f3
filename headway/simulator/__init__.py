"""The production core under virtual time, and a planner that finds with it how many GPUs a load needs."""
