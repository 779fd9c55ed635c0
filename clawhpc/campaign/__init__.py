"""The loop: plan a step, have it collected, train on it, publish; evaluate before and after."""
