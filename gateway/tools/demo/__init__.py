"""`make demo`, `make demo-hybrid` and `make demo-fleet`."""
