"""Tests of the dashboard in a real browser, and of its stream."""
