"""The controller, which publishes what the workers can carry."""
