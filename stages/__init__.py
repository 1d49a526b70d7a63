"""How data moves: the four stages, their buffers and workers, and the transports."""
