"""Trees that grow on a GPU, level by level, within recorded graphs."""
