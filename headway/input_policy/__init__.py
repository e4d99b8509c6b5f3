"""The input policy's outside things; the rules themselves are in `headway.core.input_policy`.

file        rules from a TOML file, each line checked
patterns    searches for patterns, in linear time
"""
