"""Tasks with answers that a program can check: the bundled pair's world."""
