"""What clients are promised: the wire format, the parts of an answer, and the errors."""
