"""From a configuration to models on devices and an engine: hub, placement, plans of memory and of workers."""
