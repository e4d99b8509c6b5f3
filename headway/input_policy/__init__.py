"""Rules of the input policy: its file, and the searches for its patterns. They are applied in `headway.core.input_policy`."""
