"""The data path: one worker process relays bytes and hands records to its parent."""
