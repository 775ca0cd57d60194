"""The action side: trust regions of DPPO, SPO and DRPO as weights on the policy gradient."""
