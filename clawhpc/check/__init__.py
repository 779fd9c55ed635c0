"""Look at sets of tasks before a run pays for them: what is faulty, what is in them, and what is given for nothing."""
