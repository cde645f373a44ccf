"""Learning: the loop on Accelerate, checkpoints, schedules, and head statistics while it runs."""
