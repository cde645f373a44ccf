"""What the heads of a model do: see them, judge them, switch them off."""
