"""What all remote APIs have in common, however they are reached: tries, pauses, blame, credentials, and large answers."""
