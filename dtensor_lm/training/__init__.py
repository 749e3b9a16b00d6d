"""Run a Program: the pure step, optimizers on planned layouts, the loop."""
