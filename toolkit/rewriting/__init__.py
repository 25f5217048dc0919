"""Rules, the driver that applies them, and why a pattern nearly matched."""
