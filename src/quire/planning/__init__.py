"""Planning: what schedules and places without a model."""
