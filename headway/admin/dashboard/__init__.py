"""The dashboard: its page, its sign-in and its stream of events."""
