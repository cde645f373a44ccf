"""What the heads of a model do: see them, judge them, switch them off."""

from manyheads.heads import proving as proving  # it registers itself as what proves things of models
