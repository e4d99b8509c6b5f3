"""Pure rules: decisions whose time and randomness are arguments."""
