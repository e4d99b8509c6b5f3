"""Pure rules: decisions that receive the time and randomness as arguments."""
