"""Parts shared by all backends for remote APIs: attempts, pauses, blame, credentials, large answers."""
