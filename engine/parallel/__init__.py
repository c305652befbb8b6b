"""One model on several devices, a process for each: rank 0 schedules, and the others follow."""
