"""Tests of services and doors on virtual time."""
