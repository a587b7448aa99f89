"""What a call for a lent GPU measures, section by section."""
