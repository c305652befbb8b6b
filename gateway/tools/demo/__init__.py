"""`make demo`, `make demo-real`, `make demo-hybrid` and `make demo-fleet`."""
