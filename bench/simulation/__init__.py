"""A push on clusters that one does not have: the real scheduler under a virtual clock."""
