"""Tasks: read them, make small ones, solve small ones by rule, and plan which harness gets which."""
