"""What other people's frameworks need to take part: sources of trainers, loaders and servers of engines."""
