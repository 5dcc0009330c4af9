"""Torch's memory snapshots (``torch.cuda.memory._dump_snapshot``), read as data."""
