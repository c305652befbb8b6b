"""The gateway's side of local engines: connections to them, replicas, adapters."""
