"""Records of what was used when, from which policies are compared and plans are made."""
