"""The gateway's own time, memory, fairness and pages."""
