"""One engine out of many: replicas, and which of them a request is sent to."""
