"""Several instances: who computes a prompt, who decodes it, and how its cache gets there."""
