"""The engine without a model and without bytes, under a clock that events move: the real scheduler, cache manager,
prefix tree, router and agents. Steps and transfers take the time that a latency model says.
"""
