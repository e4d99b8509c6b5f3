"""The admin port: health, workers, the fleet, dead letters, metrics."""
