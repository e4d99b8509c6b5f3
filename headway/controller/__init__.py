"""Publishes what the workers can carry."""
