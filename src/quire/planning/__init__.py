"""Planning: scheduling without a model."""
