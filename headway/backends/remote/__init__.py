"""Parts that all backends of remote APIs share: tries, pauses, blame, credentials, large answers."""
