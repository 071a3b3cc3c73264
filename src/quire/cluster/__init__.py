"""Several instances as one engine: routing, the hand-over of caches, and the supervision of instances."""
