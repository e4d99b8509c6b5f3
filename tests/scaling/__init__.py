"""Drivers of the autoscaler."""
