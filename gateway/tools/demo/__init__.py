"""`make demo` and `make demo-hybrid`."""
