"""Which tokens each head keeps: rules, decisions, and the pages that are left of a path."""
