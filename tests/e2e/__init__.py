"""Tests with real processes and real sockets, and the faults that hit them."""
