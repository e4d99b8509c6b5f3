"""The production policies under virtual time."""
