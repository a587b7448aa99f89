"""Drafters from other papers, to compare with."""
