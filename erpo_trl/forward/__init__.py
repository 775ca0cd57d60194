"""How the policy's forwards are run: rows that share a prompt run it once."""
