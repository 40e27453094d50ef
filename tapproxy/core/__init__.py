"""Pure: bytes and integers in, facts out. No await, clock, environment, sockets or logging in here."""
