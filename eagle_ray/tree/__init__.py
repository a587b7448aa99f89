"""Draft trees as tensors: expansion, budget, acceptance, static trees and merging."""
