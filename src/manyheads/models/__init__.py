"""Models come and go: opened, described, saved, loaded, and what a cut leaves in them."""
