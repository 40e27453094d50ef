"""What a deployed proxy does to a stream: a matrix of calibrated streams, and the mechanism that explains it."""
