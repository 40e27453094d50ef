"""From records to a named cause."""
