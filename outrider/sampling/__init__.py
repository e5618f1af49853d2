"""Pure functions: distributions, noise, acceptance, endings."""
