"""The core: what of the forward pass ran again in the backward pass, and how often."""
