"""Reader of Kineto's Chrome-trace JSON, torch 1.8 to today."""
