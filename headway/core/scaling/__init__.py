"""Autoscaler: how many workers a model should have. Pure computation, which the controller acts on."""
