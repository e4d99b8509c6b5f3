"""Version of Headway. It stands apart, so that those who tell it need not import the names for programs."""

__version__ = "0.1.0"
