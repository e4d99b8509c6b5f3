"""Parts of the backends of all remote APIs, however they are reached: tries, pauses, blame, credentials, large answers."""
