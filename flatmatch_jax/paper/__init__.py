"""The paper's tables, as runs and what they cost."""
