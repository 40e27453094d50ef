"""What stands beside the stream: engines, hosts, cards, spans and logs, read as samples."""
