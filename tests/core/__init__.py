"""Tests for the pure layer: plain and synchronous, with now = 0.0."""
