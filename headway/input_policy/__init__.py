"""The input policy's file and its searches; what the rules do is in `headway.core.input_policy`.

file        rules from a TOML file, every line checked
patterns    searches with RE2
"""
