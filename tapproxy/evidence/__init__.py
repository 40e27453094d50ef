"""What stands beside the stream: engines' metrics pages, the host, cards, spans, logs. Each becomes Samples."""
