"""What a model says about an input, and what changes when a head is silenced."""
