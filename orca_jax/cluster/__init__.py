"""Several processes behind one executor: the leader schedules, and each worker repeats its calls (paper, section 4)."""
