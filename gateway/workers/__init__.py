"""Several processes of one gateway: what passes between the workers and their parent."""
