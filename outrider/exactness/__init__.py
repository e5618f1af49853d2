"""Is what a running system says exactly what its target model says? Checks with figures."""
