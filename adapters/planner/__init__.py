"""What systems cost on a machine: predicted from its rates, measured, and tuned."""
