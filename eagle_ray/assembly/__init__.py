"""Build an engine from a configuration: find models, place them on devices, plan memory and workers."""
