"""The controllers of a fleet. The leader publishes capacities, scales models and advances rollouts."""
