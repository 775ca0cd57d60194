"""The environment side of ERPO: query likelihood, its drift from the reference, query weights and the reference table."""
