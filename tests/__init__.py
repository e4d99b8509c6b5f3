"""Tests of Headway."""
