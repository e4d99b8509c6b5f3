"""Autoscaler: how many workers a model should have. Pure: the controller acts on it."""
