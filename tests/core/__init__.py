"""Tests of the pure floor: plain and synchronous, with now = 0.0."""
