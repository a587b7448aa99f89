"""Making drafts better: the embedded pair from nothing, and EAGLE heads for a given target. torch only, no engine."""
