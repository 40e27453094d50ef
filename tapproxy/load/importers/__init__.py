"""Results of other load tools, read, put by the same definitions, and joined to a tap's records."""
