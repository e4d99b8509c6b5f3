"""What all backends for remote APIs share: attempts, pauses, blame, credentials, large answers."""
