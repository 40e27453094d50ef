"""What nginx will do to a stream, and a real nginx to try it on."""
