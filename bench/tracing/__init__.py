"""Where the time of a push went: traces merged, read and explained."""
