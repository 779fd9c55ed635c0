"""One allocation's engine, proxy and rollouts, working through the groups that a campaign plans."""
