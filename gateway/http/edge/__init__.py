"""HTTP around the endpoints: bounds on connections, headers for browsers, repeated requests."""
